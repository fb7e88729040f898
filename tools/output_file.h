// OutputFile: a file of results that appears whole or not at all.
//
// The bytes go to PATH.PID.partial, which takes the place of PATH in finish(); without finish() nothing is left behind
// and an older PATH stays as it was. Opened before the work whose results it takes, it finds out early that nothing can
// be written there. Refuses a PATH that is no regular file: devices, pipes and links are not replaced. Confined to one
// thread.
#ifndef OFFLOAD_TOOLS_OUTPUT_FILE_H_
#define OFFLOAD_TOOLS_OUTPUT_FILE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/checkpoint.h"

namespace offload::tools {

// What can be told without touching the file system's contents. Throws Error{usage} naming the flag, the path and why.
void check_output_path(std::string_view flag, const std::string& path);

class OutputFile {
 public:
  // `flag`, as typed by the user, outlives the file. Throws Error{usage} as check_output_path() does, or with the
  // system's reason.
  OutputFile(std::string_view flag, std::string path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  const std::string& path() const { return path_; }
  // Behind what was written before; `overwrite` replaces bytes that were. Throw Error{resource}.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void overwrite(int64_t offset, std::string_view text);
  void finish();

 private:
  [[noreturn]] void fail() const;

  std::string_view flag_;
  std::string path_, partial_path_;
  FileDescriptor file_;
  bool is_finished_ = false;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_OUTPUT_FILE_H_
