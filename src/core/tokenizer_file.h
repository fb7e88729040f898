// tokenizer.json as data: its two long tables in flat form, everything else as JSON.
//
// Reads in one streaming pass, because a DOM of 300,000 small strings costs ten times the parsing. Checks syntax, types
// of the tables, limits and duplicates; what the components mean is for their own classes. Thread-safe: no state.
#ifndef OFFLOAD_CORE_TOKENIZER_FILE_H_
#define OFFLOAD_CORE_TOKENIZER_FILE_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/added_tokens.h"
#include "core/bpe.h"
#include "core/json.h"
#include "core/token_table.h"

namespace offload {

// Ids from here on are refused: the largest published vocabularies have some 260,000, and an id costs memory.
inline constexpr int64_t kTokenIdEnd = int64_t{1} << 22;
inline constexpr int64_t kTokenizerFileBytesMax = int64_t{1} << 28;
inline constexpr size_t kAddedTokenBytesMax = 1024;

struct TokenizerFile {
  TokenTable vocab;
  std::vector<BpeMerge> merges;
  Json rest;  // the document with null for model.vocab and model.merges
};

// Throws Error{input}; `origin` opens every message.
TokenizerFile parse_tokenizer_file(std::string_view text, std::string_view origin);

// Reads one entry of tokenizer.json's "added_tokens", or, with its id from the key, of tokenizer_config.json's
// "added_tokens_decoder".
AddedToken read_added_token(const Json& json, int64_t id, std::string_view origin);

}  // namespace offload

#endif  // OFFLOAD_CORE_TOKENIZER_FILE_H_
