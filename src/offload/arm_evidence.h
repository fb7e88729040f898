// ArmEvidence: what offload-parity measured of one arm on one device, as the small JSON file that arms.json names.
//
// Keys: arm, rules (as in arms.json), baseline, model, device ("cpu", "cuda sm_90", "cuda forced sm_75"),
// instruction_set, command [program and flags], commit, prompts [{name, prompt_tokens, decode_tokens, and the counts
// below}], total {rows, rows_not_finite, ties, flips, largest_margin, max_difference, mean_difference, mean_kl,
// median_kl}, oracle {arm, total, baseline {mean_kl, median_kl}} or null, controls {arms, flips, largest_margin,
// prompt_flips [of each prompt the most that a control has there; none without a control]}, strict_faults. Immutable
// value; thread-safe.
#ifndef OFFLOAD_OFFLOAD_ARM_EVIDENCE_H_
#define OFFLOAD_OFFLOAD_ARM_EVIDENCE_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/arm.h"
#include "core/json.h"
#include "offload/parity.h"

namespace offload {

struct ArmEvidence {
  struct Prompt {
    std::string name;
    int64_t prompt_tokens = 0, decode_tokens = 0;
  };
  std::string arm, baseline, model, device;
  MathRules rules;
  std::vector<Prompt> prompts;
  ArmScore score;
  Yardstick yardstick;
};

// Throws Error{input} naming `origin` and the key that is missing, of a wrong type or of a wrong count.
ArmEvidence parse_evidence(std::string_view json, std::string_view origin);

// Decisions that a verdict needs at least, of each of so many prompts.
inline constexpr size_t kEvidencePromptsMin = 3;
inline constexpr int64_t kEvidencePromptTokensMin = 512;
inline constexpr int64_t kEvidenceDecodeTokensMin = 32;

// Why this is no evidence about the arm as it stands, one line each: of another arm, of other rules, of too few
// decisions, of prompts that are not its total, without an oracle.
std::vector<std::string> evidence_faults(const Arm& arm, const ArmEvidence& evidence);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_ARM_EVIDENCE_H_
