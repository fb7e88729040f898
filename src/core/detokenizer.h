// Token ids to text while they are generated.
//
// Each feed() returns the text that this id makes certain and never splits a code point. The deltas joined are exactly
// Tokenizer::decode of the ids. Byte-level models hold back at most 3 bytes. SentencePiece-style models hold back a run
// of byte tokens until it ends, because the reference gives up the whole run when any of it is invalid. Does not look
// for stop strings (StopMatcher does). Thread rule: one stream, one thread.
#ifndef OFFLOAD_CORE_DETOKENIZER_H_
#define OFFLOAD_CORE_DETOKENIZER_H_

#include <cstdint>
#include <string>

#include "core/tokenizer.h"
#include "core/unicode.h"

namespace offload {

class StreamDetokenizer {
 public:
  // REQUIRES: `tokenizer` outlives the stream.
  explicit StreamDetokenizer(const Tokenizer& tokenizer, DecodeOptions options = {});

  // Throws Error{usage} for an id that is no token; the stream is then as before.
  std::string feed(int32_t id);
  // What was held back: U+FFFD for what can no longer become a code point. The stream is then at its end.
  std::string finish();

 private:
  void flush_byte_run(std::string& out);
  void append_text(std::string_view text, std::string& out);

  const Tokenizer* tokenizer_;
  DecodeOptions options_;
  Utf8Stream utf8_;          // byte-level models
  std::string byte_run_;     // SentencePiece-style models
  int64_t strip_remaining_;  // characters that may still be dropped from the start
};

}  // namespace offload

#endif  // OFFLOAD_CORE_DETOKENIZER_H_
