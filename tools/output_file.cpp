#include "output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/base.h"

namespace offload::tools {

void check_output_path(std::string_view flag, const std::string& path) {
  const auto refuse = [&](std::string_view why) {
    throw_error(ErrorCode::usage, "{} {}: {}; give the name of a file to write", flag, printable(path, 4096), why);
  };
  if (path.empty()) refuse("the name is empty");
  struct stat status {};
  // The file is replaced whole when it is done, which must not happen to a device, a pipe, a link or a folder.
  if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) refuse("exists and is no regular file");
}

OutputFile::OutputFile(std::string_view flag, std::string path)
    : flag_(flag), path_(std::move(path)), partial_path_(fmt::format("{}.{}.partial", path_, getpid())), file_(-1) {
  check_output_path(flag_, path_);
  file_ = FileDescriptor(open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file_.get() < 0 && errno == EEXIST)
    throw_error(ErrorCode::usage,
                "{} {}: another output has that name, or an earlier run left {}; give each a name of its own", flag_,
                printable(path_, 4096), printable(partial_path_, 4096));
  if (file_.get() < 0) throw_error(ErrorCode::usage, "{} {}: {}", flag_, printable(path_, 4096), std::strerror(errno));
}

OutputFile::~OutputFile() {
  if (file_.get() >= 0 && !is_finished_) unlink(partial_path_.c_str());
}

void OutputFile::fail() const {
  throw_error(ErrorCode::resource, "{} {}: {}", flag_, printable(path_, 4096), std::strerror(errno));
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void OutputFile::overwrite(int64_t offset, std::string_view text) {
  if (pwrite(file_.get(), text.data(), text.size(), offset) != static_cast<ssize_t>(text.size())) fail();
}

void OutputFile::finish() {
  if (std::rename(partial_path_.c_str(), path_.c_str()) != 0) fail();
  is_finished_ = true;
}

}  // namespace offload::tools
