// Random routing against random policies: every plan is carried out on lanes that drift apart (plan_carrier.h).
// The suite runs a fixed number of cases. For ten minutes of fresh ones:
//   brain_tests --no-skip --test-case=plans_hold_for_ten_minutes

#include <doctest/doctest.h>

#include <chrono>
#include <random>

#include "offload/expert_policy.h"
#include "plan_carrier.h"

namespace offload::policy_fuzz_test {

namespace {

struct Fuzz {
  explicit Fuzz(uint64_t seed_) : seed(seed_), random(seed_) {}

  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

  PolicyOptions options() {
    PolicyOptions out;
    out.kind = chance(50) ? PolicyKind::lru : PolicyKind::adaptive;
    out.shape.layers = between(1, 5);
    out.shape.experts = between(1, chance(20) ? 64 : 12);
    out.shape.top_k = between(1, std::min<int64_t>(out.shape.experts, 8));
    out.world = chance(30) ? between(2, 4) : 1;
    out.rank = between(0, out.world - 1);
    switch (between(0, 3)) {
      case 0:
        out.slots = 1;
        break;
      case 1:
        out.slots = out.shape.top_k;
        break;
      case 2:
        out.slots = between(1, out.shape.experts);
        break;
      default:
        out.slots = between(1, out.shape.layers * out.shape.experts + 2);
    }
    out.lookahead_layers = static_cast<int>(between(0, 2));
    out.lookahead_chance_min = chance(50) ? 0 : 0.5;  // 0: whatever is conceivable is staged
    out.lookahead_copies_max = between(0, 8);
    if (chance(40)) {
      out.host_permille = between(0, 1000);
      out.zero_copy_permille = between(0, 1000 - out.host_permille);
    }
    out.prefill_stream_permille = chance(50) ? 200 : between(0, 1000);
    out.group_stream_permille = chance(50) ? 500 : between(0, 1000);
    out.rows_per_staged = chance(50) ? 64 : between(1, 64);
    return out;
  }

  // ids [rows, top_k]; now and then all alike, or an expert twice in a row.
  std::vector<int32_t> ids(const RoutingShape& shape, int64_t rows) {
    std::vector<int32_t> out;
    const int64_t hot = between(0, shape.experts - 1), width = between(0, shape.experts - 1);
    for (int64_t i = 0; i < rows * shape.top_k; ++i)
      out.push_back(static_cast<int32_t>((hot + between(0, width)) % shape.experts));
    return out;
  }

  uint64_t seed;
  std::mt19937_64 random;
};

// "" or what is wrong with any plan of a case.
std::string run_case(uint64_t seed) {
  Fuzz fuzz(seed);
  const PolicyOptions options = fuzz.options();
  ExpertPolicy policy(options), twin(options);
  PlanCarrier carrier(options, seed + 1);
  ActiveExperts active(options.shape.experts);
  const int64_t steps = fuzz.between(1, 24);
  for (int64_t step = 0; step < steps; ++step) {
    const Phase phase = fuzz.chance(25) ? Phase::prefill : Phase::decode;
    const int64_t rows = phase == Phase::prefill ? fuzz.between(1, 40) : fuzz.chance(80) ? 1 : fuzz.between(1, 12);
    const int64_t layers = fuzz.chance(95) ? options.shape.layers : fuzz.between(0, options.shape.layers);  // cancelled
    const int64_t chunks = phase == Phase::prefill && fuzz.chance(50) ? fuzz.between(1, 4) : 1;  // layer by layer
    for (int64_t visit = 0; visit < layers * chunks; ++visit) {
      const int64_t layer = visit / chunks;
      const LayerRouting routing{active.collect(std::span<const int32_t>(fuzz.ids(options.shape, rows))), rows,
                                 visit % chunks + 1 < chunks};
      const LayerPlan plan = policy.on_routed(layer, routing, phase), same = twin.on_routed(layer, routing, phase);
      if (plan.runs.size() != same.runs.size() || plan.lookahead.size() != same.lookahead.size())
        return "the same routing gave two plans";
      for (size_t i = 0; i < plan.runs.size(); ++i)
        if (plan.runs[i].expert != same.runs[i].expert || plan.runs[i].slot != same.runs[i].slot ||
            plan.runs[i].where != same.runs[i].where)
          return "the same routing gave two plans";
      if (static_cast<int>(plan.lookahead.empty()) == 0 && options.lookahead_layers == 0) return "uncalled look-ahead";
      std::string fault = carrier.issue(layer, routing, plan);
      if (fault.empty()) fault = carrier.move(false);
      if (!fault.empty()) return fmt::format("step {} layer {}: {}", step, layer, fault);
      policy.check();
      for (int64_t l = 0; l < options.shape.layers; ++l)
        for (int64_t e = 0; e < options.shape.experts; ++e) {
          const ExpertKey key{static_cast<int32_t>(l), static_cast<int32_t>(e)};
          if (policy.slot_of(key) != carrier.find(key)) return "policy and cache disagree";
        }
    }
  }
  const int64_t counted = policy.counts(Phase::prefill).copies() + policy.counts(Phase::decode).copies();
  if (counted != static_cast<int64_t>(carrier.copies_issued())) return "the counted copies are not the issued ones";
  return carrier.move(true);
}

}  // namespace

TEST_CASE("plans_of_random_routing_are_complete_ordered_and_live") {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    const std::string fault = run_case(seed);
    INFO("seed " << seed << ": " << fault);
    REQUIRE(fault.empty());
  }
}

TEST_CASE("plans_hold_for_ten_minutes" * doctest::skip()) {
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

}  // namespace offload::policy_fuzz_test
