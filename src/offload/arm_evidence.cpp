#include "offload/arm_evidence.h"

namespace offload {
namespace {

OracleKl oracle_kl(const Json& json) {
  return {json.at("mean_kl").get<double>(), json.at("median_kl").get<double>()};
}

Yardstick yardstick_of(const Json& controls, size_t prompts, std::string_view origin) {
  Yardstick yardstick{.flips = controls.at("flips").get<int64_t>(),
                      .largest_margin = controls.at("largest_margin").get<double>(),
                      .prompt_flips = controls.at("prompt_flips").get<std::vector<int64_t>>()};
  const size_t expected = controls.at("arms").empty() ? 0 : prompts;
  if (yardstick.prompt_flips.size() != expected)
    throw_error(ErrorCode::input, "{}: controls.prompt_flips has {} numbers, expected {}: one for each prompt", origin,
                yardstick.prompt_flips.size(), expected);
  return yardstick;
}

}  // namespace

ArmEvidence parse_evidence(std::string_view text, std::string_view origin) {
  const Json json = parse_json(text, origin);
  ArmEvidence evidence;
  try {
    evidence.arm = json.at("arm").get<std::string>();
    evidence.baseline = json.at("baseline").get<std::string>();
    evidence.model = json.at("model").get<std::string>();
    evidence.device = json.at("device").get<std::string>();
    evidence.rules = parse_rules(json.at("rules"), std::string(origin));
    const Json &total = json.at("total"), &oracle = json.at("oracle");
    evidence.score = {.flips = total.at("flips").get<int64_t>(),
                      .rows_not_finite = total.at("rows_not_finite").get<int64_t>(),
                      .largest_margin = total.at("largest_margin").get<double>()};
    for (const Json& prompt : json.at("prompts")) {
      evidence.prompts.push_back({prompt.at("name").get<std::string>(), prompt.at("prompt_tokens").get<int64_t>(),
                                  prompt.at("decode_tokens").get<int64_t>()});
      evidence.score.prompts.push_back({evidence.prompts.back().name, prompt.at("flips").get<int64_t>()});
    }
    evidence.yardstick = yardstick_of(json.at("controls"), evidence.prompts.size(), origin);
    if (oracle.is_null()) return evidence;
    evidence.score.oracle = oracle_kl(oracle.at("total"));
    evidence.yardstick.baseline = oracle_kl(oracle.at("baseline"));
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::input, "{}: no evidence of offload-parity: {}", origin, json_error_text(error.what()));
  }
  return evidence;
}

std::vector<std::string> evidence_faults(const Arm& arm, const ArmEvidence& evidence) {
  std::vector<std::string> faults;
  if (evidence.arm != arm.name) faults.push_back(fmt::format("is of arm \"{}\", not \"{}\"", evidence.arm, arm.name));
  if (!(evidence.rules == arm.rules)) faults.push_back("was measured with other rules; measure again");
  if (evidence.baseline != kBaselineArm)
    faults.push_back(fmt::format("compares with \"{}\", not \"{}\"", evidence.baseline, kBaselineArm));
  if (evidence.prompts.size() < kEvidencePromptsMin)
    faults.push_back(
        fmt::format("has {} prompts, at least {} are needed", evidence.prompts.size(), kEvidencePromptsMin));
  for (const ArmEvidence::Prompt& prompt : evidence.prompts)
    if (prompt.prompt_tokens < kEvidencePromptTokensMin || prompt.decode_tokens < kEvidenceDecodeTokensMin)
      faults.push_back(fmt::format("prompt {} has {} + {} decisions, at least {} + {} are needed", prompt.name,
                                   prompt.prompt_tokens, prompt.decode_tokens, kEvidencePromptTokensMin,
                                   kEvidenceDecodeTokensMin));
  int64_t prompt_flips = 0;
  for (const PromptFlips& prompt : evidence.score.prompts) prompt_flips += prompt.flips;
  if (prompt_flips != evidence.score.flips)
    faults.push_back(fmt::format("its prompts have {} flips, its total {}", prompt_flips, evidence.score.flips));
  if (!evidence.score.oracle) faults.push_back("has no oracle; measure with --oracle");
  return faults;
}

}  // namespace offload
