#include "core/normalizer.h"

#include <utility>

#include "core/unicode.h"

namespace offload {
namespace {

constexpr int kNormalizerDepthMax = 8;

}  // namespace

void read_string_replacement(const Json& json, std::string_view origin, std::string_view component, std::string& from,
                             std::string& to) {
  const auto pattern = json.find("pattern");
  if (pattern != json.end() && pattern->is_object()) from = json_get<std::string>(*pattern, "String", "", origin);
  if (from.empty())
    throw_error(ErrorCode::input, "{}: {} Replace needs a pattern {{\"String\": ...}} that is not empty", origin,
                component);
  to = json_get<std::string>(json, "content", "", origin);
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t copied = 0;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, copied)) {
    out.append(text.substr(copied, at - copied)).append(to);
    copied = at + from.size();
  }
  return out.append(text.substr(copied));
}

Normalizer::Normalizer(const Json& json, std::string_view origin) {
  if (!json.is_null()) add_steps(json, origin, 0);
}

void Normalizer::add_steps(const Json& json, std::string_view origin, int depth) {
  const std::string type = json_get<std::string>(json, "type", "", origin);
  if (type == "Sequence") {
    const auto parts = json.find("normalizers");
    if (parts == json.end() || !parts->is_array() || depth == kNormalizerDepthMax)
      throw_error(ErrorCode::input, "{}: normalizer Sequence needs a list \"normalizers\", nested at most {} deep",
                  origin, kNormalizerDepthMax);
    for (const Json& part : *parts) add_steps(part, origin, depth + 1);
  } else if (type == "NFC") {
    steps_.push_back({Kind::nfc, "", ""});
  } else if (type == "Prepend") {
    steps_.push_back({Kind::prepend, "", json_get<std::string>(json, "prepend", "", origin)});
  } else if (type == "Replace") {
    Step step{Kind::replace, "", ""};
    read_string_replacement(json, origin, "normalizer", step.from, step.to);
    steps_.push_back(std::move(step));
  } else {
    throw_error(ErrorCode::input,
                "{}: normalizer type \"{}\" is unsupported; supported are NFC, Prepend, Replace and Sequence", origin,
                printable(type));
  }
}

std::string_view Normalizer::apply(std::string_view text, std::string& buffer) const {
  for (const Step& step : steps_) {
    std::string result;
    switch (step.kind) {
      case Kind::nfc:
        if (nfc(text, result).data() == text.data()) continue;
        break;
      case Kind::prepend:
        if (text.empty()) continue;
        result.append(step.to).append(text);
        break;
      case Kind::replace:
        result = replace_all(text, step.from, step.to);
        break;
    }
    buffer = std::move(result);
    text = buffer;
  }
  return text;
}

}  // namespace offload
