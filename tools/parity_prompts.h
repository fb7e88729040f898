// The prompts of offload-parity: the built-in texts, or those of a file, as token ids.
//
// Built in are zh, en and code (configs/prompts/NAME.txt), each of more than 512 tokens. A file is a JSON array of
// {"name", "text"} or {"name", "ids"}. Texts are encoded as they are, without a chat template, and need a tokenizer.
#ifndef OFFLOAD_TOOLS_PARITY_PROMPTS_H_
#define OFFLOAD_TOOLS_PARITY_PROMPTS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "prompt.h"

namespace offload::tools {

inline constexpr std::string_view kBuiltInPrompts = "zh,en,code";

struct ParityPrompt {
  std::string name;
  std::vector<int32_t> ids;
};

// `given`: names of built-in texts with commas between them, or the path of a file that ends in .json. At most
// `tokens_max` tokens of each are kept. Throws Error{usage | input} for an unknown name, a prompt without tokens, an id
// that the model of `vocab` rows lacks, and texts where the model has no tokenizer.
std::vector<ParityPrompt> parity_prompts(const std::string& given, int64_t tokens_max, int64_t vocab,
                                         const TextModel& model);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_PARITY_PROMPTS_H_
