#include "trace_file.h"

#include "core/base.h"
#include "terminal.h"

namespace offload::tools {

TraceFile::TraceFile(std::string_view program, const std::optional<std::string>& path) : program_(program) {
  if (path) file_.emplace("--trace", *path);
}

void TraceFile::write(std::span<const TraceBuffer* const> buffers) {
  if (!file_) return;
  file_->write(trace_json(buffers));
  file_->finish();
  int64_t events = 0, dropped = 0;
  for (const TraceBuffer* buffer : buffers) {
    events += buffer->events();
    dropped += buffer->dropped();
  }
  if (dropped > 0)
    say(program_, fmt::format("{}: holds the first {} events; {} later ones did not fit",
                              printable(file_->path(), 4096), events, dropped));
}

}  // namespace offload::tools
