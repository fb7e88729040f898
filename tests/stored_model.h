// A checkpoint in memory that a test changes and writes to a folder of its own: config.json and .safetensors files.
//
// The writer knows nothing of the library's reader beyond the names of types.
#ifndef OFFLOAD_TESTS_STORED_MODEL_H_
#define OFFLOAD_TESTS_STORED_MODEL_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/json.h"

namespace offload {

// A folder that is gone at the end of the test.
class StoredFolder {
 public:
  StoredFolder();
  ~StoredFolder();
  StoredFolder(const StoredFolder&) = delete;
  StoredFolder& operator=(const StoredFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  void write(std::string_view name, std::string_view text) const;

 private:
  std::string path_;
};

struct StoredTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  int64_t elements() const { return static_cast<int64_t>(bytes.size()) / dtype_bytes(dtype); }
  // Of BF16 and F32.
  float value(int64_t i) const;
  void set(int64_t i, float value);
  // The same values as F32.
  StoredTensor as_f32() const;
};

using StoredTensors = std::map<std::string, StoredTensor>;

// `tensors` one after another in the order of their names.
void write_safetensors(const std::string& path, const StoredTensors& tensors);

// Rows of `parts`, one below the other. REQUIRES: equal types and equal shapes but for the first dimension.
StoredTensor join_rows(const std::vector<const StoredTensor*>& parts);

class StoredModel {
 public:
  static StoredModel read(const std::string& model_dir);
  // The bundled demo.
  static StoredModel demo();

  Json config;
  StoredTensors tensors;

  StoredTensor& at(const std::string& name);
  StoredTensor take(const std::string& name);
  // Gives each tensor the name that `change` makes of its own.
  void rename(const std::function<std::string(const std::string&)>& change);
  // Calls `change` for each tensor whose name ends so; throws when there is none.
  void for_each_ending(std::string_view ending, const std::function<void(StoredTensor&)>& change);

  // In one file, or spread over `files` with an index.
  void write(const StoredFolder& folder, int files = 1) const;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_STORED_MODEL_H_
