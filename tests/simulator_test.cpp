// The published constants of the 4 x RTX 2080 Ti machine, out of the machine file, the model's config and the
// production policy; and what an order of events must hold.
#include "offload/simulator.h"

#include <doctest/doctest.h>

#include <set>

#include "simulation_cases.h"

namespace offload::simulator_test {

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

TEST_CASE("what_the_host_takes_to_plan_and_to_issue_a_batch_delays_a_layer_by_as_much") {
  const auto decode_ms = [](int64_t slots, double plan_s, double launch_s) {
    Machine machine = published_machine();
    machine.host.plan_s = plan_s;
    machine.host.launch_s = launch_s;
    CostModel costs(machine, GemmMath::bf16, 4);
    REQUIRE(costs.calibrate(published().programmer));
    RoutingTrace trace(published().programmer.routing_shape());
    append_full_prefill(trace);
    append_balanced_steps(trace, 4);
    SimOptions options = Published::rank_alone(CopyStart::routed, slots);
    options.count_from = 1;
    return simulate(costs, published().programmer, options, trace).decode.ms_per_step();
  };
  const double cold = decode_ms(12, 0, 0), resident = decode_ms(6144, 0, 0);
  // A copy of 0.86 ms hides what is issued meanwhile.
  CHECK(is_near(decode_ms(12, 1e-3, 0) - cold, 48, 1e-3));
  CHECK(is_near(decode_ms(12, 0, 50e-6) - cold, 0, 1e-3));
  // All hits are one batch. The shared expert runs while the host plans.
  const double shared_ms_most = 0.2;
  const double layer_ms = (decode_ms(6144, 1e-3, 2e-3) - resident) / 48;
  CHECK(layer_ms <= 3);
  CHECK(layer_ms > 3 - shared_ms_most);
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

namespace {

struct TableRow {
  std::string question;
  SimOptions options;
  const RoutingTrace* trace;
};

SimOptions four_ranks(ShardForm shard, int64_t experts_resident, int lookahead) {
  SimOptions options{.shard = shard, .decode_position = 8192};
  // The same bytes: a slot of a slice is a quarter.
  options.policy.slots = shard == ShardForm::slice ? 4 * experts_resident : experts_resident;
  options.policy.lookahead_layers = lookahead;
  return options;
}

std::string table_line(const TableRow& row) {
  const Simulation result = simulate(published().costs, published().programmer, row.options, *row.trace);
  const bool is_decode = result.decode.steps > 0;
  const PhaseTimes& phase = is_decode ? result.decode : result.prefill;
  const auto percent = [&](SimLane lane) {
    return 100 * static_cast<double>(phase.busy_ns[static_cast<size_t>(lane)]) / static_cast<double>(phase.ns);
  };
  const double hits = static_cast<double>(phase.counts.hits);
  const bool is_alone = row.options.shard == ShardForm::slice || row.options.ranks == RankScope::first;
  const double ranks = is_alone ? 1 : 4;
  return fmt::format(
      "| {} | {} | {:.1f} | {:.0f} | {:.0f} / {:.0f} / {:.0f} % | {} |\n", row.question,
      is_decode ? fmt::format("{:.1f} ms", phase.ms_per_step()) : fmt::format("{:.0f} tok/s", phase.tokens_per_s()),
      100 * hits / (hits + static_cast<double>(phase.counts.misses)),
      static_cast<double>(phase.copied_bytes) / kGibibyte / ranks, percent(SimLane::compute), percent(SimLane::copy),
      percent(SimLane::collective), kSimLaneNames[static_cast<size_t>(phase.bound())]);
}

// Prefill, the third prompt of its kind in a row, when it may turn over so many thousandths of the slots: by chunks and
// by layers over a fast link, by chunks over four slow ones.
std::string share_table() {
  constexpr int64_t kPrompts = 3;
  const std::string configs = OFFLOAD_SOURCE_DIR "/configs/", model = configs + "models/qwen3.8-flash-next-12.json";
  const ModelSpec cut = model_spec(parse_json(read_text_file(model, 1 << 20), model), model);
  const Machine fast = read_machine(configs + "machines/h200.json");
  const auto speed = [&](const Machine& machine, const ModelSpec& spec, GemmMath math, int64_t world, int64_t rows,
                         SimOptions options, int64_t permille) {
    const StepProgrammer programmer(spec, world, kPrompts * rows);
    const std::vector<DrawnStep> prompts(kPrompts, DrawnStep{Phase::prefill, rows});
    options.shard = world > 1 ? ShardForm::slice : ShardForm::expert;
    options.count_from = kPrompts - 1;
    options.policy.prefill_stream_permille = options.policy.group_stream_permille = permille;
    const RoutingTrace trace = draw_trace(programmer.routing_shape(), UniformRouting{}, prompts, 1);
    return simulate(CostModel(machine, math, world), programmer, options, trace).prefill.tokens_per_s();
  };
  SimOptions chunks, layers, slices;
  chunks.policy.slots = 1736;
  layers.policy.slots = 1400, layers.order = PrefillOrder::layer_major;
  slices.policy.slots = 1889;
  std::string table =
      "\n| share, 1/1000 | H200, 8K by chunks | H200, 32K by layers | 4 x RTX 2080 Ti, 8K by chunks, slices |"
      "\n|---:|---:|---:|---:|\n";
  for (const int64_t permille : {30, 60, 100, 200, 300, 500, 700})
    table += fmt::format("| {} | {:.0f} tok/s | {:.0f} tok/s | {:.0f} tok/s |\n", permille,
                         speed(fast, cut, GemmMath::bf16, 1, 8192, chunks, permille),
                         speed(fast, cut, GemmMath::bf16, 1, 32768, layers, permille),
                         speed(published_machine(), published_model(), GemmMath::fp16, 4, 8192, slices, permille));
  return table;
}

}  // namespace

TEST_CASE("the_tables_of_docs_simulation" * doctest::skip()) {
  const RoutingShape shape = published().programmer.routing_shape();
  const std::vector<DrawnStep> steps(250, DrawnStep{});
  const RoutingTrace uniform = draw_trace(shape, UniformRouting{}, steps, 1);
  const RoutingTrace skewed = draw_trace(shape, SkewedRouting{}, steps, 1);
  const RoutingTrace prompt8 = drawn_prompt(shape, 8192, 1), prompt32 = drawn_prompt(shape, 32768, 1);
  const int64_t share = 1904;  // 31 % of 6144
  std::vector<TableRow> rows;
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
    const char* form = shard == ShardForm::expert ? "experts" : "slices";
    const auto decode = [&](const char* what, int64_t resident, const RoutingTrace& trace) {
      SimOptions options = four_ranks(shard, resident, 0);
      options.count_from = 150;
      rows.push_back({fmt::format("decode, {}, {}", what, form), options, &trace});
    };
    decode("12 slots, uniform", 12, uniform);
    decode("31 %, uniform", share, uniform);
    decode("31 %, skewed", share, skewed);
    for (const int ahead : {0, 1, 2})
      rows.push_back(
          {fmt::format("prefill 8K, look-ahead {}, {}", ahead, form), four_ranks(shard, 1024, ahead), &prompt8});
  }
  for (const int ahead : {0, 1})
    for (const PrefillOrder order : {PrefillOrder::chunk_major, PrefillOrder::layer_major})
      for (const int64_t chunk : {8192, 16384, 32768}) {
        SimOptions options = four_ranks(ShardForm::expert, 1024, ahead);
        options.order = order;
        options.chunk = chunk;
        rows.push_back({fmt::format("prefill 32K, chunk {}K by {}, look-ahead {}", chunk / 1024,
                                    order == PrefillOrder::chunk_major ? "chunks" : "layers", ahead),
                        options, &prompt32});
      }
  for (const int64_t chunk : {512, 1024, 2048, 4096, 8192}) {
    SimOptions options = Published::rank_alone(CopyStart::in_line, 1024);
    options.chunk = chunk;
    rows.push_back({fmt::format("prefill 8K, rank 0 alone, no copy stream, chunk {}", chunk), options, &prompt8});
  }
  std::string table =
      "\n| run | result | hits, % | copied per rank, GiB | compute / copy / collective busy | bound "
      "|\n|---|---:|---:|---:|---:|---|\n";
  for (const TableRow& row : rows) table += table_line(row);
  MESSAGE(table);
  MESSAGE(share_table());
}

}  // namespace offload::simulator_test
