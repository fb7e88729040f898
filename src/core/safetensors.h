// The header of one safetensors file: u64 length N (little-endian), N bytes of JSON, then the data section.
//
// Owns no file: the caller reads the bytes. Refuses everything that the reference library refuses, and says what is
// wrong: lengths past the end, repeated names, spans that do not fit their shape, overlaps, gaps, missing and trailing
// bytes. Refuses sub-byte types by name. Drops `__metadata__` after checking it. Thread-safe: no state.
#ifndef OFFLOAD_CORE_SAFETENSORS_H_
#define OFFLOAD_CORE_SAFETENSORS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint.h"

namespace offload {

// The reference library's limit on N.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;

// More dimensions than any tensor has; bounds the memory that a hostile header can ask for.
inline constexpr int kTensorRankMax = 16;

// How much of a file's start the two functions below look at.
inline constexpr int64_t kFilePrefixBytes = 64;

// What stands in place of weights, with its remedy, when `prefix` (the first kFilePrefixBytes of a file, or all of it)
// is text: a Git LFS pointer, a web page, other text.
std::optional<std::string> text_instead_of_weights(std::string_view prefix);

// N of the file that starts with `prefix`. Throws Error{input} when the file cannot hold a header of N bytes.
int64_t safetensors_header_bytes(std::string_view prefix, int64_t file_bytes, std::string_view origin);

// The tensors that the header `json` (exactly N bytes) declares, in file order; file_index is 0, offsets count from the
// start of the file. Their ranges are disjoint and cover the data section exactly. Throws Error{input} naming `origin`
// and the tensor. O(n log n) in the number of tensors.
std::vector<TensorEntry> parse_safetensors_header(std::string_view json, int64_t file_bytes, std::string_view origin);

}  // namespace offload

#endif  // OFFLOAD_CORE_SAFETENSORS_H_
