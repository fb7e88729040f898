// Random models, machines, traces and stalls through the simulator: order, completeness and liveness by the events that
// it reports. The suite runs a fixed number of cases. For ten minutes of fresh ones:
//   brain_tests --no-skip --test-case=simulations_hold_for_ten_minutes

#include <doctest/doctest.h>

#include <chrono>
#include <map>
#include <random>

#include "offload/simulator.h"
#include "simulation_cases.h"

namespace offload::simulator_fuzz_test {

namespace {

struct Fuzz {
  explicit Fuzz(uint64_t seed) : random(seed) {}

  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }
  // Over six decades.
  double rate(double middle) { return middle * std::pow(10.0, static_cast<double>(between(-30, 30)) / 10); }

  std::mt19937_64 random;
};

struct Case {
  ModelSpec spec;
  Machine machine;
  SimOptions options;
  int64_t world = 1;
};

Case draw_case(Fuzz& fuzz) {
  static const ModelSpec demo = load_model_spec(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  Case out{.spec = demo, .machine = {}, .options = {}};
  out.world = int64_t{1} << fuzz.between(0, 2);
  out.spec.layers.resize(static_cast<size_t>(fuzz.between(1, 5)));
  const int64_t experts = fuzz.between(4, 24), top_k = fuzz.between(1, 4);
  for (LayerSpec& layer : out.spec.layers) {
    layer.moe.experts = experts;
    layer.moe.top_k = top_k;
  }
  Machine& machine = out.machine;
  machine.name = "fuzz";
  machine.device.count = 4;
  machine.device.memory_bytes_per_s = fuzz.rate(1e11);
  machine.device.gemm_flops = {fuzz.rate(1e12), fuzz.rate(1e12)};
  machine.device.compute_units = fuzz.between(1, 100);
  machine.device.launch_gap_s = fuzz.chance(50) ? 0 : fuzz.rate(1e-6);
  if (fuzz.chance(90)) machine.link = {fuzz.rate(1e10), static_cast<double>(fuzz.between(0, 10)) / 10, 0};
  machine.host.dram_bytes_per_s = fuzz.rate(1e10);
  machine.host.wait_s = fuzz.chance(50) ? 0 : fuzz.rate(1e-6);
  machine.collective = {{1, fuzz.rate(1e-5)}};

  SimOptions& options = out.options;
  options.shard = fuzz.chance(50) ? ShardForm::slice : ShardForm::expert;
  options.ranks = fuzz.chance(80) ? RankScope::all : RankScope::first;
  options.copies = static_cast<CopyStart>(fuzz.between(0, 2));
  options.order = fuzz.chance(50) ? PrefillOrder::layer_major : PrefillOrder::chunk_major;
  options.chunk = fuzz.between(1, 40);
  options.decode_position = fuzz.chance(50) ? fuzz.between(1, 100) : 0;
  PolicyOptions& policy = options.policy;
  policy.kind = fuzz.chance(50) ? PolicyKind::lru : PolicyKind::adaptive;
  const auto layers = static_cast<int64_t>(out.spec.layers.size());
  policy.slots = fuzz.chance(30) ? fuzz.between(1, 4) : fuzz.between(1, layers * experts + 2);
  policy.lookahead_layers = static_cast<int>(fuzz.between(0, 2));
  policy.lookahead_chance_min = fuzz.chance(50) ? 0 : 0.5;
  if (fuzz.chance(40)) {
    policy.host_permille = fuzz.between(0, 1000);
    policy.zero_copy_permille = fuzz.between(0, 1000 - policy.host_permille);
  }
  if (fuzz.chance(60))
    options.stalls = {.seed = fuzz.random(), .permille = fuzz.between(1, 1000), .ns_max = fuzz.between(1, 10000000)};
  return out;
}

RoutingTrace draw_routing(Fuzz& fuzz, const RoutingShape& shape) {
  std::vector<DrawnStep> steps;
  for (int64_t s = fuzz.between(1, 8); s > 0; --s)
    steps.push_back(fuzz.chance(40) ? DrawnStep{Phase::prefill, fuzz.between(1, 60)}
                                    : DrawnStep{Phase::decode, fuzz.chance(80) ? 1 : fuzz.between(1, 12)});
  const uint64_t seed = fuzz.random();
  return fuzz.chance(50) ? draw_trace(shape, UniformRouting{}, steps, seed)
                         : draw_trace(shape, SkewedRouting{}, steps, seed);
}

struct Slot {
  struct Use {
    int64_t begin, end;
    ExpertKey key;
  };
  std::vector<Use> copies, runs;
};

// Every run lies wholly after the copy of its expert and wholly before the next copy into the slot.
std::string check_slot(const Slot& slot) {
  for (size_t i = 1; i < slot.copies.size(); ++i)
    if (slot.copies[i].begin < slot.copies[i - 1].end) return "two copies into one slot overlap";
  for (const Slot::Use& run : slot.runs) {
    const Slot::Use* content = nullptr;
    for (const Slot::Use& copy : slot.copies)
      if (copy.begin < run.end || (copy.begin == run.end && copy.end <= run.begin)) content = &copy;
    // A copy of no duration may stand at the very end of a run; then it belongs after it.
    if (content != nullptr && !(content->key == run.key) && content->begin == content->end) continue;
    if (content == nullptr) return fmt::format("expert {} ran in an empty slot", run.key.expert);
    if (!(content->key == run.key))
      return fmt::format("layer {} expert {} ran on the content of layer {} expert {}", run.key.layer, run.key.expert,
                         content->key.layer, content->key.expert);
    if (content->end > run.begin) return fmt::format("expert {} ran before its copy had ended", run.key.expert);
  }
  return "";
}

// What the events of a run must hold. "" or what is wrong.
std::string check_events(const std::vector<SimEvent>& events, const Case& one, int64_t ranks) {
  std::map<std::pair<int64_t, SimLane>, int64_t> lane_end;
  std::map<std::pair<int64_t, int32_t>, Slot> slots;
  std::vector<std::pair<int64_t, int64_t>> reduces;
  for (const SimEvent& event : events) {
    if (event.end_ns < event.begin_ns) return "an event ends before it begins";
    // Copies that take their turn, and collectives, occupy the compute lane.
    const bool on_compute =
        event.lane == SimLane::collective || (event.lane == SimLane::copy && one.options.copies == CopyStart::in_line);
    const int64_t rank = event.lane == SimLane::host ? -1 : event.rank;
    int64_t& end = lane_end[{rank, on_compute ? SimLane::compute : event.lane}];
    if (event.begin_ns < end) return fmt::format("{} overlaps what came before on its lane", event.name);
    end = event.end_ns;
    if (event.name == "expert_zero_copy") {  // it has the link to itself
      int64_t& link_end = lane_end[{rank, SimLane::copy}];
      if (event.begin_ns < link_end) return "zero-copy and a copy share the link";
      link_end = event.end_ns;
    }
    if (event.slot >= 0) {
      Slot& slot = slots[{event.rank, event.slot}];
      (event.lane == SimLane::copy ? slot.copies : slot.runs).push_back({event.begin_ns, event.end_ns, event.key});
    }
    if (event.lane == SimLane::collective) reduces.push_back({event.begin_ns, event.end_ns});
  }
  for (size_t i = 0; i < reduces.size(); ++i)
    if (reduces[i] != reduces[i - i % static_cast<size_t>(ranks)]) return "ranks left a collective at different times";
  for (const auto& [id, slot] : slots) {
    const std::string fault = check_slot(slot);
    if (!fault.empty()) return fmt::format("rank {} slot {}: {}", id.first, id.second, fault);
  }
  return "";
}

// Distinct experts of each chunk and layer that a simulated rank has.
int64_t runs_due(const RoutingTrace& trace, const Case& one, int64_t ranks) {
  int64_t due = 0;
  ActiveExperts active(trace.shape().experts);
  const auto top_k = static_cast<size_t>(trace.shape().top_k);
  for (int64_t s = 0; s < trace.steps(); ++s)
    for (int64_t l = 0; l < trace.shape().layers; ++l) {
      const auto ids = trace.ids(s, l);
      const size_t chunk =
          trace.phase(s) == Phase::prefill ? static_cast<size_t>(one.options.chunk) * top_k : ids.size();
      for (size_t begin = 0; begin < ids.size(); begin += chunk)
        for (const ActiveExpert& expert : active.collect(ids.subspan(begin, std::min(chunk, ids.size() - begin))))
          due += one.options.shard == ShardForm::slice || expert.expert % one.world < ranks ? 1 : 0;
    }
  return due;
}

std::string run_case(uint64_t seed) {
  Fuzz fuzz(seed);
  Case one = draw_case(fuzz);
  const StepProgrammer programmer(one.spec, one.world, 1024);
  const CostModel costs(one.machine, GemmMath::bf16, one.world);
  const RoutingTrace trace = draw_routing(fuzz, programmer.routing_shape());
  const bool alone = one.options.shard == ShardForm::slice || one.options.ranks == RankScope::first;
  const int64_t ranks = alone ? 1 : one.world;

  std::vector<SimEvent> events;
  SimOutputs outputs;
  outputs.on_event = [&](const SimEvent& event) { events.push_back(event); };
  const Simulation result = simulate(costs, programmer, one.options, trace, outputs);
  std::string fault = check_events(events, one, ranks);
  if (!fault.empty()) return fault;

  int64_t runs = 0, copies = 0, steps = result.prefill.steps + result.decode.steps;
  for (const SimEvent& event : events) {
    const bool is_run = event.name == "expert" || event.name == "expert_zero_copy";
    runs += is_run ? 1 : 0;
    copies += event.lane == SimLane::copy ? 1 : 0;
  }
  if (runs != runs_due(trace, one, ranks)) return "an expert ran not at all or twice";
  if (copies != result.prefill.counts.copies() + result.decode.counts.copies()) return "copies are miscounted";
  if (steps != trace.steps()) return "steps are miscounted";
  const int64_t ns = result.prefill.ns + result.decode.ns;
  if (ns <= 0) return "no time has passed";

  // Plans do not depend on durations: the same again takes the same time, without stalls no more, and no more with a
  // faster link.
  const auto total = [&](const CostModel& model, const SimOptions& options) {
    const Simulation other = simulate(model, programmer, options, trace);
    return other.prefill.ns + other.decode.ns;
  };
  if (total(costs, one.options) != ns) return "the same simulation took another time";
  SimOptions calm = one.options;
  calm.stalls = {};
  const int64_t calm_ns = total(costs, calm);
  if (calm_ns > ns) return "stalls made it faster";
  one.machine.link.h2d_bytes_per_s *= 2;
  if (total(CostModel(one.machine, GemmMath::bf16, one.world), calm) > calm_ns) return "a faster link made it slower";
  return "";
}

}  // namespace

TEST_CASE("random_simulations_keep_order_and_end") {
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    const std::string fault = run_case(seed);
    INFO("seed " << seed << ": " << fault);
    REQUIRE(fault.empty());
  }
}

TEST_CASE("simulations_hold_for_ten_minutes" * doctest::skip()) {
  const uint64_t first = std::random_device{}();
  MESSAGE("seeds from " << first);
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  uint64_t seed = first;
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    const std::string fault = run_case(seed);
    INFO("seed " << seed << ": " << fault);
    REQUIRE(fault.empty());
  }
  MESSAGE("cases: " << seed - first);
}

}  // namespace offload::simulator_fuzz_test
