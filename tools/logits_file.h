// LogitsFile: `logits` F32 [rows, vocab] and `ids` I32 [rows] as one safetensors file, written row by row.
//
// Appears in finish(), as an OutputFile does. Memory: four bytes a row. Confined to one thread.
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

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_LOGITS_FILE_H_
