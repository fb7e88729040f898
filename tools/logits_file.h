// LogitsFile: `logits` F32 [rows, vocab] and `ids` I32 [rows] as one safetensors file, written row by row.
//
// Appears in finish(), as an OutputFile does. Memory: four bytes a row. Confined to one thread. read_logits_file()
// takes such a file whole, from wherever it comes.
#ifndef OFFLOAD_TOOLS_LOGITS_FILE_H_
#define OFFLOAD_TOOLS_LOGITS_FILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "output_file.h"

namespace offload::tools {

class LogitsFile {
 public:
  // Throws Error{usage} naming --logits-out, the path and the reason when it cannot be written.
  LogitsFile(std::string path, int64_t vocab);

  // `id` is the token that the row consumed; logits: F32 [vocab]. Throws Error{resource}.
  void add(int32_t id, std::span<const float> logits);
  void finish();

 private:
  OutputFile file_;
  int64_t vocab_;
  std::vector<int32_t> ids_;
};

struct ReferenceLogits {
  std::vector<int32_t> ids;   // the token that each row consumed
  std::vector<float> logits;  // [rows, vocab]
};
// Throws Error{usage} naming `flag` when the tensors are missing, of another type or shape, or an id is outside
// `vocab`; Error{input} when the file cannot be read.
ReferenceLogits read_logits_file(std::string_view flag, const std::string& path, int64_t vocab);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_LOGITS_FILE_H_
