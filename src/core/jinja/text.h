// A string that knows which of its bytes came from a request: the provenance that lets a tokenizer refuse control tokens
// in what a user typed.
//
// Owns its bytes (always valid UTF-8) and the byte ranges that are untrusted. What keeps the mark, byte for byte: append,
// slices, join, strip, split, replace, reverse, and every case change (a mapped character keeps the mark of its source).
// What a quoted or JSON form adds around or inside a character (quotes, escapes) counts as the character's when it
// stands for that character, else as the template's. What drops it: anything that is not a string (lengths, numbers,
// booleans, comparisons). Positions and lengths are in code points where a function says so, else in bytes.
// Thread-safe: no state.
#ifndef OFFLOAD_CORE_JINJA_TEXT_H_
#define OFFLOAD_CORE_JINJA_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace offload::jinja {

enum class Trust : bool { untrusted, trusted };

// Bytes [begin, end) that came from the request.
struct Span {
  size_t begin;
  size_t end;
  bool operator==(const Span&) const = default;
};

class Text {
 public:
  Text() = default;
  Text(std::string_view bytes, Trust trust);

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  // Sorted, disjoint, not touching, none empty.
  const std::vector<Span>& untrusted() const { return untrusted_; }

  void append(const Text& other);
  void append(std::string_view bytes, Trust trust);
  // Bytes [begin, end) of `other` with their marks.
  void append_slice(const Text& other, size_t begin, size_t end);

  Text slice(size_t begin, size_t end) const;

 private:
  void mark(size_t begin, size_t end);

  std::string bytes_;
  std::vector<Span> untrusted_;
};

// Walks a text's bytes upwards and says which are trusted, without searching.
class TrustCursor {
 public:
  explicit TrustCursor(const Text& text) : spans_(&text.untrusted()) {}
  // REQUIRES: `at` does not decrease between calls.
  Trust at(size_t byte);

 private:
  const std::vector<Span>* spans_;
  size_t next_ = 0;
};

// --- code points; REQUIRES valid UTF-8 -------------------------------------------------------------------------------

// Byte offset of the first invalid sequence, or npos.
size_t find_invalid_utf8(std::string_view text);
// Code point at byte `at`; `at` moves behind it.
char32_t next_code_point(std::string_view text, size_t& at);
void append_code_point(std::string& out, char32_t code_point);
size_t code_points(std::string_view text);
// Byte offset of code point `index`; text.size() when there are fewer.
size_t byte_of_code_point(std::string_view text, size_t index);

// What Python's str.isspace, isprintable, upper, lower and title decide, by the Unicode tables of utf8proc. Case changes
// are one to one (except that upper of sharp s is "SS").
bool is_space(char32_t code_point);
bool is_printable(char32_t code_point);
bool is_name_character(char32_t code_point);

enum class Case { lower, upper, title, capitalize };
Text change_case(const Text& text, Case to);

enum class Ends { both, left, right };
// Removes code points of the SET `characters` (white space when null) from the ends.
Text strip(const Text& text, const std::string* characters, Ends ends);
Text replace_all(const Text& text, const Text& from, const Text& to, int64_t count_max, size_t bytes_max);
Text reversed(const Text& text);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_TEXT_H_
