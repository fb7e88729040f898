// Text to token ids and back, as a model's own tokenizer.json says.
//
// tokenizer.json is the truth: what it holds and this code does not support is refused by name, never guessed.
// tokenizer_config.json adds the tokens that tokenizer.json lacks, the names of the special tokens, and BOS or EOS
// where it asks for them (add_bos_token, add_eos_token true) and tokenizer.json adds none. Text that is no valid UTF-8
// is repaired first: each maximal invalid subpart becomes U+FFFD. Does not render chat templates; does not apply
// truncation, padding or clean_up_tokenization_spaces. Thread rule: immutable after load, every method may run at once.
#ifndef OFFLOAD_CORE_TOKENIZER_H_
#define OFFLOAD_CORE_TOKENIZER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/added_tokens.h"
#include "core/bpe.h"
#include "core/json.h"
#include "core/normalizer.h"
#include "core/pre_tokenizer.h"
#include "core/token_decoder.h"
#include "core/tokenizer_file.h"

namespace offload {

struct PromptSegment;  // core/chat_template.h

struct EncodeOptions {
  bool add_special_tokens = false;  // BOS and EOS; chat templates write their own, so only for plain completion
  // Added tokens written out in the text become their ids. False for text that a user wrote: "<|im_end|>" is then
  // encoded as ordinary pieces and cannot forge a turn.
  bool parse_special = true;
};

struct DecodeOptions {
  bool skip_special = true;  // leaves out tokens whose "special" is true
};

class Tokenizer {
 public:
  // `path` is a model directory or a tokenizer.json; tokenizer_config.json is read beside it when it is there. Throws
  // Error{input} that names the file.
  static Tokenizer load(const std::string& path);
  // The same from text; `config_json` may be empty. `origin` opens every message.
  static Tokenizer parse(std::string_view tokenizer_json, std::string_view config_json, std::string_view origin);

  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;
  // A rendered prompt: added tokens are recognised only where their whole text lies in one trusted segment; all other
  // text is encoded as if the segments were one text, so an edge splits no word. Adds no BOS or EOS: templates write
  // their own. Equals encode(the joined text) when the untrusted text holds, or completes, no added token. Invalid
  // UTF-8 is repaired within each segment.
  std::vector<int32_t> encode_segments(std::span<const PromptSegment> segments) const;
  // Throws Error{usage} for an id that is no token (a hole, or outside the vocabulary).
  std::string decode(std::span<const int32_t> ids, DecodeOptions options = {}) const;

  // Largest id + 1. Often below the model's logit rows: the rows from here on must be masked. Ids below may be holes.
  int32_t vocab_size() const { return static_cast<int32_t>(pieces_.size()); }
  // Throws Error{input} when a token of the vocabulary has an id that a model of so many rows lacks: any text could
  // hold it. An added token there costs only the prompts that use it.
  void require_rows(int64_t rows, std::string_view origin) const;
  bool is_token(int32_t id) const;
  bool is_special(int32_t id) const;  // false for what is no token
  std::optional<int32_t> token_to_id(std::string_view token) const;
  // The token as the file spells it. Throws Error{usage} for what is no token.
  std::string_view token_text(int32_t id) const;

  // "bos_token", "eos_token", "pad_token", "unk_token" of tokenizer_config.json, those that it sets. Chat templates see
  // them by these names.
  const std::map<std::string, std::string>& named_tokens() const { return named_tokens_; }

  // What a token contributes to decoded text; for StreamDetokenizer.
  struct Piece {
    std::string_view bytes;
    bool fallback_byte;
  };
  // Throws Error{usage} for what is no token.
  Piece piece(int32_t id) const;
  const TokenDecoder& decoder() const { return decoder_; }

 private:
  struct PieceEntry {
    uint32_t offset = 0, size = 0;  // into piece_bytes_
    bool is_token = false, is_special = false, fallback_byte = false;
  };
  // Texts that post-processing puts around the encoded text.
  struct Frame {
    std::vector<int32_t> before, after;
  };

  Tokenizer(TokenizerFile file, const Json& config, std::string_view origin);
  void read_added_tokens(const Json& file, const Json& config, std::string_view origin);
  void add_token(AddedToken token, std::string_view origin);
  void require_merges(std::string_view origin) const;
  void build_matchers();
  void read_post_processor(const Json& json, std::string_view origin, int depth);
  void read_template(const Json& json, std::string_view origin);
  void read_named_tokens(const Json& config, std::string_view origin);
  void add_configured_frame(const Json& config, std::string_view origin);
  void build_pieces();
  void check_id(int32_t id) const;

  struct EncodeScratch;
  void encode_text(std::string_view text, std::span<const ByteRange> trusted, std::vector<int32_t>& ids) const;
  std::vector<ByteRange> normalized_ranges(std::string_view text, std::string_view normal,
                                           std::span<const ByteRange> trusted) const;
  void encode_normal(std::string_view text, EncodeScratch& scratch, std::vector<int32_t>& ids) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  TokenDecoder decoder_;
  BpeModel bpe_;
  std::vector<AddedToken> added_;
  TokenTable added_table_;  // content -> id of added_
  AddedTokenMatcher raw_matcher_, normalized_matcher_;
  Frame frame_;
  std::map<std::string, std::string> named_tokens_;
  std::string piece_bytes_;
  std::vector<PieceEntry> pieces_;  // by id
};

}  // namespace offload

#endif  // OFFLOAD_CORE_TOKENIZER_H_
