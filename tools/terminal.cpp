#include "terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/base.h"

namespace offload::tools {
namespace {

// A signal handler can reach nothing but statics.
std::atomic<bool> interrupt_pending{false};
std::atomic<int> ending_signal{0};  // SIGTERM or SIGHUP once it came
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);
std::array<int, 2> wake_pipe{-1, -1};  // readable while an interrupt is pending, for poll

extern "C" void on_signal(int number) {
  const int error = errno;
  if (number != SIGINT) ending_signal = number;
  if (!interrupt_pending.exchange(true)) {
    const char byte = 0;
    static_cast<void>(!write(wake_pipe[1], &byte, 1));
  } else if (number == SIGINT) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  errno = error;
}

void occupy_closed_descriptors() {
  for (const int fd : {0, 1, 2}) {
    if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    // Opened the wrong way round for 0 and 1: using them fails as it would have.
    const int opened = open("/dev/null", fd == 1 ? O_RDONLY : O_WRONLY);
    if (opened != fd && opened >= 0) close(opened);
  }
}

std::string gib(int64_t bytes) {
  constexpr double kMib = 1024.0 * 1024.0, kGib = 1024.0 * kMib;
  const auto value = static_cast<double>(bytes);
  return value < kGib ? fmt::format("{:.1f} MiB", value / kMib) : fmt::format("{:.2f} GiB", value / kGib);
}

}  // namespace

void prepare_process() {
  occupy_closed_descriptors();
  if (pipe2(wake_pipe.data(), O_CLOEXEC | O_NONBLOCK) != 0)
    throw_error(ErrorCode::resource, "no pipe for signals: {}", std::strerror(errno));
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  for (const int number : {SIGTERM, SIGHUP}) {
    struct sigaction inherited {};
    sigaction(number, nullptr, &inherited);
    if (inherited.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);  // nohup has a say
  }
  for (const int number : {SIGPIPE, SIGXFSZ}) std::signal(number, SIG_IGN);  // the write says what is wrong
}

bool interrupted() {
  return interrupt_pending.load(std::memory_order_relaxed);
}

int interrupted_exit() {
  const int number = ending_signal;
  return 128 + (number != 0 ? number : SIGINT);
}

void clear_interrupt() {
  if (ending_signal != 0) return;
  std::array<char, 16> bytes;
  while (::read(wake_pipe[0], bytes.data(), bytes.size()) > 0) {
  }
  interrupt_pending = false;
}

void stop_if_interrupted() {
  if (interrupted()) throw Error(ErrorCode::interrupted, "interrupted");
}

bool wait_readable(int fd) {
  std::array<pollfd, 2> waits{{{fd, POLLIN, 0}, {wake_pipe[0], POLLIN, 0}}};
  while (!interrupted()) {
    const int count = poll(waits.data(), waits.size(), -1);
    if (count < 0 && errno != EINTR) return true;  // the read will say what is wrong
    if (count > 0 && waits[0].revents != 0) return !interrupted();
  }
  return false;
}

void write_output(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EPIPE) {
      throw OutputClosed{};
    } else if (errno != EINTR && errno != EAGAIN) {
      throw_error(ErrorCode::resource, "standard output: {}", std::strerror(errno));
    }
  }
}

void write_error(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(STDERR_FILENO, text.data(), text.size());
    if (count < 0 && errno != EINTR) return;
    if (count > 0) text.remove_prefix(static_cast<size_t>(count));
  }
}

void say(std::string_view program, std::string_view text) {
  write_error(fmt::format("{}: {}\n", program, text));
}

LoadProgress::LoadProgress(std::string program, std::string model)
    : program_(std::move(program)), model_(std::move(model)), is_terminal_(isatty(STDERR_FILENO) == 1) {}

void LoadProgress::update(int64_t done_bytes, int64_t total_bytes) {
  constexpr auto kBarInterval = std::chrono::milliseconds(100), kLineInterval = std::chrono::milliseconds(1000);
  const auto now = Clock::now();
  const bool is_first = total_bytes_ == 0;
  total_bytes_ = total_bytes;
  if (is_first && !is_terminal_) say(program_, fmt::format("loading {}, {}", model_, gib(total_bytes)));
  if (is_first) last_shown_ = is_terminal_ ? Clock::time_point{} : now;
  if (now - last_shown_ < (is_terminal_ ? kBarInterval : kLineInterval)) return;
  last_shown_ = now;
  const double part = total_bytes > 0 ? static_cast<double>(done_bytes) / static_cast<double>(total_bytes) : 1;
  if (!is_terminal_)
    return say(program_, fmt::format("loaded {} of {}, {:.0f} %", gib(done_bytes), gib(total_bytes), 100 * part));
  constexpr int kBarColumns = 30;
  const auto full = static_cast<size_t>(std::clamp(part, 0.0, 1.0) * kBarColumns);
  write_error(fmt::format("\r{}: loading [{}{}] {} of {} ", program_, std::string(full, '#'),
                          std::string(kBarColumns - full, '.'), gib(done_bytes), gib(total_bytes)));
  bar_is_open_ = true;
}

void LoadProgress::finish() {
  constexpr std::string_view kClearLine = "\r\x1b[K";
  if (bar_is_open_) write_error(kClearLine);
  bar_is_open_ = false;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  say(program_, fmt::format("loaded {}, {} in {:.1f} s", model_, gib(total_bytes_), seconds));
}

LineReader::Outcome LineReader::read(std::string& line) {
  while (true) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos || (at_end_ && !buffer_.empty())) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end == std::string::npos ? end : end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      return Outcome::line;
    }
    if (at_end_) return Outcome::end;
    if (!wait_readable(STDIN_FILENO)) {
      buffer_.clear();
      return Outcome::interrupted;
    }
    std::array<char, 4096> bytes;
    const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      at_end_ = true;
    } else {
      buffer_.append(bytes.data(), static_cast<size_t>(count));
    }
  }
}

}  // namespace offload::tools
