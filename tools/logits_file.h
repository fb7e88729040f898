// LogitsFile: `logits` F32 [rows, vocab] and `ids` I32 [rows] as one safetensors file, written row by row.
//
// The rows go to a file beside the wanted one, which takes its place in finish(); without finish() nothing is left
// behind. Memory: four bytes a row. Confined to one thread.
#ifndef OFFLOAD_TOOLS_LOGITS_FILE_H_
#define OFFLOAD_TOOLS_LOGITS_FILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint.h"

namespace offload::tools {

// Throws Error{usage} for a path that a file must not be put at; before anything is loaded.
void check_logits_path(const std::string& path);

class LogitsFile {
 public:
  // Throws Error{usage} naming the flag, the path and the system's reason when it cannot be written.
  LogitsFile(std::string path, int64_t vocab);
  LogitsFile(const LogitsFile&) = delete;
  LogitsFile& operator=(const LogitsFile&) = delete;
  ~LogitsFile();

  // `id` is the token that the row consumed; logits: F32 [vocab]. Throws Error{resource}.
  void add(int32_t id, std::span<const float> logits);
  void finish();

 private:
  void write(std::span<const std::byte> bytes);

  std::string path_, partial_path_;
  FileDescriptor file_;
  int64_t vocab_;
  std::vector<int32_t> ids_;
  bool is_finished_ = false;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_LOGITS_FILE_H_
