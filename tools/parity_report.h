// What offload-parity found: a table for people, JSON for machines, and evidence files for configs/arms.json.
//
// Pure. JSON keys: command, commit, device, instruction_set, model, threads, chunk, prompts [{name, prompt_tokens,
// decode_tokens}], baseline, oracle (an arm, "reference" or null), controls {arms, flips, largest_margin, prompt_flips
// [most of a control on each prompt]}, arms [{arm, status, rules, total, prompts [{name, counts, controls_flips,
// oracle, changed}], oracle, strict_faults}], the baseline's first, and seconds {arm: s}, the one part that differs
// between two runs of one command. Counts are {rows, rows_not_finite, ties, flips, largest_margin, max_difference,
// mean_difference, mean_kl, median_kl}; controls_flips is the prompt's number of prompt_flips, null without a control;
// a changed decision is {row, baseline, candidate, logits, margin, tie}, with the two best tokens of each.
#ifndef OFFLOAD_TOOLS_PARITY_REPORT_H_
#define OFFLOAD_TOOLS_PARITY_REPORT_H_

#include <string>

#include "core/json.h"
#include "parity_run.h"

namespace offload::tools {

struct ParityContext {
  std::string command, commit;
  std::string device;           // device_plan()
  std::string instruction_set;  // of the kernels
  std::string model;            // the folder's own name
  int threads = 1;
  int64_t chunk = 0;  // 0: the engine's choice
};

OrderedJson parity_json(const ParityResult& result, const ParityContext& context);
std::string parity_table(const ParityResult& result, const ParityContext& context);
// See offload/arm_evidence.h.
OrderedJson evidence_json(const ParityResult& result, const ArmResult& arm, const ParityContext& context);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_PARITY_REPORT_H_
