// The tensors of a model on disk: one .safetensors file, or a folder that holds model.safetensors or shards with
// model.safetensors.index.json.
//
// Owns the open files until it is destroyed. open() reads headers only and verifies every tensor's range against its
// file's size; after that a read is a pread, never a mapping, so a file cut short later is an Error and never a signal.
// With an index only the tensors that it names are visible, each in the file that it names; further tensors of a shard
// are left out and reported in warnings(). Refuses GGUF for now. Does not read config.json and knows no model's names
// (see checkpoint_names.h). Thread-safe once open: reads share no file position.
#ifndef OFFLOAD_CORE_CHECKPOINT_H_
#define OFFLOAD_CORE_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base.h"
#include "core/dtype.h"

namespace offload {

// Where one tensor lies. Row-major without strides; the first byte may have any alignment.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;  // empty: one scalar; a zero dimension: no bytes
  int file_index = 0;
  int64_t offset = 0;  // bytes from the start of the file, not of its data section
  int64_t bytes = 0;   // product(shape) * dtype_bytes(dtype)
};

// An open file, closed on destruction.
class FileDescriptor {
 public:
  explicit FileDescriptor(int value) : value_(value) {}
  FileDescriptor(FileDescriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~FileDescriptor();

  int get() const { return value_; }

 private:
  int value_;
};

// For tests: asked before each read of a checkpoint's files, from the thread that reads; the errno with which it shall
// fail, 0 for none.
using ReadFault = std::function<int()>;

class Checkpoint {
 public:
  // `path`: a folder or one file. Throws Error naming every file that is missing, empty or malformed.
  static Checkpoint open(const std::string& path, ReadFault fault = {});

  // What open() was given.
  const std::string& path() const { return path_; }

  // All visible tensors, sorted by name.
  std::span<const TensorEntry> tensors() const { return tensors_; }

  const TensorEntry* find(std::string_view name) const;

  // Throws Error{input} naming the missing tensor, the checkpoint and the nearest names it has.
  const TensorEntry& at(std::string_view name) const;

  // Fills `out` with the tensor's bytes from `byte_offset` on. REQUIRES: the range lies inside the tensor, which is one
  // of tensors(). Throws Error{input} naming file, tensor and offset when the system fails or the file has become
  // shorter.
  void read(const TensorEntry& tensor, int64_t byte_offset, std::span<std::byte> out) const;

  // A whole tensor of F32, BF16, F16 or F64, rounded once to nearest even. For small tensors: the result is the
  // caller's memory, beyond it 64 KiB are used. Throws Error{input} naming the tensor when it has another type.
  std::vector<float> read_as_f32(const TensorEntry& tensor) const;
  std::vector<bf16> read_as_bf16(const TensorEntry& tensor) const;

  // A whole I64 tensor, bit for bit. Throws Error{input} when it has another type.
  std::vector<int64_t> read_i64(const TensorEntry& tensor) const;

  int files() const { return static_cast<int>(files_.size()); }
  const std::string& file_path(int file_index) const;
  // For readers that queue their own reads (O_RDONLY, no O_DIRECT). Owned by this checkpoint.
  int file_descriptor(int file_index) const;

  // One line each, for a log: what was tolerated.
  std::span<const std::string> warnings() const { return warnings_; }

 private:
  struct File {
    std::string path;
    FileDescriptor descriptor;
    int64_t bytes = 0;
  };

  Checkpoint(std::string path, ReadFault fault) : path_(std::move(path)), fault_(std::move(fault)) {}
  static File open_file(std::string path);
  int64_t read_at(int descriptor, int64_t offset, std::span<std::byte> out) const;
  std::string read_text(const File& file, int64_t offset, int64_t bytes) const;
  std::vector<TensorEntry> read_header(const File& file) const;
  void open_folder();
  void open_sharded(const std::string& index_path);
  void open_single(const std::string& file_path);
  void add_shard(File file, std::span<const std::string> names, std::string_view index_path);
  void sort_tensors();

  std::string path_;
  ReadFault fault_;
  std::vector<File> files_;
  std::vector<TensorEntry> tensors_;
  std::vector<std::string> warnings_;
};

// Throws the Error{input} of Checkpoint::at(): `origin` has no tensor `name`; its nearest of `names` are quoted.
[[noreturn]] void throw_missing_tensor(std::string_view origin, std::string_view name,
                                       std::span<const std::string_view> names);

}  // namespace offload

#endif  // OFFLOAD_CORE_CHECKPOINT_H_
