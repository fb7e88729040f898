#include "core/detokenizer.h"

namespace offload {

StreamDetokenizer::StreamDetokenizer(const Tokenizer& tokenizer, DecodeOptions options)
    : tokenizer_(&tokenizer), options_(options), strip_remaining_(tokenizer.decoder().strip_count()) {}

std::string StreamDetokenizer::feed(int32_t id) {
  const Tokenizer::Piece piece = tokenizer_->piece(id);
  std::string out;
  if (options_.skip_special && tokenizer_->is_special(id)) return out;
  if (tokenizer_->decoder().byte_level()) {
    utf8_.append(piece.bytes, out);
  } else if (piece.fallback_byte) {
    byte_run_.append(piece.bytes);
  } else {
    flush_byte_run(out);
    append_text(piece.bytes, out);
  }
  return out;
}

std::string StreamDetokenizer::finish() {
  std::string out;
  utf8_.finish(out);
  flush_byte_run(out);
  return out;
}

void StreamDetokenizer::flush_byte_run(std::string& out) {
  if (is_valid_utf8(byte_run_)) {
    append_text(byte_run_, out);
  } else {
    for (size_t i = 0; i < byte_run_.size(); ++i) append_text(kReplacementCharacter, out);
  }
  byte_run_.clear();
}

void StreamDetokenizer::append_text(std::string_view text, std::string& out) {
  const std::string_view content = tokenizer_->decoder().strip_content();
  while (strip_remaining_ > 0 && !text.empty()) {
    if (text.substr(0, content.size()) != content) {
      strip_remaining_ = 0;
    } else {
      text.remove_prefix(content.size());
      --strip_remaining_;
    }
  }
  out.append(text);
}

}  // namespace offload
