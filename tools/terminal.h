// What a program of this project does with its terminal: Ctrl-C and its like, standard output that may close, progress
// of a load, lines typed by a user.
//
// Text for the user's next program goes to standard output through write_output(), everything else to standard error
// through say(). No escape codes and no carriage returns unless standard error is a terminal. Everything here belongs
// to the main thread, but interrupted(), which any thread may ask.
#ifndef OFFLOAD_TOOLS_TERMINAL_H_
#define OFFLOAD_TOOLS_TERMINAL_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace offload::tools {

// Before anything else: gives closed standard descriptors a place (so that no file of ours becomes one of them), has
// Ctrl-C, SIGTERM and SIGHUP noted instead of killing, and a closed pipe reported by write instead of killing.
void prepare_process();

// True from a Ctrl-C until clear_interrupt(); a second Ctrl-C in that time kills the program. True for good from a
// SIGTERM or SIGHUP on.
bool interrupted();
void clear_interrupt();
// What a shell shows for death by the signal that came: 130, or 143 and 129.
int interrupted_exit();
// Throws Error{interrupted} when interrupted().
void stop_if_interrupted();

// Waits until `fd` can be read or has ended. False when a Ctrl-C came first.
bool wait_readable(int fd);

// The reader of standard output has gone: the program ends quietly with kClosedOutputExit.
struct OutputClosed {};
inline constexpr int kClosedOutputExit = 141;  // what a shell shows for death by SIGPIPE

// Unbuffered. Throws OutputClosed, or Error{resource} naming the system's reason.
void write_output(std::string_view text);

// One line to standard error, "PROGRAM: text". Failures are ignored: there is nobody left to tell.
void say(std::string_view program, std::string_view text);
// Text to standard error as it is.
void write_error(std::string_view text);

// A bar that redraws itself on a terminal; elsewhere the first line, at most one a second, and the last.
class LoadProgress {
 public:
  explicit LoadProgress(std::string program, std::string model);
  void update(int64_t done_bytes, int64_t total_bytes);
  // Removes the bar and says what was loaded.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  std::string program_, model_;
  bool is_terminal_;
  bool bar_is_open_ = false;
  int64_t total_bytes_ = 0;
  Clock::time_point start_ = Clock::now(), last_shown_{};
};

// Lines from standard input; Ctrl-C interrupts the wait.
class LineReader {
 public:
  enum class Outcome { line, end, interrupted };
  Outcome read(std::string& line);

 private:
  std::string buffer_;
  bool at_end_ = false;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_TERMINAL_H_
