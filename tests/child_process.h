// Runs a program as its user would: with pipes or a terminal, a time limit, and Ctrl-C. For tests of the tools.
//
// A child that outlives its limit is killed and counts as ended by a signal. One thread; not for the library.
#ifndef OFFLOAD_TESTS_CHILD_PROCESS_H_
#define OFFLOAD_TESTS_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

namespace offload {

// What the three standard descriptors are.
enum class Wiring {
  pipes,           // three pipes
  terminal,        // one pseudo-terminal for all; its output is in `out`
  error_terminal,  // stderr is a terminal, the others are pipes
};

class Child {
 public:
  Child(const std::string& program, const std::vector<std::string>& arguments, Wiring wiring = Wiring::pipes);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();

  void type(std::string_view text);
  void close_input();
  void close_output();  // our end of its stdout
  void interrupt();     // SIGINT
  void send(int number);
  // Whether `text` shows up in what was written to stdout (stderr) after what earlier waits matched.
  bool wait_for_output(std::string_view text) { return wait_for(text, out, out_seen_); }
  bool wait_for_error(std::string_view text) { return wait_for(text, err, err_seen_); }
  // Reads until the child has ended. Returns the seconds that this took.
  double finish();

  std::string out, err;
  int exit_code = -1;  // -1: ended by `signal`
  int signal = 0;

 private:
  bool wait_for(std::string_view text, const std::string& stream, size_t& seen);
  bool pump();

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, err_ = -1;
  size_t out_seen_ = 0, err_seen_ = 0;
};

struct Run {
  int exit_code, signal;
  std::string out, err;
  double seconds;
};
// With `input` on its standard input.
Run run_program(const std::string& program, const std::vector<std::string>& arguments, std::string_view input = "");

}  // namespace offload

#endif  // OFFLOAD_TESTS_CHILD_PROCESS_H_
