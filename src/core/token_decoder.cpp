#include "core/token_decoder.h"

#include <utility>

#include "core/byte_alphabet.h"
#include "core/normalizer.h"

namespace offload {
namespace {

// The byte that "<0xHH>" names, or nullopt.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return std::nullopt;
  int value = 0;
  for (const char digit : token.substr(3, 2)) {
    value *= 16;
    if (digit >= '0' && digit <= '9') {
      value += digit - '0';
    } else if (digit >= 'A' && digit <= 'F') {
      value += digit - 'A' + 10;
    } else {
      return std::nullopt;
    }
  }
  return static_cast<char>(value);
}

}  // namespace

TokenDecoder::TokenDecoder(const Json& json, std::string_view origin) {
  const std::string type = json.is_null() ? "null" : json_get<std::string>(json, "type", "", origin);
  const auto parts = json.find("decoders");
  if (type == "ByteLevel") {
    byte_level_ = true;
  } else if (type == "Sequence" && parts != json.end() && parts->is_array()) {
    read_sequence(*parts, origin);
  } else {
    throw_error(ErrorCode::input, "{}: decoder type \"{}\" is unsupported; supported are ByteLevel and Sequence",
                origin, printable(type));
  }
}

void TokenDecoder::read_sequence(const Json& parts, std::string_view origin) {
  if (parts.size() == 1 && json_get<std::string>(parts[0], "type", "", origin) == "ByteLevel") {
    byte_level_ = true;
    return;
  }
  // The order matters to what they do, so only the one that files use is taken: a part never comes after a later stage.
  int stage = 0;
  for (const Json& part : parts) {
    const std::string type = json_get<std::string>(part, "type", "", origin);
    const int next = type == "Replace" ? 1 : type == "ByteFallback" ? 2 : type == "Fuse" ? 3 : type == "Strip" ? 4 : 0;
    if (next == 0 || next < stage || (next == stage && next != 1) || (next == 4 && stage != 3))
      throw_error(ErrorCode::input,
                  "{}: decoder Sequence has \"{}\" out of place; supported is Replace*, ByteFallback, Fuse, Strip",
                  origin, printable(type));
    stage = next;
    if (next == 1) {
      auto& replacement = replacements_.emplace_back();
      read_string_replacement(part, origin, "decoder", replacement.first, replacement.second);
    } else if (next == 2) {
      byte_fallback_ = true;
    } else if (next == 4) {
      strip_content_ = json_get<std::string>(part, "content", "", origin);
      strip_count_ = json_get<int64_t>(part, "start", 0, origin);
      if (strip_content_.empty() ||
          first_code_point(strip_content_).length != static_cast<int>(strip_content_.size()) || strip_count_ < 0 ||
          json_get<int64_t>(part, "stop", 0, origin) != 0)
        throw_error(ErrorCode::input, "{}: decoder Strip must have one character of content, start >= 0 and stop 0",
                    origin);
    }
  }
  if (stage < 3)
    throw_error(ErrorCode::input, "{}: decoder Sequence lacks Fuse, without which it is unsupported", origin);
}

TokenDecoder::Piece TokenDecoder::piece(std::string_view token_text) const {
  if (byte_level_) return {from_byte_alphabet(token_text).value_or(std::string(token_text)), false};
  std::string text(token_text);
  for (const auto& [from, to] : replacements_) text = replace_all(text, from, to);
  const auto byte = byte_fallback_ ? fallback_byte(text) : std::nullopt;
  if (byte) return {std::string(1, *byte), true};
  return {std::move(text), false};
}

}  // namespace offload
