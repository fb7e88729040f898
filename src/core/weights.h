// Dense weights: from a checkpoint's tensors (or a seed) into device memory, each rank its part.
//
// A loader runs twice over the same blocks: planning validates every name and shape and adds up the bytes, loading
// reads. Nothing is allocated beyond the arena and one staging block. Routed experts are not loaded here (see
// experts.h).
#ifndef OFFLOAD_CORE_WEIGHTS_H_
#define OFFLOAD_CORE_WEIGHTS_H_

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/backend.h"
#include "core/checkpoint.h"
#include "core/checkpoint_names.h"

namespace offload {

// Where dense tensors come from. Names are relative to the text model.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // The tensor's entry after its shape and type were checked. Throws Error{input} naming file, tensor, expected, found.
  virtual TensorEntry require(const std::string& name, std::span<const int64_t> shape) const = 0;
  virtual void read(const TensorEntry& tensor, int64_t byte_offset, std::span<std::byte> out) const = 0;
  // The checkpoint behind it, or null when the weights are made up.
  virtual const TextTensors* tensors() const = 0;
  // The files behind tensors(), for readers that queue their own reads; null when read() is the only way.
  virtual const Checkpoint* checkpoint() const { return nullptr; }
};

// `checkpoint` and `tensors` outlive the source.
std::unique_ptr<WeightSource> checkpoint_source(const Checkpoint& checkpoint, const TextTensors& tensors);

// Deterministic weights of any shape asked for, BF16: matrices uniform with variance 1 / columns, vectors uniform in
// +-0.1. Element i of a tensor depends on the seed, the name and i alone.
std::unique_ptr<WeightSource> dummy_source(uint64_t seed);
void fill_dummy(uint64_t seed, std::string_view name, int64_t columns, int64_t first_element, std::span<bf16> out);

struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

// A part of one matrix [rows, columns] in the file; empty row ranges mean all rows.
struct MatrixPart {
  std::string name;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<Range> row_ranges = {};
  Range column_range = {};  // count 0: all columns
};

class WeightLoader {
 public:
  // With a measuring arena nothing is read. `progress` is told the bytes just loaded; it may throw to stop the load.
  WeightLoader(const WeightSource& source, Backend& backend, Arena& arena,
               std::function<void(int64_t bytes)> progress = {});

  // The parts' rows one below the other: [sum of rows, columns], BF16 when every part is BF16 in the file, else F32.
  // REQUIRES: all parts have equally many columns after slicing.
  Tensor matrix(std::initializer_list<MatrixPart> parts);

  // A tensor of any shape flattened to F32 [elements of the ranges over its first dimension * rest]; for norms and
  // gates.
  Tensor vector(const std::string& name, std::initializer_list<int64_t> shape, std::vector<Range> ranges = {});

  // A value that is computed, not read: F32 [n].
  Tensor constant(std::span<const float> values);

  const WeightSource& source() const { return source_; }
  Backend& backend() const { return backend_; }
  bool planning() const { return arena_.measuring(); }

 private:
  void load_rows(const TensorEntry& entry, Range rows, Range columns, int64_t columns_in_file, const Tensor& out);

  const WeightSource& source_;
  Backend& backend_;
  Arena& arena_;
  std::function<void(int64_t)> progress_;
  std::vector<std::byte> staging_, converted_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_WEIGHTS_H_
