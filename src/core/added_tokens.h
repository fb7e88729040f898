// Finds added tokens (control tokens, tool markers) in text.
//
// One AddedTokenMatcher looks for one set of contents, leftmost first and longest at equal starts. Does not normalize
// and does not know which tokens are special. Thread rule: immutable after construction.
#ifndef OFFLOAD_CORE_ADDED_TOKENS_H_
#define OFFLOAD_CORE_ADDED_TOKENS_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace offload {

struct AddedToken {
  int32_t id = -1;
  std::string content;
  bool single_word = false;  // only between characters that are no word characters
  bool lstrip = false;       // takes the white space before it, back to the previous match
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // is looked for after the normalizer, itself normalized
  bool special = false;      // left out by decode with skip_special
};

// A piece of text, or an added token in its place.
struct TextSegment {
  int32_t token_id;  // -1: text
  std::string_view text;
};

// Bytes [begin, end) of a text.
struct ByteRange {
  size_t begin, end;
};

class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  // Tokens with the same content: the first one counts.
  explicit AddedTokenMatcher(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Appends the segments of `text` in order; empty text segments are left out. REQUIRES: valid UTF-8.
  void split(std::string_view text, std::vector<TextSegment>& segments) const;
  // The same, but a token counts only where its whole content lies in one of `trusted`, as the longest that fits there.
  // REQUIRES: ranges in order, disjoint, inside `text`.
  void split(std::string_view text, std::span<const ByteRange> trusted, std::vector<TextSegment>& segments) const;

 private:
  // Index of the longest token that `text` begins with, or -1.
  int32_t longest_at(std::string_view text) const;

  std::vector<AddedToken> tokens_;  // sorted by content
  std::array<bool, 256> starts_{};  // whether a token starts with this byte
};

}  // namespace offload

#endif  // OFFLOAD_CORE_ADDED_TOKENS_H_
