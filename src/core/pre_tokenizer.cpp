#include "core/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "core/regex.h"
#include "core/unicode.h"

namespace offload {
namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Inside brackets: White_Space.
constexpr std::string_view kWhiteSpaceClass =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr int kStageDepthMax = 8;

std::string type_of(const Json& json, std::string_view origin) {
  return json_get<std::string>(json, "type", "", origin);
}

// Appends one escape `\c` of a pattern, at `at`; returns its length.
size_t append_escape(std::string_view pattern, size_t at, bool in_class, std::string_view origin, std::string& out) {
  const char escaped = at + 1 < pattern.size() ? pattern[at + 1] : '\0';
  switch (escaped) {
    case 's':
      out.append(in_class ? "" : "[").append(kWhiteSpaceClass).append(in_class ? "" : "]");
      return 2;
    case 'S':
      if (in_class) {
        out.append(R"(\S\x{180E})");  // PCRE2's \S lacks it
      } else {
        out.append("[^").append(kWhiteSpaceClass).append("]");
      }
      return 2;
    case 'h':
    case 'H':
    case 'R':
    case 'X':
    case 'C':
      throw_error(ErrorCode::input, "{}: pre_tokenizer pattern {} uses \\{}, which is unsupported", origin,
                  printable(pattern), escaped);
    default:
      out.append(pattern.substr(at, 2));
      return 2;
  }
}

}  // namespace

std::string to_pcre2_pattern(std::string_view pattern, std::string_view origin) {
  std::string out;
  bool in_class = false;
  for (size_t at = 0; at < pattern.size();) {
    if (pattern[at] == '\\') {
      at += append_escape(pattern, at, in_class, origin, out);
      continue;
    }
    const bool opens = pattern[at] == '[';
    if (in_class && (opens || pattern.substr(at, 2) == "&&"))
      throw_error(ErrorCode::input, "{}: pre_tokenizer pattern {} nests or intersects classes, which is unsupported",
                  origin, printable(pattern));
    out.push_back(pattern[at++]);
    if (opens) {
      in_class = true;
      if (at < pattern.size() && pattern[at] == '^') out.push_back(pattern[at++]);
      if (at < pattern.size() && pattern[at] == ']') out.push_back(pattern[at++]);  // a leading ] is itself
    } else if (in_class && out.back() == ']') {
      in_class = false;
    }
  }
  return out;
}

PreTokenizerScratch::PreTokenizerScratch() : regex_(std::make_unique<RegexScratch>()) {}
PreTokenizerScratch::~PreTokenizerScratch() = default;

PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

PreTokenizer::PreTokenizer(const Json& json, std::string_view origin) {
  if (!json.is_null()) add_stages(json, origin, 0);
}

namespace {

std::unique_ptr<Regex> split_regex(const Json& json, std::string_view origin) {
  const std::string behavior = json_get<std::string>(json, "behavior", "", origin);
  if (behavior != "Isolated")
    throw_error(ErrorCode::input, "{}: pre_tokenizer Split has behavior \"{}\"; only Isolated is supported", origin,
                printable(behavior));
  if (json_get<bool>(json, "invert", false, origin))
    throw_error(ErrorCode::input, "{}: pre_tokenizer Split has invert true, which is unsupported", origin);
  const auto pattern = json.find("pattern");
  if (pattern != json.end() && pattern->is_object() && pattern->size() == 1) {
    if (pattern->contains("Regex")) {
      const auto text = json_get<std::string>(*pattern, "Regex", "", origin);
      return std::make_unique<Regex>(to_pcre2_pattern(text, origin), RegexSyntax::pcre2, origin);
    }
    if (pattern->contains("String"))
      return std::make_unique<Regex>(json_get<std::string>(*pattern, "String", "", origin), RegexSyntax::literal,
                                     origin);
  }
  throw_error(ErrorCode::input, "{}: pre_tokenizer Split needs a pattern {{\"Regex\": ...}} or {{\"String\": ...}}",
              origin);
}

}  // namespace

void PreTokenizer::add_stages(const Json& json, std::string_view origin, int depth) {
  const std::string type = type_of(json, origin);
  if (byte_level_)
    throw_error(ErrorCode::input, "{}: pre_tokenizer has a {} stage after ByteLevel, which must be the last", origin,
                printable(type));
  if (type == "Sequence") {
    const auto parts = json.find("pretokenizers");
    if (parts == json.end() || !parts->is_array() || depth == kStageDepthMax)
      throw_error(ErrorCode::input, "{}: pre_tokenizer Sequence needs a list \"pretokenizers\", nested at most {} deep",
                  origin, kStageDepthMax);
    for (const Json& part : *parts) add_stages(part, origin, depth + 1);
  } else if (type == "Split") {
    stages_.push_back({split_regex(json, origin)});
  } else if (type == "Digits") {
    const bool individual = json_get<bool>(json, "individual_digits", false, origin);
    stages_.push_back({std::make_unique<Regex>(individual ? R"(\p{N})" : R"(\p{N}+)", RegexSyntax::pcre2, origin)});
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    Stage stage;
    stage.add_prefix_space = json_get<bool>(json, "add_prefix_space", true, origin);
    if (json_get<bool>(json, "use_regex", true, origin))
      stage.regex = std::make_unique<Regex>(to_pcre2_pattern(kGpt2Pattern, origin), RegexSyntax::pcre2, origin);
    stages_.push_back(std::move(stage));
  } else {
    throw_error(ErrorCode::input,
                "{}: pre_tokenizer type \"{}\" is unsupported; supported are Sequence, Split, Digits and ByteLevel",
                origin, printable(type));
  }
}

void PreTokenizer::split(std::string_view text, PreTokenizerScratch& scratch,
                         std::vector<std::string_view>& words) const {
  scratch.prefixed_.clear();
  words.clear();
  if (!text.empty()) words.push_back(text);
  for (const Stage& stage : stages_) {
    if (stage.add_prefix_space) {
      for (std::string_view& word : words)
        if (word.front() != ' ') word = scratch.prefixed_.emplace_back(std::string(" ").append(word));
    }
    if (!stage.regex) continue;
    scratch.pieces_.clear();
    for (const std::string_view word : words) stage.regex->split(word, *scratch.regex_, scratch.pieces_);
    words.swap(scratch.pieces_);
  }
}

}  // namespace offload
