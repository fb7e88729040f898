// Cuts a template into tokens, with the reference environment's white-space rules: trim_blocks, lstrip_blocks, no final
// newline, and the - and + marks. Comments vanish here; raw blocks come out as data.
//
// Throws Error{input} with the line for an unclosed tag, comment, string or bracket and for characters and escapes that
// the language lacks. Thread-safe: no state.
#ifndef OFFLOAD_CORE_JINJA_LEXER_H_
#define OFFLOAD_CORE_JINJA_LEXER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace offload::jinja {

enum class TokenType : uint8_t {
  data,
  variable_begin,
  variable_end,
  block_begin,
  block_end,
  name,
  string,
  integer,
  real,
  op,
  end,
};

struct Token {
  TokenType type;
  std::string text;  // data, the name, the string's content, the operator
  int64_t integer = 0;
  double real = 0;
  int line = 0;
};

// Throws the Error{input} of a fault in a template's source.
[[noreturn]] void throw_at(std::string_view origin, int line, std::string_view message);

// REQUIRES: `source` is valid UTF-8. The last token is `end`.
std::vector<Token> tokenize(std::string_view source, std::string_view origin);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_LEXER_H_
