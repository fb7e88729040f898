#include "core/generation_config.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "core/json.h"
#include "core/tokenizer.h"

namespace offload {
namespace {

constexpr int64_t kConfigBytesMax = 16 << 20;
constexpr int64_t kTopKMax = 1 << 24;
constexpr int64_t kTokensMax = int64_t{1} << 40;

// Some writers put NaN and Infinity, which JSON lacks, into configurations. As strings they reach the checks below,
// which name the key.
std::string quote_non_finite(std::string_view json) {
  std::string out;
  bool in_string = false;
  for (size_t at = 0; at < json.size();) {
    if (!in_string) {
      const auto starts = [&](std::string_view word) { return json.substr(at, word.size()) == word; };
      const size_t size = starts("NaN") ? 3 : starts("Infinity") ? 8 : starts("-Infinity") ? 9 : 0;
      if (size > 0) {
        out.append("\"").append(json.substr(at, size)).append("\"");
        at += size;
        continue;
      }
    } else if (json[at] == '\\') {
      out.push_back(json[at++]);
      if (at == json.size()) break;
      out.push_back(json[at++]);
      continue;
    }
    in_string ^= json[at] == '"';
    out.push_back(json[at++]);
  }
  return out;
}

Json parse_config(std::string_view text, std::string_view origin) {
  Json json = parse_json(quote_non_finite(text), origin);
  if (!json.is_object()) throw_error(ErrorCode::input, "{}: must be a JSON object", origin);
  return json;
}

[[noreturn]] void bad_value(std::string_view origin, std::string_view key, const Json& value,
                            std::string_view expected) {
  throw_error(ErrorCode::input, "{}: {} is {}; expected {}", origin, key, printable(value.dump(-1, ' ', true)),
              expected);
}

int32_t token_id(const Json& value, std::string_view origin, std::string_view key) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<int32_t>::max())
    bad_value(origin, key, value, "a token id (an integer >= 0)");
  return value.get<int32_t>();
}

void read_id(const Json& json, const char* key, std::string_view origin, std::optional<int32_t>& id) {
  const auto found = json.find(key);
  if (found != json.end() && !found->is_null()) id = token_id(*found, origin, key);
}

void add_eos_id(int32_t id, GenerationDefaults& defaults) {
  const auto place = std::lower_bound(defaults.eos_ids.begin(), defaults.eos_ids.end(), id);
  if (place == defaults.eos_ids.end() || *place != id) defaults.eos_ids.insert(place, id);
}

// eos_token_id is an id, a list of ids, or null.
void read_eos_ids(const Json& json, std::string_view origin, GenerationDefaults& defaults) {
  const auto found = json.find("eos_token_id");
  if (found == json.end() || found->is_null()) return;
  if (!found->is_array()) return add_eos_id(token_id(*found, origin, "eos_token_id"), defaults);
  for (const Json& id : *found) add_eos_id(token_id(id, origin, "eos_token_id"), defaults);
}

struct Bounds {
  double low, high;
  bool low_allowed;
  const char* expected;
};

void read_number(const Json& json, const char* key, std::string_view origin, const Bounds& bounds, double& value) {
  value = json_get<double>(json, key, value, origin);
  if (!(value <= bounds.high && (bounds.low_allowed ? value >= bounds.low : value > bounds.low)))
    bad_value(origin, key, json[key], bounds.expected);
}

}  // namespace

void apply_generation_config(std::string_view text, std::string_view origin, GenerationDefaults& defaults) {
  constexpr double kInfinite = std::numeric_limits<double>::max();
  const Json json = parse_config(text, origin);
  read_eos_ids(json, origin, defaults);
  read_id(json, "bos_token_id", origin, defaults.bos_id);
  read_id(json, "pad_token_id", origin, defaults.pad_id);
  defaults.do_sample = json_get<bool>(json, "do_sample", defaults.do_sample, origin);
  read_number(json, "temperature", origin, {0, kInfinite, true, "a number >= 0"}, defaults.temperature);
  read_number(json, "top_p", origin, {0, 1, false, "a number above 0 and at most 1"}, defaults.top_p);
  read_number(json, "min_p", origin, {0, 1, true, "a number from 0 to 1"}, defaults.min_p);
  read_number(json, "repetition_penalty", origin, {0, kInfinite, false, "a number > 0"}, defaults.repetition_penalty);
  defaults.top_k = json_get<int64_t>(json, "top_k", defaults.top_k, origin);
  if (defaults.top_k < 0 || defaults.top_k > kTopKMax)
    bad_value(origin, "top_k", json["top_k"], "an integer >= 0 (0: off)");
  const auto tokens = json_get<int64_t>(json, "max_new_tokens", 0, origin);
  const bool sets_tokens = json.contains("max_new_tokens") && !json["max_new_tokens"].is_null();
  if (sets_tokens && (tokens < 1 || tokens > kTokensMax))
    bad_value(origin, "max_new_tokens", json["max_new_tokens"], "an integer >= 1");
  if (sets_tokens) defaults.max_new_tokens = tokens;
}

void apply_model_config(std::string_view text, std::string_view origin, GenerationDefaults& defaults) {
  const Json json = parse_config(text, origin);
  const auto read = [&](const Json& config) {
    read_eos_ids(config, origin, defaults);
    if (!defaults.bos_id) read_id(config, "bos_token_id", origin, defaults.bos_id);
    if (!defaults.pad_id) read_id(config, "pad_token_id", origin, defaults.pad_id);
  };
  read(json);
  const auto inner = json.find("text_config");
  if (inner != json.end() && inner->is_object()) read(*inner);
}

GenerationDefaults GenerationDefaults::load(const std::string& model_directory, const Tokenizer* tokenizer) {
  namespace fs = std::filesystem;
  GenerationDefaults defaults;
  const auto apply = [&](const char* name, void (*read)(std::string_view, std::string_view, GenerationDefaults&)) {
    const fs::path path = fs::path(model_directory) / name;
    if (is_listed(path.string()))
      read(read_text_file(path.string(), kConfigBytesMax), printable(path.string(), 4096), defaults);
  };
  apply("generation_config.json", apply_generation_config);
  apply("config.json", apply_model_config);
  if (!tokenizer) return defaults;
  const auto eos = tokenizer->named_tokens().find("eos_token");
  if (eos == tokenizer->named_tokens().end()) return defaults;
  const auto id = tokenizer->token_to_id(eos->second);
  if (!id)
    throw_error(ErrorCode::input, "{}: eos_token of tokenizer_config.json is \"{}\", which is no token",
                printable(model_directory, 4096), printable(eos->second));
  add_eos_id(*id, defaults);
  return defaults;
}

}  // namespace offload
