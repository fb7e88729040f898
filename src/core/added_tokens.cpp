#include "core/added_tokens.h"

#include <algorithm>
#include <utility>

#include "core/unicode.h"

namespace offload {
namespace {

bool stands_alone(std::string_view text, size_t start, size_t end) {
  return (start == 0 || !is_word_character(last_code_point(text.substr(0, start)).value)) &&
         (end == text.size() || !is_word_character(first_code_point(text.substr(end)).value));
}

size_t skip_space_left(std::string_view text, size_t start, size_t floor) {
  while (start > floor) {
    const CodePoint point = last_code_point(text.substr(floor, start - floor));
    if (!is_white_space(point.value)) break;
    start -= static_cast<size_t>(point.length);
  }
  return start;
}

size_t skip_space_right(std::string_view text, size_t end) {
  while (end < text.size()) {
    const CodePoint point = first_code_point(text.substr(end));
    if (!is_white_space(point.value)) break;
    end += static_cast<size_t>(point.length);
  }
  return end;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  tokens_.erase(std::unique(tokens_.begin(), tokens_.end(),
                            [](const AddedToken& a, const AddedToken& b) { return a.content == b.content; }),
                tokens_.end());
  for (const AddedToken& token : tokens_) starts_[static_cast<uint8_t>(token.content.front())] = true;
}

int32_t AddedTokenMatcher::longest_at(std::string_view text) const {
  // [first, last) are the tokens that share the first `depth` bytes with the text; the shortest of them sorts first.
  auto first = tokens_.begin(), last = tokens_.end();
  int32_t longest = -1;
  for (size_t depth = 0; first != last; ++depth) {
    if (first->content.size() == depth) longest = static_cast<int32_t>(first++ - tokens_.begin());
    if (depth == text.size()) break;
    const auto byte = static_cast<uint8_t>(text[depth]);
    first = std::partition_point(
        first, last, [&](const AddedToken& token) { return static_cast<uint8_t>(token.content[depth]) < byte; });
    last = std::partition_point(
        first, last, [&](const AddedToken& token) { return static_cast<uint8_t>(token.content[depth]) == byte; });
  }
  return longest;
}

void AddedTokenMatcher::split(std::string_view text, std::vector<TextSegment>& segments) const {
  const ByteRange all{0, text.size()};
  split(text, {&all, 1}, segments);
}

void AddedTokenMatcher::split(std::string_view text, std::span<const ByteRange> trusted,
                              std::vector<TextSegment>& segments) const {
  size_t cut = 0;  // text before this is in `segments`
  for (const ByteRange& range : trusted) {
    for (size_t at = range.begin; at < range.end;) {
      const int32_t index =
          starts_[static_cast<uint8_t>(text[at])] ? longest_at(text.substr(at, range.end - at)) : int32_t{-1};
      if (index < 0) {
        ++at;
        continue;
      }
      const AddedToken& token = tokens_[static_cast<size_t>(index)];
      size_t start = at, end = at + token.content.size();
      at = end;  // a match that is refused below still hides what it overlaps, as in the reference
      if (start < cut || (token.single_word && !stands_alone(text, start, end))) continue;
      if (token.lstrip) start = skip_space_left(text, start, cut);
      if (token.rstrip) end = skip_space_right(text, end);
      if (start > cut) segments.push_back({-1, text.substr(cut, start - cut)});
      segments.push_back({token.id, text.substr(start, end - start)});
      cut = end;
    }
  }
  if (cut < text.size()) segments.push_back({-1, text.substr(cut)});
}

}  // namespace offload
