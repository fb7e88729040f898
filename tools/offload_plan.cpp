// offload-plan: how a model would best be served on a machine that need not be at hand, and how fast that would be.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>

#include "common.h"
#include "core/models/registry.h"
#include "offload/planner.h"
#include "run_report.h"
#include "terminal.h"
#include "trace_file.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = "offload-plan";
constexpr int64_t kConfigBytesMax = int64_t{1} << 24;

struct PlanFlags {
  std::string machine, model_config, replay, tp, vram_budget, prompt_tokens = "8192", decode_tokens = "256";
  std::string math = "auto", seed = "1";
  std::optional<std::string> trace;
  bool json = false;
};

void add_flags(CLI::App& app, PlanFlags& flags) {
  const auto text = [&app](const char* name, std::string& value, const char* type, const char* help) {
    return app.add_option(name, value, help)->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text("--machine", flags.machine, "FILE.json",
       "rates of the machine, as configs/machines/ and offload-probe have them")
      ->required();
  text("--model-config", flags.model_config, "FILE.json", "the model's config.json, or its folder")->required();
  text("--replay", flags.replay, "FILE", "a recorded routing trace; default: drawn like real traffic");
  text("--tp", flags.tp, "N", "ranks; default: all devices of the machine");
  text("--vram-budget", flags.vram_budget, "GIB", "of each rank; default: the device's memory");
  text("--prompt-tokens", flags.prompt_tokens, "N", "prompt of the request to serve soonest; default 8192");
  text("--decode-tokens", flags.decode_tokens, "N", "and tokens after it; default 256");
  text("--math", flags.math, "auto|bf16|fp16",
       "matrix units that products run on; auto: the faster of the machine's, as a card without BF16 units computes "
       "BF16 products as scaled FP16");
  text("--seed", flags.seed, "N", "of the drawn trace");
  add_text_option(app, "--trace", flags.trace, "FILE.json",
                  "writes what the chosen plan does to a trace for ui.perfetto.dev");
  app.add_flag("--json", flags.json, "one JSON object instead of text");
}

ModelSpec read_spec(const std::string& path) {
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored)) return load_model_spec(path);
  const std::string origin = printable(path, 4096);
  return model_spec(parse_json(read_text_file(path, kConfigBytesMax), origin), origin);
}

PlanRequest request_of(const PlanFlags& flags, const Machine& machine) {
  PlanRequest request;
  request.world = flags.tp.empty() ? machine.device.count : parse_integer("--tp", flags.tp, 1, 64);
  request.prompt_tokens = parse_integer("--prompt-tokens", flags.prompt_tokens, 1, kTraceRowsMax);
  request.decode_tokens = parse_integer("--decode-tokens", flags.decode_tokens, 0, kTraceRowsMax);
  if (flags.math != "auto" && flags.math != "bf16" && flags.math != "fp16")
    throw_error(ErrorCode::usage, "--math is \"{}\"; expected auto, bf16 or fp16", printable(flags.math));
  const auto flops = [&](GemmMath math) { return machine.device.gemm_flops.at(static_cast<size_t>(math)); };
  const bool fp16 = flags.math == "auto" ? flops(GemmMath::fp16) > flops(GemmMath::bf16) : flags.math == "fp16";
  request.math = fp16 ? GemmMath::fp16 : GemmMath::bf16;
  if (!flags.vram_budget.empty()) {
    const double budget = parse_number("--vram-budget", flags.vram_budget);
    if (!(budget > 0 && budget <= 1 << 20))
      throw_error(ErrorCode::usage, "--vram-budget is \"{}\"; expected GiB, above 0", printable(flags.vram_budget));
    request.vram_bytes = std::max(int64_t{1}, static_cast<int64_t>(budget * kGib));
  }
  return request;
}

void write_plan_trace(const Plan& plan, const Machine& machine, const ModelSpec& spec, const PlanRequest& request,
                      const RoutingTrace& routing, TraceFile& file) {
  int64_t rows = 0;
  for (int64_t s = 0; s < routing.steps(); ++s) rows += routing.rows(s);
  const StepProgrammer programmer(spec, request.world, std::max(rows, request.prompt_tokens + request.decode_tokens));
  CostModel costs(machine, request.math, request.world);
  costs.calibrate(programmer);
  TraceBuffer buffer(simulation_lanes(plan.options.shard == ShardForm::slice ? 1 : request.world), kTraceEvents);
  simulate(costs, programmer, plan.options, routing, {.trace = &buffer, .on_event = {}});
  const TraceBuffer* one = &buffer;
  file.write({&one, 1});
}

int run(const PlanFlags& flags) {
  TraceFile trace(kProgram, flags.trace);
  const Machine machine = read_machine(flags.machine);
  const ModelSpec spec = read_spec(flags.model_config);
  const PlanRequest request = request_of(flags, machine);
  const MoeSpec& moe = spec.layers.front().moe;
  if (moe.experts > kTraceExpertsMax)
    throw_error(ErrorCode::input, "{}: {} experts a layer; routing traces, which a plan rests on, have at most {}",
                printable(flags.model_config, 4096), moe.experts, kTraceExpertsMax);
  if (request.prompt_tokens + request.decode_tokens > spec.context_max)
    throw_error(ErrorCode::usage, "--prompt-tokens {} and --decode-tokens {}: the model has {} positions",
                request.prompt_tokens, request.decode_tokens, spec.context_max);
  const RoutingShape shape{static_cast<int64_t>(spec.layers.size()), moe.experts, moe.top_k};
  const RoutingTrace routing = flags.replay.empty()
                                   ? draw_planning_trace(shape, request.prompt_tokens, parse_seed("--seed", flags.seed))
                                   : read_trace(flags.replay);
  const Plan plan = plan_serving(machine, spec, request, routing, [] { stop_if_interrupted(); });
  write_output(flags.json ? json_text(plan_json(plan, request)) : plan_text(plan, machine, spec, request));
  if (flags.trace) write_plan_trace(plan, machine, spec, request, routing, trace);
  return 0;
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Predicts how a model is served best on a machine, by simulating the production policy. Text goes to standard "
      "output, all else to standard error. Exit codes: 0 done, 1 failed, 2 bad usage, "
      "130 interrupted, 129 and 143 by SIGHUP and SIGTERM, 141 where its reader has gone.",
      std::string(kProgram));
  PlanFlags flags;
  add_flags(app, flags);
  if (!parse_flags(app, argc, argv)) return 0;
  return run(flags);
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
