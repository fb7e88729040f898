// What the "decoder" of tokenizer.json makes of one token: bytes, and the two rules that span tokens.
//
// Two kinds are supported, byte-level and SentencePiece style (Replace*, ByteFallback, Fuse, Strip at the start).
// Refuses the rest by name. Thread rule: immutable after construction.
#ifndef OFFLOAD_CORE_TOKEN_DECODER_H_
#define OFFLOAD_CORE_TOKEN_DECODER_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"

namespace offload {

class TokenDecoder {
 public:
  // Reads the value of tokenizer.json's "decoder". Throws Error{input}.
  TokenDecoder(const Json& json, std::string_view origin);

  bool byte_level() const { return byte_level_; }
  // Characters to drop from the very start of a decoded text, one by one while they are `strip_content()`.
  int64_t strip_count() const { return strip_count_; }
  const std::string& strip_content() const { return strip_content_; }

  struct Piece {
    std::string bytes;
    bool fallback_byte;  // `bytes` is the one byte of a <0xHH> token: it counts only in a run that is valid UTF-8
  };
  Piece piece(std::string_view token_text) const;

 private:
  void read_sequence(const Json& parts, std::string_view origin);

  bool byte_level_ = false;
  bool byte_fallback_ = false;
  std::vector<std::pair<std::string, std::string>> replacements_;
  int64_t strip_count_ = 0;
  std::string strip_content_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_TOKEN_DECODER_H_
