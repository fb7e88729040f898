#include "core/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/base.h"
#include "core/jinja/text.h"

namespace offload::jinja {

void throw_at(std::string_view origin, int line, std::string_view message) {
  throw_error(ErrorCode::input, "{}: line {}: {}", origin, line, message);
}

namespace {

constexpr std::string_view kOperators2[] = {"//", "**", "==", "!=", ">=", "<="};
constexpr std::string_view kOperators1 = "+-/*%~[](){}><=.:|,;";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// \r\n and \r become \n, and one final newline goes.
std::string normal_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

std::string_view right_stripped(std::string_view text) {
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0u) == 0x80u) --last;
    size_t at = last;
    if (!is_space(next_code_point(text, at))) break;
    text = text.substr(0, last);
  }
  return text;
}

// Removes white space after the last newline, when there is nothing else there (lstrip_blocks).
std::string_view without_indent(std::string_view text, bool at_line_start) {
  const size_t newline = text.rfind('\n');
  const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
  if (line_begin == 0 && !at_line_start) return text;
  for (size_t at = line_begin; at < text.size();)
    if (!is_space(next_code_point(text, at))) return text;
  return text.substr(0, line_begin);
}

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view origin) : source_(normal_lines(source)), origin_(origin) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) root();
    push(TokenType::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view message) const { throw_at(origin_, line_, message); }
  [[noreturn]] void fail(int line, std::string_view message) const { throw_at(origin_, line, message); }

  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }
  bool starts_with(std::string_view text) const { return std::string_view(source_).substr(at_, text.size()) == text; }
  void advance(size_t count) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<int64_t>(at_),
                                         source_.begin() + static_cast<int64_t>(at_ + count), '\n'));
    at_ += count;
  }
  void push(TokenType type, std::string text) { tokens_.push_back({type, std::move(text), 0, 0, line_}); }
  void push_data(std::string_view text) {
    if (!text.empty()) push(TokenType::data, std::string(text));
  }
  void skip_space() {
    while (at_ < source_.size()) {
      size_t next = at_;
      if (!is_space(next_code_point(source_, next))) return;
      advance(next - at_);
    }
  }

  // Plain text up to the next tag, then the tag.
  void root() {
    size_t tag = at_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        push_data(std::string_view(source_).substr(at_));
        return advance(source_.size() - at_);
      }
      if (const char second = source_[tag + 1]; second == '%' || second == '{' || second == '#') break;
    }
    const char kind = source_[tag + 1];
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    std::string_view text = std::string_view(source_).substr(at_, tag - at_);
    if (sign == '-')
      text = right_stripped(text);
    else if (sign != '+' && kind != '{')
      text = without_indent(text, line_start_);
    push_data(text);
    advance(tag - at_ + 2);
    if (sign == '-' || sign == '+') advance(1);
    if (kind == '#')
      comment();
    else if (kind == '%' && raw())
      return;
    else
      inside_tag(kind == '%');
  }

  // Behind %} of a block or #} of a comment: trim_blocks takes one newline unless the tag ends in +.
  void after_tag(char sign) {
    if (sign == '-')
      skip_space();
    else if (sign != '+' && peek() == '\n')
      advance(1);
    line_start_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  void comment() {
    const int line = line_;
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail(line, "a comment {# is not closed");
    const char last = end > at_ ? source_[end - 1] : '\0';
    advance(end + 2 - at_);
    after_tag(last);
  }

  // Behind "{%": handles a whole raw block, or leaves everything as it was and returns false.
  bool raw() {
    size_t at = at_;
    const auto space = [&] {
      while (at < source_.size() && is_space(static_cast<unsigned char>(source_[at]))) ++at;
    };
    const auto take = [&](std::string_view word) {
      if (std::string_view(source_).substr(at, word.size()) != word) return false;
      at += word.size();
      return true;
    };
    space();
    if (!take("raw")) return false;
    space();
    const bool stripped = take("-%}");
    if (!stripped && !take("%}")) return false;
    const int line = line_;
    advance(at - at_);
    if (stripped) skip_space();
    line_start_ = at_ > 0 && source_[at_ - 1] == '\n';
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 2)) {
      at = tag + 2;
      const char sign = at < source_.size() ? source_[at] : '\0';
      if (sign == '-' || sign == '+') ++at;
      space();
      if (!take("endraw")) continue;
      space();
      const char end_sign = take("-%}") ? '-' : take("+%}") ? '+' : take("%}") ? ' ' : '\0';
      if (end_sign == '\0') continue;
      std::string_view text = std::string_view(source_).substr(at_, tag - at_);
      if (sign == '-')
        text = right_stripped(text);
      else if (sign != '+')
        text = without_indent(text, line_start_);
      push_data(text);
      advance(at - at_);
      after_tag(end_sign);
      return true;
    }
    fail(line, "a raw block has no {% endraw %}");
  }

  // Behind "{{" or "{%" and its sign: tokens up to the matching end.
  void inside_tag(bool block) {
    const int line = line_;
    push(block ? TokenType::block_begin : TokenType::variable_begin, "");
    const std::string_view close = block ? "%}" : "}}";
    std::string brackets;
    for (;;) {
      if (brackets.empty()) {
        char sign = '\0';
        size_t length = 0;
        if (starts_with(close)) {
          length = 2;
        } else if ((peek() == '-' || (block && peek() == '+')) && peek(1) == close[0] && peek(2) == close[1]) {
          sign = peek();
          length = 3;
        }
        if (length > 0) {
          push(block ? TokenType::block_end : TokenType::variable_end, "");
          advance(length);
          if (block) return after_tag(sign);
          if (sign == '-') skip_space();
          line_start_ = source_[at_ - 1] == '\n';
          return;
        }
      }
      if (at_ >= source_.size())
        fail(line, brackets.empty() ? fmt::format("the tag {} is not closed", block ? "{%" : "{{")
                                    : fmt::format("a '{}' in the tag is not closed", brackets.back()));
      token(brackets);
    }
  }

  void token(std::string& brackets) {
    size_t next = at_;
    const char32_t c = next_code_point(source_, next);
    if (is_space(c)) return advance(next - at_);
    if (c < 0x80 && is_digit(static_cast<char>(c))) return number();
    if (is_name_character(c)) return name();
    if (c == '\'' || c == '"') return string(static_cast<char>(c));
    for (const std::string_view op : kOperators2)
      if (starts_with(op)) {
        push(TokenType::op, std::string(op));
        return advance(2);
      }
    if (c >= 0x80 || kOperators1.find(static_cast<char>(c)) == std::string_view::npos)
      fail(fmt::format("unexpected character '{}'", printable(std::string_view(source_).substr(at_, next - at_))));
    const char op = static_cast<char>(c);
    if (op == '(' || op == '[' || op == '{') brackets += op == '(' ? ')' : op == '[' ? ']' : '}';
    if (op == ')' || op == ']' || op == '}') {
      if (brackets.empty()) fail(fmt::format("unexpected '{}'", op));
      if (brackets.back() != op) fail(fmt::format("unexpected '{}', expected '{}'", op, brackets.back()));
      brackets.pop_back();
    }
    push(TokenType::op, std::string(1, op));
    advance(1);
  }

  void name() {
    size_t end = at_;
    while (end < source_.size()) {
      size_t next = end;
      if (!is_name_character(next_code_point(source_, next))) break;
      end = next;
    }
    push(TokenType::name, source_.substr(at_, end - at_));
    advance(end - at_);
  }

  // End of (\d+_)*\d+ from `at`, or `at` when there is none.
  size_t digits_end(size_t at) const {
    size_t end = at;
    while (end < source_.size() && (is_digit(source_[end]) || (end > at && source_[end] == '_' && end + 1 < source_.size() &&
                                                               is_digit(source_[end + 1]))))
      ++end;
    return end;
  }

  void number() {
    // After a dot ("x.0.1") only integers: an index, not a fraction.
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    const size_t whole = digits_end(at_);
    size_t end = whole;
    if (!after_dot) {
      if (end < source_.size() && source_[end] == '.')
        if (const size_t fraction = digits_end(end + 1); fraction > end + 1) end = fraction;
      if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        const size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-') ? 1 : 0;
        if (const size_t exponent = digits_end(end + 1 + sign); exponent > end + 1 + sign) end = exponent;
      }
    }
    if (end > whole) return real(end);
    integer(whole);
  }

  std::string digits(size_t begin, size_t end) const {
    std::string text = source_.substr(begin, end - begin);
    text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
    return text;
  }

  void real(size_t end) {
    const std::string text = digits(at_, end);
    double value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec == std::errc::result_out_of_range) {
      if (text.find("e-") == std::string::npos && text.find("E-") == std::string::npos)
        fail(fmt::format("the number {} is out of range", printable(text, 40)));
      value = 0;
    }
    push(TokenType::real, "");
    tokens_.back().real = value;
    advance(end - at_);
  }

  void integer(size_t decimal_end) {
    int base = 10;
    size_t begin = at_;
    size_t end = decimal_end;
    if (peek() == '0') {
      const char mark = static_cast<char>(peek(1) | 0x20);
      base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
      if (base != 10) {
        begin = at_ + 2;
        end = begin;
        const auto is_base_digit = [&](char c) {
          const char folded = static_cast<char>(c | 0x20);
          return base == 16 ? is_digit(c) || (folded >= 'a' && folded <= 'f') : c >= '0' && c < '0' + base;
        };
        while (end < source_.size() && (is_base_digit(source_[end]) || source_[end] == '_')) ++end;
        if (end == begin) fail("a number with a base prefix has no digits");
      }
    }
    const std::string text = digits(begin, end);
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (result.ec != std::errc()) fail(fmt::format("the integer {} is beyond 64-bit signed", printable(text, 40)));
    push(TokenType::integer, "");
    tokens_.back().integer = value;
    advance(end - at_);
  }

  void string(char quote) {
    const int line = line_;
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail(line, "a string is not closed");
    std::string text = unescaped(std::string_view(source_).substr(at_ + 1, end - at_ - 1));
    push(TokenType::string, std::move(text));
    advance(end + 1 - at_);
  }

  // The escapes of a Python string literal; an unknown one keeps its backslash.
  std::string unescaped(std::string_view text) const {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      if (text[i] != '\\') {
        out += text[i++];
        continue;
      }
      const char c = text[i + 1];  // a lone backslash cannot end the literal
      i += 2;
      static constexpr std::string_view kNames = "\\'\"abfnrtv";
      static constexpr std::string_view kValues = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t known = kNames.find(c); known != std::string_view::npos) {
        out += kValues[known];
      } else if (c >= '0' && c <= '7') {
        char32_t value = static_cast<char32_t>(c - '0');
        for (int n = 1; n < 3 && i < text.size() && text[i] >= '0' && text[i] <= '7'; ++n)
          value = value * 8 + static_cast<char32_t>(text[i++] - '0');
        append_code_point(out, value);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        append_code_point(out, hex_escape(text.substr(std::min(i, text.size()), count), c, count));
        i += count;
      } else if (c == 'N') {
        fail("the escape \\N{name} is not supported; write the character");
      } else if (c != '\n') {  // an escaped newline vanishes
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  char32_t hex_escape(std::string_view digits, char kind, size_t count) const {
    uint32_t value = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != count || result.ec != std::errc() || result.ptr != digits.data() + digits.size())
      fail(fmt::format("the escape \\{} needs {} hexadecimal digits", kind, count));
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF))
      fail(fmt::format("the escape \\{}{} is no Unicode character", kind, digits));
    return value;
  }

  std::string source_;
  std::string_view origin_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_start_ = true;  // what came last ended a line
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, std::string_view origin) { return Lexer(source, origin).run(); }

}  // namespace offload::jinja
