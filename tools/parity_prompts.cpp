#include "parity_prompts.h"

#include <algorithm>
#include <limits>

#include "common.h"
#include "core/json.h"

namespace offload::tools {
namespace {

constexpr int64_t kPromptsBytesMax = 64 << 20;

struct GivenPrompt {
  std::string name;
  std::string text;          // used when there are no ids
  std::vector<int32_t> ids;  // empty: encode the text
};

std::vector<GivenPrompt> built_in(const std::string& names) {
  const std::vector<std::string> known = split_list(kBuiltInPrompts);
  std::vector<GivenPrompt> prompts;
  for (const std::string& name : split_list(names)) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw_error(ErrorCode::usage, "--prompts \"{}\" is unknown; give {}, or a file that ends in .json",
                  printable(name), kBuiltInPrompts);
    prompts.push_back({name, read_text_file(bundled_path("configs/prompts/" + name + ".txt"), kPromptsBytesMax), {}});
  }
  return prompts;
}

// As whole numbers that an id can be; a vocabulary has its own say.
std::vector<int32_t> read_ids(const Json& json, std::string_view shown) {
  std::vector<int32_t> ids;
  if (!json.is_array()) throw_error(ErrorCode::input, "{}: \"ids\" is no array", shown);
  for (const Json& id : json) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max()))
      throw_error(ErrorCode::input, "{}: id {} is no token id; expected a whole number from 0 up", shown,
                  printable(id.dump(), 64));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::vector<GivenPrompt> read_prompts(const std::string& path) {
  const std::string shown = "--prompts " + printable(path, 4096);
  const Json document = parse_json(read_text_file(path, kPromptsBytesMax), shown);
  std::vector<GivenPrompt> prompts;
  try {
    if (!document.is_array() || document.empty()) throw_error(ErrorCode::input, "{}: expected an array", shown);
    for (const Json& each : document) {
      GivenPrompt prompt{.name = each.at("name").get<std::string>(), .text = {}, .ids = {}};
      if (each.contains("ids"))
        prompt.ids = read_ids(each.at("ids"), shown);
      else
        prompt.text = each.at("text").get<std::string>();
      prompts.push_back(std::move(prompt));
    }
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::input, "{}: expected objects of \"name\" and \"text\" or \"ids\": {}", shown,
                json_error_text(error.what()));
  }
  return prompts;
}

}  // namespace

std::vector<ParityPrompt> parity_prompts(const std::string& given, int64_t tokens_max, int64_t vocab,
                                         const TextModel& model) {
  std::vector<ParityPrompt> prompts;
  for (GivenPrompt& each : given.ends_with(".json") ? read_prompts(given) : built_in(given)) {
    if (each.ids.empty() && model.tokenizer() == nullptr)
      throw_error(ErrorCode::usage,
                  "prompt {} is text and the model has no tokenizer; give --prompts FILE.json with \"ids\"",
                  printable(each.name));
    ParityPrompt prompt{std::move(each.name), std::move(each.ids)};
    if (prompt.ids.empty()) prompt.ids = model.tokenizer()->encode(each.text);
    if (prompt.ids.empty()) throw_error(ErrorCode::usage, "prompt {} has no tokens", printable(prompt.name));
    for (const int32_t id : prompt.ids)
      if (id < 0 || id >= vocab)
        throw_error(ErrorCode::usage, "prompt {}: token {} is outside the vocabulary 0..{}", printable(prompt.name), id,
                    vocab - 1);
    if (static_cast<int64_t>(prompt.ids.size()) > tokens_max) prompt.ids.resize(static_cast<size_t>(tokens_max));
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace offload::tools
