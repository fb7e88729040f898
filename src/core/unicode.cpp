#include "core/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/base.h"

namespace offload {
namespace {

uint8_t byte_at(std::string_view text, size_t index) {
  return static_cast<uint8_t>(text[index]);
}

// Bytes of `text` from `at` on that are ASCII, eight at a time.
size_t skip_ascii(std::string_view text, size_t at) {
  while (at + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    if (word & 0x8080808080808080u) break;
    at += 8;
  }
  while (at < text.size() && byte_at(text, at) < 0x80) ++at;
  return at;
}

}  // namespace

Utf8Step utf8_step(std::string_view bytes) {
  const uint8_t lead = byte_at(bytes, 0);
  if (lead < 0x80) return {Utf8State::valid, 1};
  int length = 0;
  uint8_t low = 0x80, high = 0xBF;  // range of the second byte: excludes overlong forms, surrogates and > U+10FFFF
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {Utf8State::invalid, 1};
  }
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == bytes.size()) return {Utf8State::incomplete, i};
    const uint8_t byte = byte_at(bytes, static_cast<size_t>(i));
    if (byte < low || byte > high) return {Utf8State::invalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8State::valid, length};
}

bool is_valid_utf8(std::string_view bytes) {
  for (size_t at = skip_ascii(bytes, 0); at < bytes.size(); at = skip_ascii(bytes, at)) {
    const Utf8Step step = utf8_step(bytes.substr(at, 4));
    if (step.state != Utf8State::valid) return false;
    at += static_cast<size_t>(step.length);
  }
  return true;
}

CodePoint first_code_point(std::string_view text) {
  const uint32_t lead = byte_at(text, 0);
  if (lead < 0x80) return {lead, 1};
  const auto tail = [&](size_t index) { return byte_at(text, index) & 0x3Fu; };
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | tail(1), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | tail(1) << 6 | tail(2), 3};
  return {(lead & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3), 4};
}

CodePoint last_code_point(std::string_view text) {
  size_t at = text.size() - 1;
  while ((byte_at(text, at) & 0xC0) == 0x80) --at;
  return first_code_point(text.substr(at));
}

void append_utf8(uint32_t code_point, std::string& out) {
  utf8proc_uint8_t bytes[4];
  const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes);
  out.append(bytes, bytes + count);
}

void Utf8Stream::append(std::string_view bytes, std::string& out) {
  pending_.append(bytes);
  const std::string_view all = pending_;
  size_t start = 0, at = 0;  // [start, at) is valid and not yet emitted
  while (at < all.size()) {
    const Utf8Step step = utf8_step(all.substr(at, 4));
    if (step.state == Utf8State::incomplete) break;
    if (step.state == Utf8State::invalid) {
      out.append(all.substr(start, at - start)).append(kReplacementCharacter);
      start = at + static_cast<size_t>(step.length);
    }
    at += static_cast<size_t>(step.length);
  }
  out.append(all.substr(start, at - start));
  pending_.erase(0, at);
}

void Utf8Stream::finish(std::string& out) {
  if (!pending_.empty()) out.append(kReplacementCharacter);
  pending_.clear();
}

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_word_character(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Alphabetic symbols: circled, squared and negative Latin letters.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
             (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  }
}

bool is_nfc_inert(uint32_t c) {
  if (c < 0x300) return true;
  // Greek and Cyrillic letters, Arabic letters, dashes and quotes, CJK punctuation, kana, ideographs, Hangul syllables,
  // full-width forms, emoji. A test walks all of Unicode to prove each range.
  struct Range {
    uint32_t first, last;
  };
  static constexpr Range kRanges[] = {{0x0388, 0x03FF}, {0x0400, 0x0482}, {0x0620, 0x064A}, {0x200B, 0x203F},
                                      {0x3000, 0x3029}, {0x3030, 0x3098}, {0x309B, 0x33FF}, {0x4E00, 0x9FFF},
                                      {0xAC00, 0xD7A3}, {0xFE00, 0xFE0F}, {0xFF00, 0xFFEF}, {0x1F300, 0x1FAFF}};
  for (const Range& range : kRanges)
    if (c <= range.last) return c >= range.first;
  return false;
}

namespace {

// Appends the NFC of `text` by the full algorithm. The library's own call for that sorts marks by insertion, which a
// user's text of a megabyte of marks would turn into minutes; so sorting is done here.
void append_nfc(std::string_view text, std::string& out) {
  constexpr size_t kDecompositionMax = 32;  // code points of one; Unicode's longest canonical one has 4
  constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> points;
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    text.remove_prefix(static_cast<size_t>(point.length));
    const size_t before = points.size();
    points.resize(before + kDecompositionMax);
    int boundclass = 0;  // state of grapheme breaking, which is not asked for
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(point.value), points.data() + before,
                                               kDecompositionMax, kCompose, &boundclass);
    OFL_ASSERT(count >= 0 && count <= static_cast<utf8proc_ssize_t>(kDecompositionMax));
    points.resize(before + static_cast<size_t>(count));
  }
  const auto combining_class = [](utf8proc_int32_t point) { return utf8proc_get_property(point)->combining_class; };
  const auto is_starter = [&](utf8proc_int32_t point) { return combining_class(point) == 0; };
  for (auto first = points.begin(); first != points.end();) {
    first = std::find_if_not(first, points.end(), is_starter);
    const auto last = std::find_if(first, points.end(), is_starter);
    std::stable_sort(first, last, [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    first = last;
  }
  const auto count = utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), kCompose);
  OFL_ASSERT(count >= 0);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) append_utf8(static_cast<uint32_t>(points[i]), out);
}

}  // namespace

std::string_view nfc(std::string_view text, std::string& buffer) {
  buffer.clear();
  size_t copied = 0;      // text before this is in `buffer`
  size_t last_inert = 0;  // start of the last inert code point: what follows may combine with it
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint here = first_code_point(text.substr(at));
    if (is_nfc_inert(here.value)) {
      last_inert = at;
      at += static_cast<size_t>(here.length);
      continue;
    }
    size_t end = at + static_cast<size_t>(here.length);
    while (end < text.size()) {
      const CodePoint next = first_code_point(text.substr(end));
      if (is_nfc_inert(next.value)) break;
      end += static_cast<size_t>(next.length);
    }
    const size_t start = last_inert < copied ? copied : last_inert;
    buffer.append(text.substr(copied, start - copied));
    append_nfc(text.substr(start, end - start), buffer);
    copied = at = end;
  }
  if (copied == 0) return text;
  buffer.append(text.substr(copied));
  return buffer;
}

std::string repair_utf8(std::string_view text) {
  std::string repaired;
  Utf8Stream stream;
  stream.append(text, repaired);
  stream.finish(repaired);
  return repaired;
}

}  // namespace offload
