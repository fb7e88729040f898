// The chat template of a checkpoint: messages in, prompt out.
//
// Owns the parsed template(s). Renders as the reference does (Jinja2 with trim_blocks, lstrip_blocks and the JSON
// filter of transformers), byte for byte, and says of every byte whether the template or the request wrote it. Refuses
// what is not a conversation, and what a template refuses (its own sentence is in the message). Does NOT tokenize and
// does NOT parse what a model answers. Immutable after construction, so any number of threads may render.
//
// What is decided here beyond the language:
// - Tool-call `arguments` given as JSON text become a mapping when they hold a JSON object (blank text: an empty one);
// a
//   template that adds them to a string gets the original text. Text that holds no object is passed on as the string it
//   is, and an error of that rendering names the message and the call.
// - A message without content has null content. When the template fails on null content, or would print it as "None",
//   the prompt is rendered again with "" in its place; raise_exception is not a failure in this sense.
// - Content may be a list of parts, objects with a `type`. A template that looks into them gets them as they are. When
// it
//   does not, or fails, it knows strings alone: the prompt is rendered again with the texts of the parts, joined by
//   line breaks; a part of another type than "text" is then refused by name. An empty list is "".
#ifndef OFFLOAD_CORE_CHAT_TEMPLATE_H_
#define OFFLOAD_CORE_CHAT_TEMPLATE_H_

#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/jinja/ast.h"
#include "core/jinja/text.h"
#include "core/json.h"

namespace offload {

// The local time of the machine.
std::tm local_time_now();

struct RenderOptions {
  OrderedJson tools;      // array, or null when absent
  OrderedJson documents;  // array, or null when absent
  bool add_generation_prompt = true;
  // Further variables of the template (enable_thinking, reasoning_effort, ...): an object or null. They win over all
  // other variables but messages.
  OrderedJson kwargs;
  // Overrides or adds to the special tokens of the checkpoint: name (bos_token) and text.
  std::vector<std::pair<std::string, std::string>> special_tokens;
  std::function<std::tm()> clock = local_time_now;  // for strftime_now
};

// A run of bytes with one origin. `trusted`: written by the template or a special token; else it came from the request
// (messages, tools, documents, kwargs) and control tokens must not be recognised in it. A segment's edge is no edge
// between words: ordinary text is tokenized across it.
struct PromptSegment {
  std::string text;
  bool trusted;
  bool operator==(const PromptSegment&) const = default;
};

struct RenderedPrompt {
  std::vector<PromptSegment> segments;  // none empty, trusted and untrusted alternate

  std::string text() const;  // all segments: what the reference renders
};

class ChatTemplate {
 public:
  // The template of a checkpoint folder: chat_template.jinja, else the key chat_template of tokenizer_config.json (a
  // string, or a list of {name, template} with "default" and perhaps "tool_use"). Null when the folder has neither.
  // Special tokens are the *_token strings of tokenizer_config.json. Throws Error{input} naming file and line.
  static std::optional<ChatTemplate> load(const std::string& model_dir);

  // `origin` opens the messages about `source`. Throws Error{input}.
  ChatTemplate(std::string_view source, std::string origin);

  // `messages`: a non-empty array of objects with a string `role`. Throws Error{usage} when they or the options are of
  // another form, Error{input} when the template fails on them or refuses them.
  RenderedPrompt render(const OrderedJson& messages, const RenderOptions& options) const;

 private:
  explicit ChatTemplate(jinja::Program program) : program_(std::move(program)) {}

  jinja::Program program_;
  std::optional<jinja::Program> tool_use_;  // used instead of program_ when tools are given
  std::vector<std::pair<std::string, std::string>> special_tokens_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_CHAT_TEMPLATE_H_
