#include "core/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>

#include "core/base.h"

namespace offload::jinja {

Text::Text(std::string_view bytes, Trust trust) : bytes_(bytes) {
  if (trust == Trust::untrusted) mark(0, bytes_.size());
}

void Text::mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!untrusted_.empty() && untrusted_.back().end == begin)
    untrusted_.back().end = end;
  else
    untrusted_.push_back({begin, end});
}

void Text::append(std::string_view bytes, Trust trust) {
  const size_t begin = bytes_.size();
  bytes_.append(bytes);
  if (trust == Trust::untrusted) mark(begin, bytes_.size());
}

void Text::append(const Text& other) {
  const size_t base = bytes_.size();
  bytes_.append(other.bytes_);
  for (const Span& span : other.untrusted_) mark(base + span.begin, base + span.end);
}

void Text::append_slice(const Text& other, size_t begin, size_t end) {
  const size_t base = bytes_.size();
  bytes_.append(other.bytes_, begin, end - begin);
  const auto& spans = other.untrusted_;
  auto span = std::partition_point(spans.begin(), spans.end(), [&](const Span& s) { return s.end <= begin; });
  for (; span != spans.end() && span->begin < end; ++span)
    mark(base + std::max(span->begin, begin) - begin, base + std::min(span->end, end) - begin);
}

Text Text::slice(size_t begin, size_t end) const {
  Text out;
  out.append_slice(*this, begin, end);
  return out;
}

Trust TrustCursor::at(size_t byte) {
  while (next_ < spans_->size() && (*spans_)[next_].end <= byte) ++next_;
  return next_ < spans_->size() && (*spans_)[next_].begin <= byte ? Trust::untrusted : Trust::trusted;
}

// --- code points -----------------------------------------------------------------------------------------------------

size_t find_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    utf8proc_int32_t code_point = 0;
    const auto length = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                                         static_cast<utf8proc_ssize_t>(text.size() - at), &code_point);
    if (length <= 0) return at;
    at += static_cast<size_t>(length);
  }
  return std::string_view::npos;
}

char32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  const char32_t lead = byte(0);
  if (lead < 0x80) {
    ++at;
    return lead;
  }
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  OFL_ASSERT(at + length <= text.size());
  char32_t value = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) value = (value << 6) | (byte(i) & 0x3F);
  at += length;
  return value;
}

void append_code_point(std::string& out, char32_t code_point) {
  utf8proc_uint8_t bytes[4];
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes);
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

size_t code_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

size_t byte_of_code_point(std::string_view text, size_t index) {
  size_t at = 0;
  while (index > 0 && at < text.size()) {
    ++at;
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0u) == 0x80u) ++at;
    --index;
  }
  return at;
}

namespace {

utf8proc_category_t category(char32_t code_point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code_point));
}

char32_t lower(char32_t c) { return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))); }
char32_t upper(char32_t c) { return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))); }
char32_t title(char32_t c) { return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))); }

bool is_cased(char32_t c) {
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_LU || kind == UTF8PROC_CATEGORY_LL || kind == UTF8PROC_CATEGORY_LT || lower(c) != c ||
         upper(c) != c;
}

}  // namespace

bool is_space(char32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_printable(char32_t c) {
  if (c < 0x7F) return c >= 0x20;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool is_name_character(char32_t c) {
  if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_NL;
}

Text change_case(const Text& text, Case to) {
  Text out;
  TrustCursor trust(text);
  std::string mapped;
  bool inside_word = false;
  for (size_t at = 0; at < text.size();) {
    const Trust mark = trust.at(at);
    const bool first = at == 0;
    const char32_t c = next_code_point(text.bytes(), at);
    const bool upwards = to == Case::upper || (to == Case::title && !inside_word) || (to == Case::capitalize && first);
    mapped.clear();
    if (upwards && c == 0xDF)
      mapped = to == Case::upper ? "SS" : "Ss";
    else
      append_code_point(mapped, !upwards ? lower(c) : to == Case::upper ? upper(c) : title(c));
    out.append(mapped, mark);
    inside_word = is_cased(c);
  }
  return out;
}

Text strip(const Text& text, const std::string* characters, Ends ends) {
  std::u32string set;
  if (characters != nullptr)
    for (size_t at = 0; at < characters->size();) set.push_back(next_code_point(*characters, at));
  const auto goes = [&](char32_t c) {
    return characters == nullptr ? is_space(c) : set.find(c) != std::u32string::npos;
  };
  const std::string& bytes = text.bytes();
  size_t begin = 0;
  size_t end = bytes.size();
  while (ends != Ends::right && begin < end) {
    size_t at = begin;
    if (!goes(next_code_point(bytes, at))) break;
    begin = at;
  }
  while (ends != Ends::left && begin < end) {
    size_t last = end - 1;
    while ((static_cast<unsigned char>(bytes[last]) & 0xC0u) == 0x80u) --last;
    size_t at = last;
    if (!goes(next_code_point(bytes, at))) break;
    end = last;
  }
  return text.slice(begin, end);
}

Text replace_all(const Text& text, const Text& from, const Text& to, int64_t count_max, size_t bytes_max) {
  Text out;
  size_t at = 0;
  const auto put = [&] {
    out.append(to);
    if (out.size() > bytes_max) throw_error(ErrorCode::input, "replace makes more than {} bytes", bytes_max);
  };
  int64_t left = count_max < 0 ? INT64_MAX : count_max;
  if (from.empty()) {  // as in Python: before every character and at the end
    while (left-- > 0) {
      put();
      if (at >= text.size()) return out;
      size_t next = at;
      next_code_point(text.bytes(), next);
      out.append_slice(text, at, next);
      at = next;
    }
  } else {
    for (; left > 0; --left) {
      const size_t found = text.bytes().find(from.bytes(), at);
      if (found == std::string::npos) break;
      out.append_slice(text, at, found);
      put();
      at = found + from.size();
    }
  }
  out.append_slice(text, at, text.size());
  return out;
}

Text reversed(const Text& text) {
  Text out;
  for (size_t end = text.size(); end > 0;) {
    size_t begin = end - 1;
    while ((static_cast<unsigned char>(text.bytes()[begin]) & 0xC0u) == 0x80u) --begin;
    out.append_slice(text, begin, end);
    end = begin;
  }
  return out;
}

}  // namespace offload::jinja
