#include "child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <spawn.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <stdexcept>

extern "C" char** environ;

namespace offload {
namespace {

constexpr double kLimitSeconds = 240;  // a hung child, not a slow machine

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void check(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Ends {
  int ours = -1, theirs = -1;
};

Ends make_pipe(bool child_reads) {
  std::array<int, 2> fds{};
  check(pipe2(fds.data(), O_CLOEXEC) == 0, "pipe2");
  return child_reads ? Ends{fds[1], fds[0]} : Ends{fds[0], fds[1]};
}

Ends make_terminal() {
  Ends ends;
  check(openpty(&ends.ours, &ends.theirs, nullptr, nullptr, nullptr) == 0, "openpty");
  termios mode{};
  check(tcgetattr(ends.theirs, &mode) == 0, "tcgetattr");
  mode.c_lflag &= ~static_cast<tcflag_t>(ECHO);
  mode.c_oflag &= ~static_cast<tcflag_t>(OPOST);
  check(tcsetattr(ends.theirs, TCSANOW, &mode) == 0, "tcsetattr");
  for (const int fd : {ends.ours, ends.theirs}) check(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0, "fcntl");
  return ends;
}

void close_fd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

}  // namespace

Child::Child(const std::string& program, const std::vector<std::string>& arguments, Wiring wiring) {
  // A child that ends early must not end the test.
  std::signal(SIGPIPE, SIG_IGN);
  Ends in, out_ends, err_ends;
  if (wiring == Wiring::terminal) {
    in = out_ends = err_ends = make_terminal();
    out_ = in_ = in.ours;
  } else {
    in = make_pipe(true);
    out_ends = make_pipe(false);
    err_ends = wiring == Wiring::error_terminal ? make_terminal() : make_pipe(false);
    in_ = in.ours;
    out_ = out_ends.ours;
    err_ = err_ends.ours;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.theirs, 0);
  posix_spawn_file_actions_adddup2(&actions, out_ends.theirs, 1);
  posix_spawn_file_actions_adddup2(&actions, err_ends.theirs, 2);
  posix_spawnattr_t attributes;  // the child must not inherit that SIGPIPE is ignored
  posix_spawnattr_init(&attributes);
  sigset_t defaults;
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE);
  sigaddset(&defaults, SIGINT);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int failed = posix_spawn(&pid_, program.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close_fd(in.theirs);
  if (wiring != Wiring::terminal) {
    close_fd(out_ends.theirs);
    close_fd(err_ends.theirs);
  }
  check(failed == 0, "posix_spawn");
}

Child::~Child() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (in_ == out_) in_ = -1;
  close_fd(in_);
  close_fd(out_);
  close_fd(err_);
}

void Child::type(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(in_, text.data(), text.size());
    if (count < 0 && errno == EPIPE) return;
    check(count > 0, "write to the child");
    text.remove_prefix(static_cast<size_t>(count));
  }
}

void Child::close_input() {
  close_fd(in_);
}

void Child::close_output() {
  close_fd(out_);
}

void Child::interrupt() {
  send(SIGINT);
}

void Child::send(int number) {
  check(kill(pid_, number) == 0, "kill");
}

// Reads what there is, at most a tenth of a second. False when both streams have ended.
bool Child::pump() {
  std::array<pollfd, 2> waits{{{out_, POLLIN, 0}, {err_, POLLIN, 0}}};
  if (out_ < 0 && err_ < 0) return false;
  if (poll(waits.data(), waits.size(), 100) <= 0) return true;
  const auto take = [](const pollfd& wait, int& fd, std::string& text) {
    if (fd < 0 || wait.revents == 0) return false;
    std::array<char, 1 << 16> bytes;
    const ssize_t count = read(fd, bytes.data(), bytes.size());
    if (count > 0) text.append(bytes.data(), static_cast<size_t>(count));
    return count <= 0;  // a terminal whose other end is closed answers EIO
  };
  if (take(waits[0], out_, out)) {
    if (in_ == out_) in_ = -1;
    close_fd(out_);
  }
  if (take(waits[1], err_, err)) close_fd(err_);
  return true;
}

bool Child::wait_for(std::string_view text, const std::string& stream, size_t& seen) {
  const double end = now_s() + kLimitSeconds;
  while (true) {
    const size_t found = stream.find(text, seen);
    if (found != std::string::npos) {
      seen = found + text.size();
      return true;
    }
    if (now_s() > end || !pump()) return stream.find(text, seen) != std::string::npos;
  }
}

double Child::finish() {
  const double start = now_s();
  int status = 0;
  pid_t ended = 0;
  while (ended == 0) {
    if (!pump()) usleep(1000);  // both streams have ended; the process is about to
    ended = waitpid(pid_, &status, WNOHANG);
    if (ended == 0 && now_s() - start > kLimitSeconds) kill(pid_, SIGKILL);
  }
  const double seconds = now_s() - start;
  while (pump()) {
    std::array<pollfd, 2> waits{{{out_, POLLIN, 0}, {err_, POLLIN, 0}}};
    if (poll(waits.data(), waits.size(), 0) == 0) break;
  }
  pid_ = -1;
  if (WIFEXITED(status)) exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) signal = WTERMSIG(status);
  return seconds;
}

Run run_program(const std::string& program, const std::vector<std::string>& arguments, std::string_view input) {
  Child child(program, arguments);
  child.type(input);
  child.close_input();
  const double seconds = child.finish();
  return {child.exit_code, child.signal, child.out, child.err, seconds};
}

}  // namespace offload
