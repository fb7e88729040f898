#include "core/base.h"

#include <cstdio>
#include <cstdlib>

namespace offload {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::usage:
      return 2;
    case ErrorCode::interrupted:
      return 130;
    case ErrorCode::input:
    case ErrorCode::resource:
    case ErrorCode::device:
    case ErrorCode::internal:
      return 1;
  }
  return 1;
}

namespace {

// Length of the valid UTF-8 sequence at text[at], or 0.
size_t utf8_sequence_bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) -> unsigned { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(at + 1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const unsigned second = byte(at + 1);
    if (lead == 0xE0 && second < 0xA0) return 0;
    if (lead == 0xED && second > 0x9F) return 0;
    return continues(at + 1) && continues(at + 2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const unsigned second = byte(at + 1);
    if (lead == 0xF0 && second < 0x90) return 0;
    if (lead == 0xF4 && second > 0x8F) return 0;
    return continues(at + 1) && continues(at + 2) && continues(at + 3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view text, size_t bytes_max) {
  std::string out;
  size_t at = 0;
  while (at < text.size()) {
    if (out.size() >= bytes_max) return out + "...";
    const size_t length = utf8_sequence_bytes(text, at);
    const auto byte = static_cast<unsigned char>(text[at]);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
      ++at;
    } else {
      out.append(text, at, length);
      at += length;
    }
  }
  return out;
}

std::string number_text(double value) {
  return value == value ? fmt::format("{}", value) : "nan";
}

void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "offload: bug: assertion failed at %s:%d: %s\n", file, line, condition);
  std::abort();
}

}  // namespace offload
