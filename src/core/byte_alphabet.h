// The bijection between bytes and printable code points in which byte-level vocabularies are written (spec of GPT-2:
// bytes 0x21-0x7E, 0xA1-0xAC, 0xAE-0xFF stand for themselves, the other 68 in increasing order for U+0100, U+0101,
// ...).
//
// Thread-safe: constant tables.
#ifndef OFFLOAD_CORE_BYTE_ALPHABET_H_
#define OFFLOAD_CORE_BYTE_ALPHABET_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/unicode.h"

namespace offload {

inline constexpr uint32_t kByteAlphabetEnd = 0x144;  // all its code points are below

constexpr std::array<uint16_t, 256> make_byte_alphabet() {
  std::array<uint16_t, 256> table{};
  uint16_t next = 0x100;
  for (uint16_t byte = 0; byte < 256; ++byte) {
    const bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    table[byte] = itself ? byte : next++;
  }
  return table;
}

// kByteAlphabet[byte] = code point.
inline constexpr std::array<uint16_t, 256> kByteAlphabet = make_byte_alphabet();

constexpr std::array<int16_t, kByteAlphabetEnd> make_byte_of_code_point() {
  std::array<int16_t, kByteAlphabetEnd> table{};
  for (auto& byte : table) byte = -1;
  for (int16_t byte = 0; byte < 256; ++byte) table[kByteAlphabet[static_cast<size_t>(byte)]] = byte;
  return table;
}

// kByteOfCodePoint[code point] = byte, or -1 where the code point is none of the alphabet.
inline constexpr std::array<int16_t, kByteAlphabetEnd> kByteOfCodePoint = make_byte_of_code_point();

inline std::string to_byte_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_utf8(kByteAlphabet[static_cast<uint8_t>(byte)], text);
  return text;
}

// Bytes that `text` spells, or nullopt when a code point of it is none of the alphabet. REQUIRES: valid UTF-8.
inline std::optional<std::string> from_byte_alphabet(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    if (point.value >= kByteAlphabetEnd || kByteOfCodePoint[point.value] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kByteOfCodePoint[point.value]));
    text.remove_prefix(static_cast<size_t>(point.length));
  }
  return bytes;
}

}  // namespace offload

#endif  // OFFLOAD_CORE_BYTE_ALPHABET_H_
