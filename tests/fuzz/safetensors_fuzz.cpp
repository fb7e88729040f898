// Any bytes as a safetensors file, and any bytes as its header: an Error or tensors that cover the data exactly.
//
// Corpus: tests/data/safetensors. Run: ninja -C build-fuzz safetensors_fuzz &&
//   build-fuzz/tests/safetensors_fuzz -max_total_time=60 CORPUS tests/data/safetensors
#include <algorithm>
#include <cstdint>

#include "core/safetensors.h"

using namespace offload;

namespace {

void check_tensors(std::string_view json, int64_t file_bytes) {
  int64_t end = 8 + static_cast<int64_t>(json.size());
  std::vector<std::string> names;
  for (const TensorEntry& tensor : parse_safetensors_header(json, file_bytes, "fuzz")) {
    int64_t bytes = dtype_bytes(tensor.dtype);
    for (const int64_t size : tensor.shape) bytes *= size;
    OFL_ASSERT(tensor.offset == end && tensor.bytes == bytes && bytes >= 0);
    end += bytes;
    names.push_back(tensor.name);
  }
  OFL_ASSERT(end == file_bytes);
  std::sort(names.begin(), names.end());
  OFL_ASSERT(std::adjacent_find(names.begin(), names.end()) == names.end());
}

template <typename Call>
void expect_value_or_error(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    OFL_ASSERT(error.code() == ErrorCode::input && error.message().starts_with("fuzz: "));
    OFL_ASSERT(error.message().find('\n') == std::string::npos && error.message().size() < 2000);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto bytes = static_cast<int64_t>(size);
  expect_value_or_error([&] {
    const int64_t header = safetensors_header_bytes(file.substr(0, kFilePrefixBytes), bytes, "fuzz");
    check_tensors(file.substr(8, static_cast<size_t>(header)), bytes);
  });
  // Without the length in front a mutation reaches the parser more often; the first byte chooses the data's size.
  if (size == 0) return 0;
  expect_value_or_error([&] { check_tensors(file.substr(1), 8 + bytes - 1 + data[0]); });
  return 0;
}
