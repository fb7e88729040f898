// Runs the arms of offload-parity: one greedy chain per prompt on the baseline, forced on every arm.
//
// One engine at a time, each loaded for its arm alone. In memory meanwhile: the logits of all rows of all prompts on
// the baseline, and on the oracle when there is one, 4 bytes each (1.6 GiB for 3 x 544 rows of 248,320).
#ifndef OFFLOAD_TOOLS_PARITY_RUN_H_
#define OFFLOAD_TOOLS_PARITY_RUN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "offload/parity.h"
#include "parity_prompts.h"

namespace offload::tools {

inline constexpr std::string_view kParityProgram = "offload-parity";

// Rows of one prompt: the tokens that each consumed, and logits [rows, vocab].
struct ForcedRows {
  std::vector<int32_t> ids;
  int64_t prompt_tokens = 0;  // fed at once; the rest one by one
  std::vector<float> logits;

  int64_t decode_tokens() const { return static_cast<int64_t>(ids.size()) - prompt_tokens; }
};

struct PromptResult {
  LogitComparison against_baseline;
  std::optional<LogitComparison> against_oracle;  // KL(oracle || arm), decisions of the oracle that the arm changes
};

struct ArmResult {
  std::string arm;
  std::optional<ArmStatus> status = {};  // nothing: not an arm of configs/arms.json
  MathRules rules;
  std::vector<PromptResult> prompts;
  LogitComparison total;
  std::optional<LogitComparison> oracle_total = {};
  double seconds = 0;  // of the run, without the load
};

struct ParityResult {
  struct Prompt {
    std::string name;
    int64_t prompt_tokens = 0, decode_tokens = 0;
  };
  std::vector<Prompt> prompts;
  std::optional<std::string> oracle = {};  // an arm's name, or "reference"
  ArmResult baseline;                      // compared with itself, and with the oracle
  std::vector<ArmResult> arms;

  ArmScore score(const ArmResult& arm) const;
  Yardstick yardstick() const;
  // strict_faults() of the arm, whatever its status.
  std::vector<std::string> faults(const ArmResult& arm) const { return strict_faults(score(arm), yardstick()); }
  // Arms that are called strict and are not, with the reason.
  std::vector<std::string> broken_promises() const;
};

struct ParityJob {
  Settings baseline;
  std::vector<Settings> arms;  // none of them the baseline
  std::optional<Settings> oracle = {};
  std::vector<ParityPrompt> prompts;
  int64_t decode_tokens = 0;
  std::optional<ForcedRows> reference = {};  // foreign logits in place of prompts and oracle
};

// Throws Error.
ParityResult run_parity(const ParityJob& job);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_PARITY_RUN_H_
