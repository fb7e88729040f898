// The vocabulary of failure: Error for what ends a user's operation, OFL_ASSERT for bugs.
//
// Refuses to be a logging or string library. Thread-safe: no state.
#ifndef OFFLOAD_CORE_BASE_H_
#define OFFLOAD_CORE_BASE_H_

#include <fmt/core.h>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace offload {

// Which exit code or reply an Error becomes. `usage` is the caller's command line or request, `input` a file's content,
// `resource` something the machine lacks, `device` a device fault, `interrupted` the user's own stop.
enum class ErrorCode { usage, input, resource, device, interrupted, internal };

// Ends what the user asked for. The message is one line: what, where, expected, found, and what to do.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

  // Returns the same error with "context: " put before the message; used while the error travels up.
  Error with_context(std::string_view context) const { return {code_, fmt::format("{}: {}", context, message_)}; }

 private:
  ErrorCode code_;
  std::string message_;
};

// throw_error(ErrorCode::input, "{}: tensor {} is missing", file, name)
template <typename... Args>
[[noreturn]] void throw_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Process exit code of a main that ends with `code`: 1 failed, 2 bad usage, 130 interrupted.
int exit_code(ErrorCode code);

// Returns `text` with bytes that are no printable UTF-8 (controls, invalid sequences) shown as \xNN and cut to
// `bytes_max` bytes, so that hostile names cannot break a terminal or a log line.
std::string printable(std::string_view text, size_t bytes_max = 200);

// For a message: shortest text that reads back as `value`; a NaN is "nan", whatever its sign bit says.
std::string number_text(double value);

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace offload

// A bug if false; always on. Never used on what a user or a file supplies.
#define OFL_ASSERT(condition) \
  (static_cast<bool>(condition) ? static_cast<void>(0) : ::offload::assertion_failed(#condition, __FILE__, __LINE__))

#endif  // OFFLOAD_CORE_BASE_H_
