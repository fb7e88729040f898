#include "logits_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/base.h"

namespace offload::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

// u64 length and a JSON header padded with blanks to a fixed size, so that it can be written last. The longest header,
// with every number at 19 digits, has 220 bytes.
constexpr size_t kHeaderBytes = 256;

std::string header(int64_t rows, int64_t vocab) {
  const int64_t logits_bytes = rows * vocab * 4, end = logits_bytes + rows * 4;
  std::string json = fmt::format(R"({{"logits":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}},)"
                                 R"("ids":{{"dtype":"I32","shape":[{}],"data_offsets":[{},{}]}}}})",
                                 rows, vocab, logits_bytes, rows, logits_bytes, end);
  const uint64_t size = kHeaderBytes - sizeof(uint64_t);
  OFL_ASSERT(json.size() <= size);
  json.resize(size, ' ');
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + json;
}

}  // namespace

void check_logits_path(const std::string& path) {
  const auto refuse = [&](std::string_view why) {
    throw_error(ErrorCode::usage, "--logits-out {}: {}; give the name of a file to write", printable(path, 4096), why);
  };
  if (path.empty()) refuse("the name is empty");
  struct stat status {};
  // The file is replaced whole when it is done, which must not happen to a device, a pipe, a link or a folder.
  if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) refuse("exists and is no regular file");
}

LogitsFile::LogitsFile(std::string path, int64_t vocab)
    : path_(std::move(path)),
      partial_path_(fmt::format("{}.{}.partial", path_, getpid())),
      file_(open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)),
      vocab_(vocab) {
  if (file_.get() < 0)
    throw_error(ErrorCode::usage, "--logits-out {}: {}", printable(path_, 4096), std::strerror(errno));
  try {
    write(std::vector<std::byte>(kHeaderBytes));
  } catch (...) {
    unlink(partial_path_.c_str());
    throw;
  }
}

LogitsFile::~LogitsFile() {
  if (!is_finished_) unlink(partial_path_.c_str());
}

void LogitsFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw_error(ErrorCode::resource, "--logits-out {}: {}", printable(path_, 4096), std::strerror(errno));
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void LogitsFile::add(int32_t id, std::span<const float> logits) {
  OFL_ASSERT(static_cast<int64_t>(logits.size()) == vocab_);
  write(std::as_bytes(logits));
  ids_.push_back(id);
}

void LogitsFile::finish() {
  write(std::as_bytes(std::span(ids_)));
  const std::string start = header(static_cast<int64_t>(ids_.size()), vocab_);
  const bool is_whole = pwrite(file_.get(), start.data(), start.size(), 0) == static_cast<ssize_t>(start.size());
  if (!is_whole || std::rename(partial_path_.c_str(), path_.c_str()) != 0)
    throw_error(ErrorCode::resource, "--logits-out {}: {}", printable(path_, 4096), std::strerror(errno));
  is_finished_ = true;
}

}  // namespace offload::tools
