#include "core/arm.h"

#include <fmt/format.h>
#include <algorithm>
#include <limits>

#include "core/canonical.h"

namespace offload {

void MathRules::add(const MathRule& rule) {
  OFL_ASSERT(count_ < kRulesMax);
  rules_[static_cast<size_t>(count_++)] = rule;
}

Math MathRules::math_of(Site site, Phase phase, int64_t rows) const {
  if (rows <= kCanonicalRowsMax || phase == Phase::decode) return Math::native;
  for (const MathRule& rule : rules())
    if (rule.site == site && (!rule.phase || *rule.phase == phase) && rows >= rule.rows_min) return rule.math;
  return Math::native;
}

std::string_view site_name(Site site) {
  switch (site) {
    case Site::dense:
      return "dense";
    case Site::hyper_connection:
      return "hyper_connection";
    case Site::experts:
      return "experts";
  }
  return "";
}

std::string_view math_name(Math math) {
  switch (math) {
    case Math::native:
      return "native";
    case Math::scaled_fp16:
      return "scaled_fp16";
    case Math::fp16:
      return "fp16";
    case Math::fp16_out:
      return "fp16_out";
    case Math::reordered:
      return "reordered";
  }
  return "";
}

std::string_view status_name(ArmStatus status) {
  switch (status) {
    case ArmStatus::strict:
      return "strict";
    case ArmStatus::experimental:
      return "experimental";
    case ArmStatus::rejected:
      return "rejected";
    case ArmStatus::control:
      return "control";
  }
  return "";
}

namespace {

constexpr std::array kSites{Site::dense, Site::hyper_connection, Site::experts};
constexpr std::array kMaths{Math::native, Math::scaled_fp16, Math::fp16, Math::fp16_out, Math::reordered};
constexpr std::array kStatuses{ArmStatus::strict, ArmStatus::experimental, ArmStatus::rejected, ArmStatus::control};

// Reads the fields of one JSON object; `where` ("arms.json: arm \"x\"") opens every message.
class RuleFields {
 public:
  RuleFields(const Json& json, std::string where, std::initializer_list<std::string_view> known)
      : json_(json), where_(std::move(where)) {
    if (!json.is_object()) throw_error(ErrorCode::input, "{}: expected an object", where_);
    for (const auto& [key, value] : json.items())
      if (std::find(known.begin(), known.end(), key) == known.end())
        throw_error(ErrorCode::input, "{}: field \"{}\" is unknown; the fields are {}", where_, printable(key),
                    fmt::join(known, ", "));
  }

  std::string text(const char* key) const {
    const Json& value = at(key);
    if (!value.is_string()) throw_error(ErrorCode::input, "{}: \"{}\" must be text", where_, key);
    return value.get<std::string>();
  }
  const Json& array(const char* key) const {
    const Json& value = at(key);
    if (!value.is_array()) throw_error(ErrorCode::input, "{}: \"{}\" must be an array", where_, key);
    return value;
  }
  // The enumerator that `name_of` spells so.
  template <typename Enum, size_t n>
  Enum word(const char* key, const std::array<Enum, n>& values, std::string_view (*name_of)(Enum)) const {
    const std::string given = text(key);
    std::string known;
    for (const Enum value : values) {
      if (name_of(value) == given) return value;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", name_of(value));
    }
    throw_error(ErrorCode::input, "{}: {} \"{}\" is unknown; expected one of {}", where_, key, printable(given), known);
  }
  bool has(const char* key) const { return json_.contains(key); }
  int64_t count(const char* key) const {
    const Json& value = at(key);
    if (!value.is_number_integer() || value < 1 || value > std::numeric_limits<int32_t>::max())
      throw_error(ErrorCode::input, "{}: \"{}\" must be a whole number of at least 1", where_, key);
    return value.get<int64_t>();
  }
  const std::string& where() const { return where_; }

 private:
  const Json& at(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) throw_error(ErrorCode::input, "{}: field \"{}\" is missing", where_, key);
    return *found;
  }

  const Json& json_;
  std::string where_;
};

MathRule parse_rule(const Json& json, const std::string& where) {
  const RuleFields fields(json, where, {"site", "phase", "rows_min", "math"});
  MathRule rule{.site = fields.word("site", kSites, site_name), .math = fields.word("math", kMaths, math_name)};
  if (fields.has("rows_min")) rule.rows_min = fields.count("rows_min");
  if (!fields.has("phase")) return rule;
  const std::string phase = fields.text("phase");
  if (phase == "prefill" || phase == "decode")
    rule.phase = phase == "prefill" ? Phase::prefill : Phase::decode;
  else if (phase != "any")
    throw_error(ErrorCode::input, "{}: phase \"{}\" is unknown; expected one of prefill, decode, any", where,
                printable(phase));
  return rule;
}

void check_evidence_path(const std::string& path, const std::string& where) {
  if (path.empty() || path.front() == '/' || path.find("..") != std::string::npos || !path.ends_with(".json"))
    throw_error(ErrorCode::input, "{}: evidence \"{}\" must be a .json file below the folder of this one", where,
                printable(path));
}

Arm parse_arm(const Json& json, size_t index, std::string_view origin) {
  const std::initializer_list<std::string_view> known = {"name", "status", "evidence", "description", "rules"};
  Arm arm;
  arm.name = RuleFields(json, fmt::format("{}: arm {}", origin, index), known).text("name");
  if (arm.name.empty()) throw_error(ErrorCode::input, "{}: arm {}: the name is empty", origin, index);
  const RuleFields fields(json, fmt::format("{}: arm \"{}\"", origin, printable(arm.name)), known);
  arm.status = fields.word("status", kStatuses, status_name);
  arm.description = fields.text("description");
  for (const Json& path : fields.array("evidence")) {
    if (!path.is_string()) throw_error(ErrorCode::input, "{}: evidence must be file names", fields.where());
    check_evidence_path(arm.evidence.emplace_back(path.get<std::string>()), fields.where());
  }
  const bool judged = arm.status == ArmStatus::strict || arm.status == ArmStatus::rejected;
  if (judged && arm.evidence.empty())
    throw_error(ErrorCode::input, "{}: status {} without evidence; name files of offload-parity --evidence",
                fields.where(), status_name(arm.status));
  arm.rules = parse_rules(fields.array("rules"), fields.where());
  if (arm.name == kBaselineArm && !arm.rules.rules().empty())
    throw_error(ErrorCode::input, "{}: the baseline has no rules", fields.where());
  return arm;
}

}  // namespace

Json rules_json(const MathRules& rules) {
  Json out = Json::array();
  for (const MathRule& rule : rules.rules()) {
    const std::string_view phase = !rule.phase ? "any" : *rule.phase == Phase::prefill ? "prefill" : "decode";
    out.push_back({{"site", site_name(rule.site)},
                   {"phase", phase},
                   {"rows_min", rule.rows_min},
                   {"math", math_name(rule.math)}});
  }
  return out;
}

MathRules parse_rules(const Json& json, const std::string& where) {
  if (!json.is_array()) throw_error(ErrorCode::input, "{}: \"rules\" must be an array", where);
  if (json.size() > MathRules::kRulesMax)
    throw_error(ErrorCode::input, "{}: {} rules; at most {}", where, json.size(), MathRules::kRulesMax);
  MathRules rules;
  for (size_t i = 0; i < json.size(); ++i) rules.add(parse_rule(json[i], fmt::format("{}: rule {}", where, i)));
  return rules;
}

std::vector<Arm> parse_arms(std::string_view json, std::string_view origin) {
  const Json document = parse_json(json, origin);
  const RuleFields fields(document, std::string(origin), {"arms"});
  std::vector<Arm> arms;
  for (const Json& each : fields.array("arms")) {
    Arm arm = parse_arm(each, arms.size(), origin);
    for (const Arm& other : arms)
      if (other.name == arm.name)
        throw_error(ErrorCode::input, "{}: two arms have the name \"{}\"", origin, printable(arm.name));
    arms.push_back(std::move(arm));
  }
  return arms;
}

}  // namespace offload
