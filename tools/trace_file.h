// TraceFile: the file of --trace, of a real run and of a simulated one.
#ifndef OFFLOAD_TOOLS_TRACE_FILE_H_
#define OFFLOAD_TOOLS_TRACE_FILE_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "offload/trace.h"
#include "output_file.h"

namespace offload::tools {

// Room for events of all lanes together; some 130 MB of JSON.
inline constexpr int64_t kTraceEvents = int64_t{1} << 20;

class TraceFile {
 public:
  // Without a path nothing is written. Throws Error{usage} when nothing can be written there.
  TraceFile(std::string_view program, const std::optional<std::string>& path);

  // Says in one line on standard error when events were dropped.
  void write(std::span<const TraceBuffer* const> buffers);

 private:
  std::string_view program_;
  std::optional<OutputFile> file_;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_TRACE_FILE_H_
