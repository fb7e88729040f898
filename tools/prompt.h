// From the prompt flags of offload-run to token ids.
//
// TextModel owns what of a model concerns text: tokenizer, chat template, defaults of generation. Loads no weights. A
// folder without a tokenizer has no text; only ids can be given to it then. Throws Error{usage | input}.
#ifndef OFFLOAD_TOOLS_PROMPT_H_
#define OFFLOAD_TOOLS_PROMPT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/chat_template.h"
#include "core/generation_config.h"
#include "core/json.h"
#include "core/tokenizer.h"

namespace offload::tools {

struct PromptFlags {
  std::optional<std::string> text, file, ids, messages, system, template_kwargs;
  bool raw = false;
};

// The one prompt that was asked for, or none: then the caller reads standard input or chats.
enum class PromptSource { none, text, ids, messages };
// Refuses flags that exclude one another.
PromptSource prompt_source(const PromptFlags& flags);

// What a template renders.
struct Conversation {
  OrderedJson messages = OrderedJson::array();
  RenderOptions options;
};
// Starts with --system and --template-kwargs; holds no user message yet.
Conversation start_conversation(const PromptFlags& flags);
// `role` and `content`; invalid UTF-8 becomes U+FFFD, as in the tokenizer.
void add_message(Conversation& conversation, std::string_view role, std::string_view content);

class TextModel {
 public:
  // `vocab`: rows of the model, which every token of the tokenizer's vocabulary must have.
  static TextModel load(const std::string& model_dir, int64_t vocab);

  const Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  const GenerationDefaults& defaults() const { return defaults_; }

  // Through the chat template; control tokens count where the template wrote them.
  std::vector<int32_t> encode(const Conversation& conversation) const;
  // The text is all there is: BOS where the tokenizer adds one, and control tokens written out count.
  std::vector<int32_t> encode_raw(std::string_view text) const;

 private:
  const Tokenizer& need_tokenizer() const;

  std::string model_dir_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> template_;
  GenerationDefaults defaults_;
};

// The ids of a prompt of any source but none. `text` is the prompt of PromptSource::text.
std::vector<int32_t> prompt_ids(const PromptFlags& flags, PromptSource source, std::string_view text,
                                const TextModel& model);

// The content of --prompt-file, or all of standard input for an empty path, without one final newline. Throws
// Error{usage} when it cannot be read or is larger than 64 MiB, Error{interrupted}.
std::string read_prompt(const std::string& path);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_PROMPT_H_
