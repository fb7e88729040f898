#include "core/models/registry.h"

#include <array>

#include "core/models/qwen4_exp.h"

namespace offload {
namespace {

constexpr int64_t kConfigBytesMax = 16 << 20;

struct Entry {
  std::string_view model_type;
  ModelSpec (*spec)(const Json&, std::string_view);
};
constexpr std::array<Entry, 2> kModels{{{"qwen4_exp", qwen4_exp_spec}, {"qwen4_exp_text", qwen4_exp_spec}}};

}  // namespace

ModelSpec model_spec(const Json& config, std::string_view origin) {
  if (!config.is_object()) throw_error(ErrorCode::input, "{}: expected a JSON object", origin);
  const std::string type = json_get<std::string>(config, "model_type", "", origin);
  if (type.empty()) throw_error(ErrorCode::input, "{}: model_type is missing; this is no model's config.json", origin);
  std::string known;
  for (const Entry& entry : kModels) {
    if (entry.model_type == type) return entry.spec(config, origin);
    known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.model_type);
  }
  throw_error(ErrorCode::input, "{}: model_type \"{}\" is not supported; supported: {}", origin, printable(type),
              known);
}

ModelSpec load_model_spec(const std::string& model) {
  const std::string path = model.ends_with(".json") ? model : model + "/config.json";
  return model_spec(parse_json(read_text_file(path, kConfigBytesMax), printable(path, 4096)), printable(path, 4096));
}

}  // namespace offload
