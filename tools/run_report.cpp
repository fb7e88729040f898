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
  plan["tp"] = 1;
  plan["shard"] = "expert";
  plan["context"] = engine.context();
  plan["chunk"] = engine.chunk();
  plan["memory"] = OrderedJson::object({{"weights_bytes", memory.weights},
                                        {"experts_bytes", memory.experts},
                                        {"tables_bytes", memory.tables},
                                        {"sequence_bytes", memory.sequence},
                                        {"workspace_bytes", memory.workspace},
                                        {"total_bytes", memory.total()}});
  return plan;
}

std::string plan_table(const Settings& settings, const Engine& engine) {
  constexpr double kMib = 1024.0 * 1024.0;
  const MemoryPlan& memory = engine.memory();
  std::string table = fmt::format("model      {} ({})\ndevice     {}, arm {}, 1 rank\ncontext    {}, chunk {}\n",
                                  printable(settings.model_dir, 4096), engine.spec().model_type, settings.device,
                                  settings.arm, engine.context(), engine.chunk());
  const auto row = [&](std::string_view name, int64_t bytes) {
    table += fmt::format("{:<10} {:>14.2f} MiB\n", name, static_cast<double>(bytes) / kMib);
  };
  row("weights", memory.weights);
  row("experts", memory.experts);
  row("tables", memory.tables);
  row("sequence", memory.sequence);
  row("workspace", memory.workspace);
  row("total", memory.total());
  return table;
}

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
  json["offload"] = OrderedJson::object({{"h2d_bytes", 0},
                                         {"cpu_expert_bytes", engine.expert_bytes()},
                                         {"hits", 0},
                                         {"misses", 0},
                                         {"slots", 0},
                                         {"pinned", false}});
  json["plan"] = plan_json(settings, engine);
  return json;
}

std::string run_summary(const GenerationResult& result) {
  std::string summary = fmt::format("{} prompt tokens", result.prompt_tokens);
  if (result.reused_tokens > 0) summary += fmt::format(" ({} reused)", result.reused_tokens);
  summary += fmt::format(" in {:.2f} s ({:.1f} tok/s), {} tokens", result.prefill_s, result.prefill_tokens_per_s(),
                         result.tokens.size());
  if (result.tokens.size() > 1) summary += fmt::format(" at {:.1f} tok/s", result.decode_tokens_per_s());
  return summary + fmt::format(", {}", finish_reason_name(result.finish_reason));
}

std::string json_text(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace offload::tools
