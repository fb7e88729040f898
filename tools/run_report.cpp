#include "run_report.h"

namespace offload::tools {

OrderedJson plan_json(const Settings& settings, const Engine& engine) {
  const MemoryPlan& memory = engine.memory();
  OrderedJson plan = OrderedJson::object();
  plan["model"] = printable(settings.model_dir, 4096);
  plan["model_type"] = engine.spec().model_type;
  plan["device"] = settings.device;
  plan["arm"] = settings.arm;
  plan["load_format"] = settings.dummy_weights ? "dummy" : "auto";
  plan["tp"] = engine.world();
  plan["shard"] = settings.shard == ShardForm::slice ? "slice" : "expert";
  plan["expert_slots"] = settings.expert_slots;
  plan["cpu_permille"] = settings.cpu_permille;
  plan["zero_copy_permille"] = settings.zero_copy_permille;
  plan["context"] = engine.context();
  plan["chunk"] = engine.chunk();
  plan["prefill_group"] = engine.prefill_group();
  plan["memory"] = OrderedJson::object({{"weights_bytes", memory.weights},
                                        {"experts_bytes", memory.experts},
                                        {"tables_bytes", memory.tables},
                                        {"sequence_bytes", memory.sequence},
                                        {"workspace_bytes", memory.workspace},
                                        {"slots_bytes", memory.slots},
                                        {"stacks_bytes", memory.stacks},
                                        {"staging_bytes", memory.staging},
                                        {"host_buffers_bytes", memory.host_buffers},
                                        {"load_staging_bytes", memory.load_staging},
                                        {"trace_bytes", memory.trace},
                                        {"total_bytes", memory.total()}});
  return plan;
}

std::string plan_table(const Settings& settings, const Engine& engine) {
  return fmt::format(
      "model    {} ({})\ndevice   {}, arm {}, {} rank{}, experts by {}\ncontext  {}, chunk {}, {} prompt tokens by "
      "layers\n{}",
      printable(settings.model_dir, 4096), engine.spec().model_type, settings.device, settings.arm, engine.world(),
      engine.world() == 1 ? "" : "s", settings.shard == ShardForm::slice ? "slice" : "expert", engine.context(),
      engine.chunk(), engine.prefill_group(), engine.budget().table());
}

namespace {

// Sums over ranks. On a CPU a copy into a slot counts as host to device.
OrderedJson offload_json(const Engine& engine) {
  int64_t copied_bytes = 0, zero_copy_bytes = 0, hits = 0, misses = 0, slots = 0;
  for (int r = 0; r < engine.world(); ++r) {
    const ExpertExecutor& executor = engine.rank(r).executor();
    copied_bytes += executor.copied_bytes();
    zero_copy_bytes += executor.zero_copy_bytes();
    const ExpertPolicy* policy = executor.policy();
    if (policy == nullptr) continue;
    slots += policy->options().slots;
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      hits += policy->counts(phase).hits;
      misses += policy->counts(phase).misses;
    }
  }
  return OrderedJson::object({{"h2d_bytes", copied_bytes},
                              {"zero_copy_bytes", zero_copy_bytes},
                              {"cpu_expert_bytes", engine.cpu_expert_bytes()},
                              {"hits", hits},
                              {"misses", misses},
                              {"slots", slots},
                              {"pinned", engine.residency().pinned()}});
}

}  // namespace

OrderedJson run_json(const RunReport& report, const Settings& settings, const Engine& engine) {
  const GenerationResult& result = report.result;
  OrderedJson json = OrderedJson::object();
  json["prompt_tokens"] = result.prompt_tokens;
  json["tokens"] = result.tokens;
  if (report.has_text) json["text"] = result.text;
  json["finish_reason"] = finish_reason_name(result.finish_reason);
  json["timings"] = OrderedJson::object({{"load_s", report.load_s},
                                         {"prefill_s", result.prefill_s},
                                         {"prefill_tok_s", result.prefill_tokens_per_s()},
                                         {"decode_tok_s", result.decode_tokens_per_s()}});
  json["offload"] = offload_json(engine);
  json["plan"] = plan_json(settings, engine);
  return json;
}

std::string run_summary(const GenerationResult& result) {
  std::string summary = fmt::format("{} prompt tokens", result.prompt_tokens);
  if (result.reused_tokens > 0) summary += fmt::format(" ({} reused)", result.reused_tokens);
  if (result.prefill_was_cut()) return summary + fmt::format(", interrupted after {:.2f} s", result.prefill_s);
  summary += fmt::format(" in {:.2f} s ({:.1f} tok/s), {} tokens", result.prefill_s, result.prefill_tokens_per_s(),
                         result.tokens.size());
  if (result.tokens.size() > 1) summary += fmt::format(" at {:.1f} tok/s", result.decode_tokens_per_s());
  return summary + fmt::format(", {}", finish_reason_name(result.finish_reason));
}

std::string json_text(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace offload::tools
