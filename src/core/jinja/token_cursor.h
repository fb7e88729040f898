// TokenCursor: the place in a template's tokens that a parser has reached, and the errors that name it.
#ifndef OFFLOAD_CORE_JINJA_TOKEN_CURSOR_H_
#define OFFLOAD_CORE_JINJA_TOKEN_CURSOR_H_

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base.h"
#include "core/jinja/lexer.h"

namespace offload::jinja {

class TokenCursor {
 public:
  // REQUIRES: `tokens` ends with TokenType::end.
  TokenCursor(std::vector<Token> tokens, std::string origin) : origin_(std::move(origin)), tokens_(std::move(tokens)) {}

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  [[noreturn]] void fail(std::string_view message) const { throw_at(origin_, now().line, message); }

  bool is(TokenType type) const { return now().type == type; }
  bool is_op(std::string_view op) const { return is(TokenType::op) && now().text == op; }
  bool is_word(std::string_view word) const { return is(TokenType::name) && now().text == word; }
  bool skip_op(std::string_view op) {
    if (!is_op(op)) return false;
    ++at_;
    return true;
  }
  bool skip_word(std::string_view word) {
    if (!is_word(word)) return false;
    ++at_;
    return true;
  }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) fail(fmt::format("expected '{}', found {}", op, found()));
  }
  std::string expect_name() {
    if (!is(TokenType::name)) fail(fmt::format("expected a name, found {}", found()));
    return tokens_[at_++].text;
  }
  void expect(TokenType type, std::string_view what) {
    if (!is(type)) fail(fmt::format("expected {}, found {}", what, found()));
    ++at_;
  }
  std::string found() const {
    switch (now().type) {
      case TokenType::data:
        return "text";
      case TokenType::variable_begin:
        return "'{{'";
      case TokenType::variable_end:
        return "'}}'";
      case TokenType::block_begin:
        return "'{%'";
      case TokenType::block_end:
        return "'%}'";
      case TokenType::name:
      case TokenType::op:
        return fmt::format("'{}'", printable(now().text, 60));
      case TokenType::string:
        return "a string";
      case TokenType::integer:
      case TokenType::real:
        return "a number";
      case TokenType::end:
        return "the end of the template";
    }
    return "";
  }

 protected:
  std::string origin_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_TOKEN_CURSOR_H_
