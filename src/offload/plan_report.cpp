// What planner.h says about a plan, for people and for programs.

#include <array>

#include "offload/planner.h"

namespace offload {
namespace {

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / kGib;
}

std::string_view form_name(ShardForm form) {
  return form == ShardForm::expert ? "expert" : "slice";
}
std::string_view order_name(PrefillOrder order) {
  return order == PrefillOrder::chunk_major ? "chunk" : "layer";
}

double busy_share(const PhaseTimes& phase, SimLane lane) {
  return phase.ns == 0
             ? 0
             : static_cast<double>(phase.busy_ns.at(static_cast<size_t>(lane))) / static_cast<double>(phase.ns);
}

double hit_rate(const PhaseTimes& phase) {
  const int64_t all = phase.counts.hits + phase.counts.misses + phase.counts.off_slab;
  return all == 0 ? 0 : static_cast<double>(phase.counts.hits) / static_cast<double>(all);
}

std::string phase_line(const char* name, const PhaseTimes& phase) {
  if (phase.tokens == 0) return fmt::format("  {:<8} not in the trace\n", name);
  constexpr double kBusyMostOfTheTime = 0.6;
  const std::string bound = busy_share(phase, phase.bound()) < kBusyMostOfTheTime
                                ? "order route, copy, run of each layer"
                                : fmt::format("{} lane", kSimLaneNames.at(static_cast<size_t>(phase.bound())));
  std::string out = fmt::format("  {:<8} {:.1f} tok/s, bound by the {}; busy:", name, phase.tokens_per_s(), bound);
  for (size_t lane = 0; lane < kSimLaneNames.size(); ++lane)
    out += fmt::format(" {} {:.0f} %", kSimLaneNames.at(lane), 100 * busy_share(phase, static_cast<SimLane>(lane)));
  return out + fmt::format("; {:.1f} % of expert runs hit\n", 100 * hit_rate(phase));
}

OrderedJson phase_json(const PhaseTimes& phase) {
  OrderedJson busy = OrderedJson::object();
  for (size_t lane = 0; lane < kSimLaneNames.size(); ++lane)
    busy[std::string(kSimLaneNames.at(lane))] = busy_share(phase, static_cast<SimLane>(lane));
  return {{"tokens", phase.tokens},
          {"ns", phase.ns},
          {"tok_s", phase.tokens_per_s()},
          {"bound", std::string(kSimLaneNames.at(static_cast<size_t>(phase.bound())))},
          {"busy", busy},
          {"hit_rate", hit_rate(phase)},
          {"copied_bytes", phase.copied_bytes},
          {"host_bytes", phase.host_bytes}};
}

}  // namespace

std::string plan_text(const Plan& plan, const Machine& machine, const ModelSpec& spec, const PlanRequest& request) {
  const SimOptions& options = plan.options;
  const PolicyOptions& policy = options.policy;
  std::string out = fmt::format("{} on {}, {} rank(s), products on {} units\n", spec.model_type, machine.name,
                                request.world, request.math == GemmMath::fp16 ? "FP16" : "BF16");
  out += fmt::format("choice (of {} simulated)\n", plan.candidates);
  out += fmt::format("  --tp {}\n", request.world);
  out += fmt::format("  --chunk {}           prefill in the order of {}s\n", options.chunk, order_name(options.order));
  out += fmt::format("  --prefill-group {}\n", plan.prefill_group);
  out += fmt::format("  --shard {}\n", form_name(options.shard));
  if (machine.link.h2d_bytes_per_s > 0)
    out += fmt::format("  --expert-slots {}    {:.1f} % of the rank's, {:.3f} MiB each\n", policy.slots,
                       100 * static_cast<double>(policy.slots) / static_cast<double>(plan.experts_per_rank),
                       gib(plan.slot_bytes) * 1024);
  else
    out += "  --expert-slots 0     experts run where they lie\n";
  out += fmt::format("  --look-ahead {}\n", policy.lookahead_layers);
  out += fmt::format("  --cpu-experts {}%     of the missed experts in decode\n", policy.host_permille / 10);
  const PlanMemory& m = plan.memory;
  out += fmt::format(
      "memory per rank: weights {:.2f} + state {:.2f} + workspace {:.2f} + stacks {:.2f} + slots {:.2f} + reserve "
      "{:.2f} "
      "= {:.2f} of {:.2f} GiB\n",
      gib(m.weights), gib(m.sequence), gib(m.workspace), gib(m.stacks), gib(m.slots), gib(m.reserve), gib(m.total()),
      gib(m.budget));
  out += "predicted\n" + phase_line("prefill", plan.predicted.prefill) + phase_line("decode", plan.predicted.decode);
  out += fmt::format("  request  {:.2f} s for {} + {} tokens\n", plan.request_s, request.prompt_tokens,
                     request.decode_tokens);
  out += "next lever (each input a tenth better; gain in prefill, decode, whole request)\n";
  for (const Lever& lever : plan.levers)
    out += fmt::format("  {:<22} {:+5.1f} % {:+5.1f} % {:+5.1f} %\n", lever.input, 100 * lever.prefill_gain,
                       100 * lever.decode_gain, 100 * lever.request_gain);
  for (const std::string& note : plan.notes) out += fmt::format("note: {}\n", note);
  return out;
}

OrderedJson plan_json(const Plan& plan, const PlanRequest& request) {
  OrderedJson levers = OrderedJson::array();
  for (const Lever& lever : plan.levers)
    levers.push_back({{"input", lever.input},
                      {"prefill_gain", lever.prefill_gain},
                      {"decode_gain", lever.decode_gain},
                      {"request_gain", lever.request_gain}});
  const PlanMemory& m = plan.memory;
  return {{"choice",
           {{"tp", request.world},
            {"chunk", plan.options.chunk},
            {"prefill_group", plan.prefill_group},
            {"prefill_order", std::string(order_name(plan.options.order))},
            {"shard", std::string(form_name(plan.options.shard))},
            {"expert_slots", plan.options.policy.slots},
            {"slot_bytes", plan.slot_bytes},
            {"lookahead_layers", plan.options.policy.lookahead_layers},
            {"cpu_permille", plan.options.policy.host_permille}}},
          {"memory",
           {{"budget_bytes", m.budget},
            {"weights_bytes", m.weights},
            {"sequence_bytes", m.sequence},
            {"workspace_bytes", m.workspace},
            {"stacks_bytes", m.stacks},
            {"slots_bytes", m.slots},
            {"reserve_bytes", m.reserve}}},
          {"predicted",
           {{"prefill", phase_json(plan.predicted.prefill)},
            {"decode", phase_json(plan.predicted.decode)},
            {"request_s", plan.request_s},
            {"calibrated", plan.is_calibrated}}},
          {"levers", levers},
          {"candidates", plan.candidates},
          {"notes", plan.notes}};
}

}  // namespace offload
