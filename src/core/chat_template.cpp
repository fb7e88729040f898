#include "core/chat_template.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <filesystem>
#include <set>

#include "core/jinja/interpreter.h"
#include "core/jinja/parser.h"

namespace offload {
namespace {

using jinja::Heap;
using jinja::Kind;
using jinja::Mapping;
using jinja::Trust;
using jinja::Value;

constexpr int64_t kTokenizerConfigBytesMax = int64_t{64} << 20;   // some list thousands of added tokens, in a few MB
constexpr auto kReplace = OrderedJson::error_handler_t::replace;  // of invalid UTF-8
constexpr std::string_view kPointerStart = "version https://git-lfs.github.com/spec/";

jinja::Program parse(std::string_view source, std::string origin) {
  if (source.starts_with(kPointerStart))
    throw_error(ErrorCode::input, "{}: is a Git LFS pointer, not a template; fetch the file itself", origin);
  return jinja::parse_template(source, std::move(origin));
}

// --- messages --------------------------------------------------------------------------------------------------------

void check_messages(const OrderedJson& messages) {
  if (!messages.is_array() || messages.empty())
    throw_error(ErrorCode::usage, "messages: expected a non-empty array, found {}",
                messages.is_array() ? "an empty one" : messages.type_name());
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!messages[i].is_object())
      throw_error(ErrorCode::usage, "messages[{}]: expected an object, found {}", i, messages[i].type_name());
    const auto role = messages[i].find("role");
    if (role == messages[i].end() || !role->is_string())
      throw_error(ErrorCode::usage, "messages[{}].role: expected a string, found {}", i,
                  role == messages[i].end() ? "nothing" : role->type_name());
    const auto content = messages[i].find("content");
    if (content == messages[i].end() || content->is_null() || content->is_string()) continue;
    if (!content->is_array())
      throw_error(ErrorCode::usage, "messages[{}].content: expected a string, a list of parts or null, found {}", i,
                  content->type_name());
    for (size_t j = 0; j < content->size(); ++j)
      if (!content->at(j).is_object())
        throw_error(ErrorCode::usage,
                    "messages[{}].content[{}]: expected an object as {{\"type\": \"text\", \"text\": ...}}, found {}",
                    i, j, content->at(j).type_name());
  }
}

bool is_text_part(const OrderedJson& part) {
  const auto type = part.find("type"), text = part.find("text");
  return type != part.end() && *type == "text" && text != part.end() && text->is_string();
}

bool is_all_text(const OrderedJson& parts) {
  return std::all_of(parts.begin(), parts.end(), is_text_part);
}

// The texts of a content's parts, line by line. Throws Error{usage} naming a part that has none.
std::string joined_text(const OrderedJson& parts, const std::string& where) {
  std::string joined;
  for (size_t j = 0; j < parts.size(); ++j) {
    const auto type = parts[j].find("type"), text = parts[j].find("text");
    if (type == parts[j].end() || *type != "text")
      throw_error(ErrorCode::usage, "{}[{}]: the chat template takes text alone, found a part of type {}", where, j,
                  type == parts[j].end() ? "nothing" : printable(type->dump(-1, ' ', false, kReplace)));
    if (!is_text_part(parts[j]))
      throw_error(ErrorCode::usage, "{}[{}].text: expected a string, found {}", where, j,
                  text == parts[j].end() ? "nothing" : text->type_name());
    if (j > 0) joined += '\n';
    joined += text->get_ref<const std::string&>();
  }
  return joined;
}

void check_options(const RenderOptions& options) {
  const auto check = [](const OrderedJson& value, bool right, std::string_view name, std::string_view expected) {
    if (!value.is_null() && !right)
      throw_error(ErrorCode::usage, "{}: expected {}, found {}", name, expected, value.type_name());
  };
  check(options.tools, options.tools.is_array(), "tools", "an array");
  check(options.documents, options.documents.is_array(), "documents", "an array");
  check(options.kwargs, options.kwargs.is_object(), "chat_template_kwargs", "an object");
}

enum class NullContent { keep, empty };

// How a conversation is put to a template.
struct Form {
  NullContent null_content = NullContent::keep;
  std::set<size_t> joined;  // messages whose parts are given as one string
};

// The values of one rendering. Remembers where tool-call arguments were no JSON object, and which parts of contents the
// template has looked into.
class Converter {
 public:
  // Both outlive the rendering.
  Converter(Heap& heap, const Form& form) : heap_(heap), form_(form) {}

  Value messages(const OrderedJson& messages) {
    std::vector<Value> made;
    made.reserve(messages.size());
    for (size_t i = 0; i < messages.size(); ++i) made.push_back(message(messages[i], i));
    return heap_.list(std::move(made));
  }

  bool had_null_content() const { return had_null_content_; }
  // Messages with a part that the template has not looked into.
  std::set<size_t> unread() const {
    std::set<size_t> messages;
    for (const Part& part : parts_)
      if (!part.is_read) messages.insert(part.message);
    return messages;
  }
  const std::string& broken_arguments() const { return broken_arguments_; }

 private:
  void put(Mapping& mapping, const std::string& key, const Value& value) {
    mapping.set(heap_.from_json(OrderedJson(key), Trust::untrusted), value, heap_);
  }

  Value content_of_null() {
    had_null_content_ = true;
    return form_.null_content == NullContent::keep ? Value::null_content() : heap_.string(std::string_view());
  }

  Value content_of_parts(const OrderedJson& parts, size_t index) {
    if (parts.empty() || form_.joined.contains(index))
      return heap_.from_json(OrderedJson(joined_text(parts, fmt::format("messages[{}].content", index))),
                             Trust::untrusted);
    const Value list = heap_.from_json(parts, Trust::untrusted);
    for (const Value& part : list.as_sequence().items)
      part.as_mapping().is_read = &parts_.emplace_back(Part{index}).is_read;
    return list;
  }

  Value message(const OrderedJson& json, size_t index) {
    const std::string where = fmt::format("messages[{}]", index);
    Mapping* made = heap_.mapping();
    for (const auto& [key, value] : json.items()) {
      if (key == "content" && value.is_null())
        put(*made, key, content_of_null());
      else if (key == "content" && value.is_array())
        put(*made, key, content_of_parts(value, index));
      else if (key == "tool_calls" && value.is_array())
        put(*made, key, tool_calls(value, where + ".tool_calls"));
      else if (key == "function_call" && value.is_object())
        put(*made, key, function(value, where + ".function_call"));
      else
        put(*made, key, heap_.from_json(value, Trust::untrusted));
    }
    if (!json.contains("content")) made->set(heap_.string(std::string_view("content")), content_of_null(), heap_);
    return Value::mapping(made);
  }

  Value tool_calls(const OrderedJson& calls, const std::string& where) {
    std::vector<Value> made;
    for (size_t i = 0; i < calls.size(); ++i)
      made.push_back(calls[i].is_object() ? function(calls[i], fmt::format("{}[{}]", where, i))
                                          : heap_.from_json(calls[i], Trust::untrusted));
    return heap_.list(std::move(made));
  }

  // An object with `arguments`, or with a `function` that has them.
  Value function(const OrderedJson& json, const std::string& where) {
    Mapping* made = heap_.mapping();
    for (const auto& [key, value] : json.items()) {
      if (key == "function" && value.is_object() && !in_function_)
        put(*made, key, nested_function(value, where + ".function"));
      else if (key == "arguments" && value.is_string())
        put(*made, key, arguments(value.get_ref<const std::string&>(), where + ".arguments"));
      else if (key == "arguments" && value.is_null())
        put(*made, key, Value::mapping(heap_.mapping()));
      else
        put(*made, key, heap_.from_json(value, Trust::untrusted));
    }
    return Value::mapping(made);
  }

  Value nested_function(const OrderedJson& json, const std::string& where) {
    in_function_ = true;
    const Value made = function(json, where);
    in_function_ = false;
    return made;
  }

  Value arguments(const std::string& text, const std::string& where) {
    const Value string = heap_.from_json(OrderedJson(text), Trust::untrusted);
    std::string why = "holds no JSON object";
    try {
      const bool blank = text.find_first_not_of(" \t\r\n") == std::string::npos;
      const OrderedJson json = blank ? OrderedJson::object() : parse_ordered_json(text, where);
      if (json.is_object()) {
        const Value made = heap_.from_json(json, Trust::untrusted);
        made.as_mapping().source = &string.as_text();
        return made;
      }
    } catch (const Error& error) {
      why = error.message();
    }
    if (broken_arguments_.empty()) broken_arguments_ = why.starts_with(where) ? why : where + ": " + why;
    return string;
  }

  struct Part {
    size_t message;
    bool is_read = false;
  };

  Heap& heap_;
  const Form& form_;
  std::deque<Part> parts_;  // grows without moving
  bool in_function_ = false;
  bool had_null_content_ = false;
  std::string broken_arguments_;
};

RenderedPrompt to_prompt(const jinja::Text& text) {
  RenderedPrompt prompt;
  const std::string& bytes = text.bytes();
  size_t at = 0;
  const auto put = [&](size_t end, bool trusted) {
    if (end > at) prompt.segments.push_back({bytes.substr(at, end - at), trusted});
    at = end;
  };
  for (const jinja::Span& span : text.untrusted()) {
    put(span.begin, true);
    put(span.end, false);
  }
  put(bytes.size(), true);
  return prompt;
}

// --- checkpoint folder -----------------------------------------------------------------------------------------------

// A special token is given as its text or as an object with its text as content.
std::optional<std::string> token_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string())
    return value["content"].get<std::string>();
  return std::nullopt;
}

// The template called `name` in the list form of the key chat_template; null when there is none.
const std::string* named_template(const Json& list, std::string_view name, const std::string& path) {
  const std::string* found = nullptr;
  for (const Json& entry : list) {
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() || !entry.contains("template") ||
        !entry["template"].is_string())
      throw_error(ErrorCode::input, "{}: chat_template: expected entries with the strings name and template", path);
    if (entry["name"].get_ref<const std::string&>() == name) found = &entry["template"].get_ref<const std::string&>();
  }
  return found;
}

}  // namespace

std::tm local_time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return local;
}

std::string RenderedPrompt::text() const {
  std::string all;
  for (const PromptSegment& segment : segments) all += segment.text;
  return all;
}

ChatTemplate::ChatTemplate(std::string_view source, std::string origin) : program_(parse(source, std::move(origin))) {}

std::optional<ChatTemplate> ChatTemplate::load(const std::string& model_dir) {
  const std::string template_path = model_dir + "/chat_template.jinja";
  const std::string config_path = model_dir + "/tokenizer_config.json";
  Json config = Json::object();
  if (is_listed(config_path)) {
    config = parse_json(read_text_file(config_path, kTokenizerConfigBytesMax), config_path);
    if (!config.is_object())
      throw_error(ErrorCode::input, "{}: expected an object, found {}", config_path, config.type_name());
  }
  std::optional<ChatTemplate> made;
  if (is_listed(template_path)) {
    made = ChatTemplate(read_text_file(template_path, static_cast<int64_t>(jinja::kTemplateBytesMax)), template_path);
  } else if (const auto found = config.find("chat_template"); found != config.end() && !found->is_null()) {
    const std::string origin = config_path + ": chat_template";
    if (found->is_string()) {
      made = ChatTemplate(found->get_ref<const std::string&>(), origin);
    } else if (found->is_array()) {
      const std::string* source = named_template(*found, "default", config_path);
      if (!source) throw_error(ErrorCode::input, "{}: the list has no entry named \"default\"", origin);
      made = ChatTemplate(*source, origin + " \"default\"");
      if (const std::string* tool_use = named_template(*found, "tool_use", config_path))
        made->tool_use_ = parse(*tool_use, origin + " \"tool_use\"");
    } else {
      throw_error(ErrorCode::input, "{}: expected a string or a list, found {}", origin, found->type_name());
    }
  }
  if (!made) return std::nullopt;
  for (const auto& [key, value] : config.items())
    if (const auto text = token_text(value); text && key.ends_with("_token"))
      made->special_tokens_.emplace_back(key, *text);
  return made;
}

RenderedPrompt ChatTemplate::render(const OrderedJson& messages, const RenderOptions& options) const {
  check_messages(messages);
  check_options(options);
  const jinja::Program& program =
      tool_use_ && options.tools.is_array() && !options.tools.empty() ? *tool_use_ : program_;

  const auto attempt = [&](Heap& heap, Converter& converter) {
    jinja::Variables variables;
    for (const auto& tokens : {special_tokens_, options.special_tokens})
      for (const auto& [name, text] : tokens)
        variables.emplace_back(name, heap.from_json(OrderedJson(text), Trust::trusted));
    variables.emplace_back("tools", heap.from_json(options.tools, Trust::untrusted));
    variables.emplace_back("documents", heap.from_json(options.documents, Trust::untrusted));
    variables.emplace_back("add_generation_prompt", Value::boolean(options.add_generation_prompt));
    if (options.kwargs.is_object())
      for (const auto& [name, value] : options.kwargs.items())
        variables.emplace_back(name, heap.from_json(value, Trust::untrusted));
    variables.emplace_back("messages", converter.messages(messages));
    try {
      return jinja::render(program, variables, heap, options.clock);
    } catch (const Error& error) {
      if (converter.broken_arguments().empty()) throw;
      throw Error(error.code(), fmt::format("{}; note that {}", error.message(), converter.broken_arguments()));
    }
  };

  // Each round changes the form for good: parts that were not read are joined, then null content becomes "".
  for (Form form;;) {
    Heap heap;
    Converter converter(heap, form);
    std::optional<jinja::Text> text;
    std::exception_ptr failure;
    try {
      text = attempt(heap, converter);
    } catch (const Error&) {
      failure = std::current_exception();
    }
    std::set<size_t> unread = converter.unread();
    if (failure) std::erase_if(unread, [&](size_t i) { return !is_all_text(messages[i]["content"]); });
    const bool may_empty = form.null_content == NullContent::keep && converter.had_null_content() &&
                           (failure ? !heap.raised : heap.null_content_printed);
    if (!unread.empty()) {
      form.joined.merge(unread);
    } else if (may_empty) {
      form.null_content = NullContent::empty;
    } else if (failure) {
      std::rethrow_exception(failure);
    } else {
      return to_prompt(*text);
    }
  }
}

}  // namespace offload
