// The published constants of the 4 x RTX 2080 Ti machine, out of the machine file, the model's config and the
// production policy; and what an order of events must hold.
#include "offload/simulator.h"

#include <doctest/doctest.h>

#include <set>

#include "simulation_cases.h"

using namespace offload;

namespace {

struct Published {
  ModelSpec spec = published_model();
  StepProgrammer programmer{spec, 4, 65536};
  CostModel costs{published_machine(), GemmMath::bf16, 4};
  Published() { REQUIRE(costs.calibrate(programmer)); }

  // Rank 0 as published sums see it; decode at 8K context.
  static SimOptions rank_alone(CopyStart copies, int64_t slots) {
    SimOptions options{.ranks = RankScope::first, .copies = copies, .decode_position = 8192};
    options.policy.slots = slots;
    options.policy.lookahead_layers = 0;
    return options;
  }
};

const Published& published() {
  static const Published one;
  return one;
}

// Milliseconds per token in the steady state of balanced decode without any hit.
double cold_decode_ms(CopyStart copies) {
  RoutingTrace trace(published().programmer.routing_shape());
  append_balanced_steps(trace, 24);
  SimOptions options = Published::rank_alone(copies, 240);
  options.count_from = 8;
  const Simulation result = simulate(published().costs, published().programmer, options, trace);
  CHECK(result.decode.counts.hits == 0);
  CHECK(result.decode.counts.misses == 120 * 16);
  return result.decode.ms_per_step();
}

}  // namespace

TEST_CASE("one_expert_crosses_the_link_in_0_864_ms_and_120_in_103_6") {
  // 3 matrices of 640 x 2560 BF16 over 10.6 GiB/s.
  const ExpertShape shape = published().programmer.expert_shape();
  CHECK(static_cast<double>(shape.block_bytes()) / (1 << 20) == doctest::Approx(9.375));
  const double ms = static_cast<double>(published().costs.copy_ns(shape.block_bytes())) * 1e-6;
  CHECK(is_near(ms, 0.864, 5e-4));
  CHECK(is_near(120 * ms, 103.6, 5e-4));
}

TEST_CASE("a_cold_shard_of_56_25_gib_takes_5_31_s_of_the_copy_lane") {
  // A prefill that touches all 128 experts of each of rank 0's 48 layers.
  RoutingTrace trace(published().programmer.routing_shape());
  append_full_prefill(trace);
  const Simulation result =
      simulate(published().costs, published().programmer, Published::rank_alone(CopyStart::routed, 1024), trace);
  CHECK(static_cast<double>(result.prefill.copied_bytes) / kGibibyte == doctest::Approx(56.25));
  CHECK(is_near(static_cast<double>(result.prefill.busy_ns[static_cast<size_t>(SimLane::copy)]) * 1e-9, 5.31, 1e-3));
  CHECK(result.prefill.bound() == SimLane::copy);
}

TEST_CASE("serial_decode_takes_138_6_ms") {
  // 35.0 ms of compute and 120 copies that nothing overlaps.
  CHECK(is_near(cold_decode_ms(CopyStart::in_line), 138.6, 1e-3));
}

TEST_CASE("perfectly_overlapped_decode_takes_the_copies_103_6_ms") {
  CHECK(is_near(cold_decode_ms(CopyStart::foreseen), 103.6, 1e-3));
}

TEST_CASE("real_decode_lies_between_serial_and_perfect_overlap") {
  const double routed = cold_decode_ms(CopyStart::routed);
  CHECK(routed < cold_decode_ms(CopyStart::in_line));
  CHECK(routed > cold_decode_ms(CopyStart::foreseen));
}

TEST_CASE("decode_with_31_percent_resident_takes_71_5_ms_under_uniform_routing") {
  // Uniform routing hits what is resident: 69 % of 120 copies remain, and they bound the step.
  std::vector<DrawnStep> steps(300, DrawnStep{});
  const RoutingShape shape = published().programmer.routing_shape();
  const RoutingTrace trace = draw_trace(shape, UniformRouting{}, steps, 1);
  SimOptions options = Published::rank_alone(CopyStart::foreseen, shape.layers * shape.experts / 4 * 31 / 100);
  options.count_from = 60;
  const Simulation result = simulate(published().costs, published().programmer, options, trace);
  const PolicyCounts& counts = result.decode.counts;
  const double hit_rate = static_cast<double>(counts.hits) / static_cast<double>(counts.hits + counts.misses);
  CHECK(is_near(hit_rate, 0.31, 0.03));
  CHECK(is_near(result.decode.ms_per_step(), 71.5, 0.02));
}

TEST_CASE("decode_with_all_experts_resident_takes_35_0_ms") {
  RoutingTrace trace(published().programmer.routing_shape());
  append_full_prefill(trace);
  append_balanced_steps(trace, 4);
  SimOptions options = Published::rank_alone(CopyStart::routed, 6144);
  options.count_from = 1;
  const Simulation result = simulate(published().costs, published().programmer, options, trace);
  CHECK(result.decode.counts.misses == 0);
  CHECK(is_near(result.decode.ms_per_step(), 35.0, 2e-3));
  CHECK(result.decode.bound() == SimLane::compute);
}

TEST_CASE("prefill_of_8192_tokens_runs_at_727_tokens_per_s_without_a_copy_stream_and_950_with_one") {
  const RoutingTrace trace = drawn_prompt(published().programmer.routing_shape(), 8192, 1);
  const auto run = [&](CopyStart copies) {
    return simulate(published().costs, published().programmer, Published::rank_alone(copies, 1024), trace).prefill;
  };
  const PhaseTimes off = run(CopyStart::in_line), on = run(CopyStart::routed);
  MESSAGE("off " << off.tokens_per_s() << " tok/s, on " << on.tokens_per_s() << ", experts " << off.counts.misses);
  CHECK(is_near(static_cast<double>(off.counts.misses), 4652, 0.03));
  CHECK(is_near(off.tokens_per_s(), 727, 0.06));
  CHECK(is_near(on.tokens_per_s(), 950, 0.06));
}
