#include "prompt.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include "common.h"
#include "core/checkpoint.h"
#include "core/unicode.h"
#include "terminal.h"

namespace offload::tools {
namespace {

constexpr int64_t kPromptBytesMax = 64 << 20;

std::vector<int32_t> parse_ids(std::string_view text) {
  std::vector<int32_t> ids;
  if (text.empty()) throw_error(ErrorCode::usage, "--prompt-ids is empty; give token ids as in 1,2,3");
  while (true) {
    const size_t comma = text.find(',');
    std::string_view id = text.substr(0, comma);
    while (id.starts_with(' ')) id.remove_prefix(1);
    while (id.ends_with(' ')) id.remove_suffix(1);
    ids.push_back(
        static_cast<int32_t>(parse_integer("a token of --prompt-ids", id, 0, std::numeric_limits<int32_t>::max())));
    if (comma == std::string_view::npos) return ids;
    text.remove_prefix(comma + 1);
  }
}

OrderedJson template_kwargs(const std::string& text) {
  OrderedJson kwargs;
  try {
    kwargs = parse_ordered_json(text, "--template-kwargs");
  } catch (const Error& error) {
    throw Error(ErrorCode::usage, error.message());
  }
  if (!kwargs.is_object())
    throw_error(ErrorCode::usage, "--template-kwargs must be a JSON object, as in {{\"enable_thinking\": true}}");
  return kwargs;
}

// What the template renders silently as nothing, which a misspelt key would be.
void require_content(const OrderedJson& messages, const std::string& path) {
  if (!messages.is_array()) return;
  for (size_t i = 0; i < messages.size(); ++i)
    if (messages[i].is_object() && !messages[i].contains("content") && !messages[i].contains("tool_calls"))
      throw_error(ErrorCode::usage, "--messages {}: messages[{}] has neither \"content\" nor \"tool_calls\"",
                  printable(path, 4096), i);
}

// An array of messages, or an object with messages and what else a template sees.
Conversation read_messages(const std::string& path, const PromptFlags& flags) {
  const std::string shown = printable(path, 4096);
  OrderedJson document;
  try {
    document = parse_ordered_json(read_text_file(path, kPromptBytesMax), shown);
  } catch (const Error& error) {
    throw Error(ErrorCode::usage, "--messages " + error.message());
  }
  Conversation conversation = start_conversation(flags);
  if (document.is_array()) {
    conversation.messages = std::move(document);
    return conversation;
  }
  if (!document.is_object() || !document.contains("messages"))
    throw_error(ErrorCode::usage, "--messages {}: expected an array of messages, or an object with \"messages\"",
                shown);
  for (auto& [key, value] : document.items()) {
    if (key == "messages") {
      conversation.messages = value;
    } else if (key == "tools") {
      conversation.options.tools = value;
    } else if (key == "documents") {
      conversation.options.documents = value;
    } else if (key == "chat_template_kwargs" && value.is_object()) {
      for (auto& [name, kwarg] : value.items())
        if (!conversation.options.kwargs.contains(name)) conversation.options.kwargs[name] = kwarg;
    } else {
      throw_error(ErrorCode::usage,
                  "--messages {}: \"{}\" is unknown or of a wrong type; the keys are messages, tools, documents, "
                  "chat_template_kwargs",
                  shown, printable(key));
    }
  }
  return conversation;
}

}  // namespace

PromptSource prompt_source(const PromptFlags& flags) {
  std::vector<std::string_view> given;
  if (flags.text) given.push_back("-p");
  if (flags.file) given.push_back("--prompt-file");
  if (flags.ids) given.push_back("--prompt-ids");
  if (flags.messages) given.push_back("--messages");
  if (given.size() > 1) throw_error(ErrorCode::usage, "{} exclude one another; give one", fmt::join(given, " and "));
  const bool uses_template = !flags.ids && !flags.raw;
  if (flags.system && (!uses_template || flags.messages))
    throw_error(ErrorCode::usage, "--system has no place with {}; write it into the prompt itself",
                flags.messages ? "--messages"
                : flags.ids    ? "--prompt-ids"
                               : "--raw");
  if (flags.template_kwargs && !uses_template)
    throw_error(ErrorCode::usage, "--template-kwargs needs the chat template, which {} skips",
                flags.ids ? "--prompt-ids" : "--raw");
  if (flags.raw && (flags.messages || flags.ids))
    throw_error(ErrorCode::usage, "--raw excludes {}; leave it out", flags.ids ? "--prompt-ids" : "--messages");
  if (given.empty()) return PromptSource::none;
  if (flags.messages) return PromptSource::messages;
  return flags.ids ? PromptSource::ids : PromptSource::text;
}

Conversation start_conversation(const PromptFlags& flags) {
  Conversation conversation;
  conversation.options.kwargs = flags.template_kwargs ? template_kwargs(*flags.template_kwargs) : OrderedJson::object();
  if (flags.system) add_message(conversation, "system", *flags.system);
  return conversation;
}

void add_message(Conversation& conversation, std::string_view role, std::string_view content) {
  OrderedJson message = OrderedJson::object();
  message["role"] = std::string(role);
  message["content"] = is_valid_utf8(content) ? std::string(content) : repair_utf8(content);
  conversation.messages.push_back(std::move(message));
}

TextModel TextModel::load(const std::string& model_dir, int64_t vocab) {
  TextModel model;
  model.model_dir_ = model_dir;
  if (is_listed(model_dir + "/tokenizer.json")) {
    model.tokenizer_ = Tokenizer::load(model_dir);
    model.tokenizer_->require_rows(vocab, printable(model_dir, 4096) + "/tokenizer.json");
    model.template_ = ChatTemplate::load(model_dir);
  }
  model.defaults_ = GenerationDefaults::load(model_dir, model.tokenizer());
  return model;
}

const Tokenizer& TextModel::need_tokenizer() const {
  if (!tokenizer_)
    throw_error(ErrorCode::usage, "{} has no tokenizer.json, so it takes no text; give the prompt as --prompt-ids",
                printable(model_dir_, 4096));
  return *tokenizer_;
}

std::vector<int32_t> TextModel::encode(const Conversation& conversation) const {
  const Tokenizer& tokenizer = need_tokenizer();
  if (!template_)
    throw_error(ErrorCode::usage, "{} has no chat template; use --raw to give the prompt as plain text",
                printable(model_dir_, 4096));
  return tokenizer.encode_segments(template_->render(conversation.messages, conversation.options).segments);
}

std::vector<int32_t> TextModel::encode_raw(std::string_view text) const {
  return need_tokenizer().encode(text, {.add_special_tokens = true, .parse_special = true});
}

std::vector<int32_t> prompt_ids(const PromptFlags& flags, PromptSource source, std::string_view text,
                                const TextModel& model) {
  switch (source) {
    case PromptSource::ids:
      return parse_ids(*flags.ids);
    case PromptSource::messages: {
      const Conversation conversation = read_messages(*flags.messages, flags);
      require_content(conversation.messages, *flags.messages);
      return model.encode(conversation);
    }
    case PromptSource::text: {
      if (text.empty()) throw_error(ErrorCode::usage, "the prompt is empty; give at least one character");
      if (flags.raw) return model.encode_raw(text);
      Conversation conversation = start_conversation(flags);
      add_message(conversation, "user", text);
      return model.encode(conversation);
    }
    case PromptSource::none:
      break;
  }
  OFL_ASSERT(source != PromptSource::none);
  return {};
}

std::string read_prompt(const std::string& path) {
  const bool is_stdin = path.empty();
  const std::string shown = is_stdin ? "standard input" : "--prompt-file " + printable(path, 4096);
  const FileDescriptor file(is_stdin ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)
                                     : open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 1 << 16> bytes;
  ssize_t count = file.get() < 0 ? -1 : 1;
  while (count > 0) {
    if (!wait_readable(file.get())) stop_if_interrupted();
    count = read(file.get(), bytes.data(), bytes.size());
    if (count > 0) text.append(bytes.data(), static_cast<size_t>(count));
    if (static_cast<int64_t>(text.size()) > kPromptBytesMax)
      throw_error(ErrorCode::usage, "{}: larger than the {} bytes that a prompt may have", shown, kPromptBytesMax);
  }
  if (count < 0) throw_error(ErrorCode::usage, "{}: {}", shown, std::strerror(errno));
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace offload::tools
