// What offload-run says about a plan and a run, as text for people and as the JSON of --json.
//
// Pure: the caller prints. JSON keys: prompt_tokens, tokens, text (absent without a tokenizer), finish_reason,
// timings {load_s, prefill_s, prefill_tok_s, decode_tok_s}, offload {h2d_bytes, zero_copy_bytes, cpu_expert_bytes,
// hits, misses, slots, pinned}, plan. Without an expert cache hits, misses and slots are 0.
#ifndef OFFLOAD_TOOLS_RUN_REPORT_H_
#define OFFLOAD_TOOLS_RUN_REPORT_H_

#include <string>

#include "common.h"
#include "core/json.h"
#include "offload/engine.h"
#include "offload/generation.h"

namespace offload::tools {

// plan {model, model_type, device, arm, load_format, tp, shard, expert_slots, cpu_permille, zero_copy_permille,
// context, chunk, prefill_group, memory {*_bytes}}.
OrderedJson plan_json(const Settings& settings, const Engine& engine);
// The same as a table of lines.
std::string plan_table(const Settings& settings, const Engine& engine);

struct RunReport {
  GenerationResult result;
  bool has_text = false;
  double load_s = 0;
};
OrderedJson run_json(const RunReport& report, const Settings& settings, const Engine& engine);
// "24 prompt tokens in 0.31 s (77.4 tok/s), 8 tokens at 30.1 tok/s, stop", or "24 prompt tokens, interrupted after 0.31
// s".
std::string run_summary(const GenerationResult& result);

// One line; invalid UTF-8 cannot occur in it, and is replaced if it does.
std::string json_text(const OrderedJson& json);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_RUN_REPORT_H_
