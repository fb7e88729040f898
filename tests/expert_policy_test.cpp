#include "offload/expert_policy.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <map>
#include <new>
#include <numeric>

#include "core/json.h"
#include "counted_heap.h"
#include "offload/policy_replay.h"
#include "plan_carrier.h"

namespace offload::expert_policy_test {

namespace {

const RoutingShape kShape{12, 256, 5};  // top_k / experts as 10 / 512

PolicyOptions options_of(PolicyKind kind, const RoutingShape& shape, double resident) {
  PolicyOptions options{.kind = kind, .shape = shape};
  options.slots = static_cast<int64_t>(resident * static_cast<double>(shape.layers * shape.experts));
  return options;
}

std::vector<ActiveExpert> one_row_each(const std::vector<int32_t>& experts) {
  std::vector<ActiveExpert> out;
  for (const int32_t e : experts) out.push_back({e, 1});
  return out;
}

// One decode row of a single layer. Aborts the test when the plan cannot be carried out.
std::vector<PlannedRun> step(ExpertPolicy& policy, PlanCarrier& carrier, const std::vector<ActiveExpert>& active,
                             Phase phase = Phase::decode, int64_t layer = 0) {
  const LayerRouting routing{active, 1};
  const LayerPlan plan = policy.on_routed(layer, routing, phase);
  REQUIRE(carrier.issue(layer, routing, plan) == "");
  REQUIRE(carrier.move(false) == "");
  policy.check();
  return {plan.runs.begin(), plan.runs.end()};
}

double decode_hits(const PolicyOptions& options, const RoutingTrace& trace, int64_t begin, int64_t end) {
  ExpertPolicy policy(options);
  replay(policy, trace, 0, begin);
  return 100 * replay(policy, trace, begin, end).decode.hit_rate();
}

struct NamedTrace {
  std::string name;
  RoutingTrace trace;
};

// Traces that pull a policy different ways. Seeds are in the names.
std::vector<NamedTrace> shipped_traces(const RoutingShape& shape, int64_t rows) {
  const std::vector<DrawnStep> steps(static_cast<size_t>(rows));
  const SkewedRouting skewed;
  SkewedRouting drift = skewed, bursty = skewed, flat = skewed, partner = skewed;
  drift.topic_change = 0.05;
  drift.topic = 0.8;
  bursty.reuse = 0.75;
  bursty.width = 0.2;
  flat.reuse = 0.05;
  partner.topic_change = 0;
  partner.partner = 0.5;
  partner.reuse = 0.2;
  return {{"skewed, seed 1", draw_trace(shape, skewed, steps, 1)},
          {"skewed, seed 2", draw_trace(shape, skewed, steps, 2)},
          {"drifting, seed 3", draw_trace(shape, drift, steps, 3)},
          {"bursty, seed 4", draw_trace(shape, bursty, steps, 4)},
          {"little reuse, seed 5", draw_trace(shape, flat, steps, 5)},
          {"layers coupled, seed 6", draw_trace(shape, partner, steps, 6)},
          {"uniform, seed 7", draw_trace(shape, UniformRouting{}, steps, 7)}};
}

// Decode hit rates in % over the same 32 rows, without and with a prefill of other text before them.
std::pair<double, double> around_a_scan(PolicyKind kind, const RoutingShape& shape, double resident) {
  const RoutingTrace decode = draw_trace(shape, SkewedRouting{}, std::vector<DrawnStep>(232), 1);
  const std::vector<DrawnStep> chunks(2, {Phase::prefill, 1024});
  RoutingTrace scanned = decode.slice(0, 200);
  scanned.append(draw_trace(shape, SkewedRouting{}, chunks, 99));
  scanned.append(decode.slice(200, 232));
  const PolicyOptions options = options_of(kind, shape, resident);
  return {decode_hits(options, decode, 200, 232), decode_hits(options, scanned, 202, 234)};
}

struct Scan {
  int64_t copies = 0;
  double decode_hits = 0;  // in %, of the 32 rows behind it
};

// Two chunks of other text amid decode, all layers of one before the next, or each layer over both.
Scan scan_of_two_chunks(const RoutingShape& shape, double resident, bool by_layers) {
  const RoutingTrace decode = draw_trace(shape, SkewedRouting{}, std::vector<DrawnStep>(232), 1);
  const RoutingTrace text = draw_trace(shape, SkewedRouting{}, std::vector<DrawnStep>(2, {Phase::prefill, 1024}), 99);
  ExpertPolicy policy(options_of(PolicyKind::adaptive, shape, resident));
  replay(policy, decode, 0, 200);
  ActiveExperts active(shape.experts);
  for (int64_t visit = 0; visit < 2 * shape.layers; ++visit) {
    const int64_t layer = by_layers ? visit / 2 : visit % shape.layers;
    const int64_t chunk = by_layers ? visit % 2 : visit / shape.layers;
    policy.on_routed(layer, {active.collect(text.ids(chunk, layer)), text.rows(chunk), by_layers && chunk == 0},
                     Phase::prefill);
  }
  const int64_t copies = policy.counts(Phase::prefill).copies();
  return {copies, 100 * replay(policy, decode, 200, 232).decode.hit_rate()};
}

}  // namespace

TEST_CASE("the_reported_cache_trace_runs_in_waves_and_loads_an_expert_named_twice_once") {
  const std::string path = std::string(OFFLOAD_SOURCE_DIR) + "/tests/data/policy/cache_trace.json";
  const Json file = parse_json(read_text_file(path, 1 << 20), path);
  for (const PolicyKind kind : {PolicyKind::lru, PolicyKind::adaptive})
    for (const int64_t slots : {int64_t{4}, int64_t{1}}) {
      PolicyOptions options{.kind = kind, .shape = {1, file["distinct"], 4}, .slots = slots};
      ExpertPolicy policy(options);
      PlanCarrier carrier(options, 1);
      ActiveExperts active(options.shape.experts);
      for (const Json& ids : file["steps"]) {
        const auto named = ids.get<std::vector<int32_t>>();
        const auto distinct = active.collect(named);
        const auto runs = step(policy, carrier, {distinct.begin(), distinct.end()});
        CHECK(runs.size() == std::set<int32_t>(named.begin(), named.end()).size());
      }
      CHECK(carrier.move(true) == "");
      CHECK(policy.counts(Phase::decode).misses >= 8);
      CHECK(policy.counts(Phase::decode).misses <= 27);
    }
}

TEST_CASE("a_layer_that_returns_keeps_what_it_copied_when_the_slots_hold_it") {
  const RoutingShape shape{6, 32, 4};
  const RoutingTrace prompt = draw_trace(shape, SkewedRouting{}, std::vector<DrawnStep>(4, {Phase::prefill, 24}), 1);
  const RoutingTrace before = draw_trace(shape, SkewedRouting{}, std::vector<DrawnStep>(100), 2);
  for (const int64_t slots : {33, 40, 64})
    for (const int lookahead : {0, 1, 2}) {
      CAPTURE(slots);
      CAPTURE(lookahead);
      const PolicyOptions options{.shape = shape, .slots = slots, .lookahead_layers = lookahead};
      ExpertPolicy policy(options);
      replay(policy, before, 0, before.steps());
      std::map<std::pair<int32_t, int32_t>, int> copies;
      ActiveExperts active(shape.experts);
      for (int32_t layer = 0; layer < shape.layers; ++layer)
        for (int64_t chunk = 0; chunk < prompt.steps(); ++chunk) {
          const LayerRouting routing{active.collect(prompt.ids(chunk, layer)), prompt.rows(chunk),
                                     chunk + 1 < prompt.steps()};
          const LayerPlan plan = policy.on_routed(layer, routing, Phase::prefill);
          for (const PlannedRun& run : plan.runs) copies[{layer, run.expert}] += run.copy_first ? 1 : 0;
          for (const PlannedCopy& ahead : plan.lookahead)  // behind the last layer, for tokens that could come next
            if (ahead.key.layer > layer) ++copies[{ahead.key.layer, ahead.key.expert}];
          policy.check();
        }
      for (const auto& [key, count] : copies) CHECK(count <= 1);
      CHECK(copies.size() > 120);
    }
}

TEST_CASE("residents_run_first_and_a_step_of_as_many_experts_as_slots_keeps_them_all") {
  for (const PolicyKind kind : {PolicyKind::lru, PolicyKind::adaptive}) {
    const PolicyOptions options{.kind = kind, .shape = {1, 16, 4}, .slots = 4};
    ExpertPolicy policy(options);
    PlanCarrier carrier(options, 1);
    step(policy, carrier, one_row_each({3, 5, 7, 9}));
    for (const PlannedRun& run : step(policy, carrier, one_row_each({3, 5, 7, 9}))) CHECK_FALSE(run.copy_first);
    const auto runs = step(policy, carrier, one_row_each({1, 5, 9, 11}));
    CHECK(runs[0].expert == 5);
    CHECK(runs[1].expert == 9);
    CHECK(runs[2].copy_first);
    CHECK(runs[3].copy_first);
    CHECK((runs[2].evicts == ExpertKey{0, 3} || runs[2].evicts == ExpertKey{0, 7}));
    CHECK(runs[2].after_run == -1);
  }
}

TEST_CASE("a_wave_waits_for_the_run_that_read_its_slot") {
  const PolicyOptions options{.shape = {1, 16, 4}, .slots = 2};
  ExpertPolicy policy(options);
  PlanCarrier carrier(options, 1);
  const auto runs = step(policy, carrier, one_row_each({0, 1, 2, 3, 4}));
  for (size_t i = 2; i < runs.size(); ++i) {
    CHECK(runs[i].after_run == static_cast<int32_t>(i) - 2);
    CHECK(runs[i].slot == runs[i - 2].slot);
    CHECK(runs[i].evicts == ExpertKey{0, runs[i - 2].expert});
  }
}

TEST_CASE("each_rank_runs_exactly_its_own_experts_by_their_global_ids") {
  for (const int64_t world : {1, 2, 4})
    for (const std::vector<int32_t>& chosen : {std::vector<int32_t>{0, 4, 8, 12}, {3, 7, 11, 15}, {0, 1, 2, 15}, {}}) {
      std::vector<int32_t> ran;
      for (int64_t rank = 0; rank < world; ++rank) {
        const PolicyOptions options{.shape = {2, 16, 4}, .slots = 3, .world = world, .rank = rank};
        ExpertPolicy policy(options);
        PlanCarrier carrier(options, 1);
        for (const PlannedRun& run : step(policy, carrier, one_row_each(chosen))) {
          CHECK(run.expert % world == rank);
          ran.push_back(run.expert);
        }
      }
      std::sort(ran.begin(), ran.end());
      CHECK(ran == chosen);
    }
}

TEST_CASE("steps_of_any_number_of_rows_are_planned") {
  const RoutingShape shape{1, 64, 4};
  for (const int64_t rows : {4 * 256, 16 * 600, 8192, 1 << 20}) {
    PolicyOptions options{.shape = shape, .slots = 8};
    ExpertPolicy policy(options);
    PlanCarrier carrier(options, 1);
    ActiveExperts active(shape.experts);
    std::vector<int32_t> ids(static_cast<size_t>(rows * shape.top_k), 7);  // all rows to one expert
    const auto one = active.collect(ids);
    CHECK(step(policy, carrier, {one.begin(), one.end()}, Phase::prefill)[0].rows == rows * shape.top_k);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 64);
    const auto all = active.collect(ids);
    CHECK(step(policy, carrier, {all.begin(), all.end()}, Phase::prefill).size() == 64);
  }
}

TEST_CASE("the_share_off_the_slab_is_exact_in_the_long_run_and_never_copied") {
  PolicyOptions options{.shape = {1, 64, 4}, .slots = 8, .host_permille = 300, .zero_copy_permille = 150};
  ExpertPolicy policy(options);
  PlanCarrier carrier(options, 1);
  const RoutingTrace trace = draw_trace(options.shape, UniformRouting{}, std::vector<DrawnStep>(500), 1);
  ActiveExperts active(64);
  std::map<RunWhere, int> counts;
  for (int64_t s = 0; s < trace.steps(); ++s) {
    const auto distinct = active.collect(trace.ids(s, 0));
    for (const PlannedRun& run : step(policy, carrier, {distinct.begin(), distinct.end()}))
      if (run.copy_first || run.where != RunWhere::slab) ++counts[run.where];
  }
  const int missed = counts[RunWhere::slab] + counts[RunWhere::host] + counts[RunWhere::zero_copy];
  CHECK(counts[RunWhere::host] == doctest::Approx(0.3 * missed).epsilon(0.01));
  CHECK(counts[RunWhere::zero_copy] == doctest::Approx(0.15 * missed).epsilon(0.01));
  CHECK(carrier.copies_issued() == static_cast<uint64_t>(counts[RunWhere::slab]));

  options.host_permille = 1000;
  options.zero_copy_permille = 0;
  ExpertPolicy all_host(options);
  static_cast<void>(all_host.on_routed(0, {one_row_each({56, 57, 58, 59, 60, 61, 62, 63}), 2}, Phase::prefill));
  for (const PlannedRun& run : all_host.on_routed(0, {one_row_each({1, 2, 3}), 1}, Phase::decode).runs)
    CHECK(run.where == RunWhere::host);
  const std::vector<ActiveExpert> many = {{4, 9}, {5, 8}};  // nine rows are beyond the canonical order
  for (const PlannedRun& run : all_host.on_routed(0, {many, 17}, Phase::decode).runs)
    CHECK(run.where == (run.expert == 4 ? RunWhere::slab : RunWhere::host));
  for (const PlannedRun& run : all_host.on_routed(0, {one_row_each({6, 7}), 1}, Phase::prefill).runs)
    CHECK(run.where == RunWhere::slab);
}

TEST_CASE("what_would_run_off_the_slab_takes_free_slots_first") {
  ExpertPolicy policy({.shape = {1, 8, 2}, .slots = 8, .host_permille = 500, .zero_copy_permille = 500});
  for (int32_t e = 0; e < 8; e += 2)
    for (const PlannedRun& run : policy.on_routed(0, {one_row_each({e, e + 1}), 1}, Phase::decode).runs)
      CHECK(run.copy_first);
  CHECK(policy.on_routed(0, {one_row_each({0, 7}), 1}, Phase::decode).runs.size() == 2);
  CHECK(policy.is_complete());
  CHECK(policy.counts(Phase::decode).off_slab == 0);

  ExpertPolicy small({.shape = {1, 8, 2}, .slots = 3, .host_permille = 1000});
  int64_t copies = 0;
  for (int32_t e = 0; e < 8; e += 2)
    for (const PlannedRun& run : small.on_routed(0, {one_row_each({e, e + 1}), 1}, Phase::decode).runs)
      copies += run.copy_first ? 1 : 0;
  CHECK(copies == 3);
  CHECK(small.counts(Phase::decode).off_slab == 5);
}

TEST_CASE("with_fewer_slots_than_a_token_needs_lru_never_hits_and_adaptive_does") {
  RoutingTrace cycle({8, 32, 4});
  std::vector<uint16_t> ids(32);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i % 4 * 7);
  for (int s = 0; s < 64; ++s) cycle.append(Phase::decode, 1, ids);
  for (const int64_t slots : {8, 16, 28}) {
    PolicyOptions options{.kind = PolicyKind::lru, .shape = cycle.shape(), .slots = slots, .lookahead_layers = 0};
    CHECK(decode_hits(options, cycle, 16, 64) == 0);
    options.kind = PolicyKind::adaptive;
    const double most = 100.0 * static_cast<double>(slots - 1) / 32;
    CAPTURE(slots);
    CHECK(decode_hits(options, cycle, 16, 64) > 0.8 * most);
  }
}

TEST_CASE("adaptive_beats_lru_on_skewed_routing_and_is_never_a_point_below_it") {
  for (const NamedTrace& one : shipped_traces(kShape, 400))
    for (const double resident : {0.125, 0.25, 0.31}) {
      const ReplayRow row = compare_policies(one.name, one.trace, 150, resident, 0, 0);
      CAPTURE(one.name);
      CAPTURE(resident);
      CHECK(row.adaptive > row.lru - 0.01);
      if (one.name.starts_with("skewed")) CHECK(row.adaptive > row.lru);
      CHECK(row.belady >= row.adaptive);
      CHECK(row.belady >= row.lru);
    }
}

TEST_CASE("a_prefill_scan_costs_the_next_32_tokens_less_than_five_points") {
  for (const double resident : {0.125, 0.25, 0.31}) {
    const auto [without, with] = around_a_scan(PolicyKind::adaptive, kShape, resident);
    CAPTURE(resident);
    CHECK(without > 50);
    CHECK(with > without - 5);
  }
}

TEST_CASE("prefill_stages_the_next_layer_and_each_expert_is_copied_once_per_chunk_at_most") {
  const RoutingTrace prefill = draw_trace(kShape, SkewedRouting{}, std::vector<DrawnStep>(3, {Phase::prefill, 256}), 1);
  for (const int depth : {1, 2}) {
    PolicyOptions options = options_of(PolicyKind::adaptive, kShape, 0.25);
    options.lookahead_layers = depth;
    options.prefill_stream_permille = 500;
    ExpertPolicy policy(options);
    replay(policy, prefill, 0, 1);
    const PhaseReplay later = replay(policy, prefill, 1, 3).prefill;
    CAPTURE(depth);
    CHECK(later.hit_rate() > 0.6);
    CHECK(later.counts.lookahead_used > later.counts.copies_lookahead / 2);
    CHECK(later.counts.copies() <= 1.2 * static_cast<double>(later.counts.hits + later.counts.misses));
  }
}

TEST_CASE("a_chunk_stages_an_expert_for_every_64_rows_in_up_to_a_third_of_the_slots") {
  const RoutingShape shape{4, 256, 4};
  const auto staged = [&](int64_t rows, int64_t permille) {
    ExpertPolicy policy({.shape = shape, .slots = 300, .prefill_stream_permille = permille});
    std::vector<ActiveExpert> all;
    for (int32_t e = 0; e < shape.experts; ++e) all.push_back({e, static_cast<int32_t>(rows * 4 / shape.experts)});
    size_t count = 0;
    for (int64_t visit = 0; visit < 3 * shape.layers; ++visit)  // the slots are full after the first two
      count = policy.on_routed(visit % shape.layers, {all, rows, 0, true}, Phase::prefill).lookahead.size();
    return count;
  };
  CHECK(staged(640, 0) == 10);
  CHECK(staged(6400, 0) == 100);
  CHECK(staged(64000, 0) == 100);
  CHECK(staged(640, 200) == 30);  // half of a fifth
}

TEST_CASE("nothing_is_staged_behind_the_end_of_a_prompt") {
  const RoutingShape shape{4, 64, 4};
  const RoutingTrace prompt = draw_trace(shape, UniformRouting{}, std::vector<DrawnStep>(2, {Phase::prefill, 64}), 1);
  for (const int depth : {1, 2}) {
    ExpertPolicy policy({.shape = shape, .slots = 96, .lookahead_layers = depth});
    ActiveExperts active(shape.experts);
    for (int64_t chunk = 0; chunk < 2; ++chunk)
      for (int64_t layer = 0; layer < shape.layers; ++layer) {
        const bool continues = chunk == 0;
        const LayerPlan plan = policy.on_routed(
            layer, {active.collect(prompt.ids(chunk, layer)), prompt.rows(chunk), 0, continues}, Phase::prefill);
        CAPTURE(depth);
        CAPTURE(chunk);
        CAPTURE(layer);
        if (layer == shape.layers - 1) CHECK(plan.lookahead.empty() == !continues);
        for (const PlannedCopy& ahead : plan.lookahead) CHECK((continues || ahead.key.layer > layer));
      }
  }
}

TEST_CASE("decode_looks_ahead_only_where_what_it_would_stage_has_been_right") {
  // What a layer chooses decides what the next one does, and a token's choice at layer 0 is one of 40.
  RoutingTrace chain({6, 128, 4});
  const RoutingTrace sets = draw_trace({6, 128, 4}, UniformRouting{}, std::vector<DrawnStep>(40), 11);
  const RoutingTrace order = draw_trace({1, 40, 1}, UniformRouting{}, std::vector<DrawnStep>(600), 12);
  std::vector<uint16_t> ids;
  for (int64_t s = 0; s < order.steps(); ++s) {
    ids.clear();
    for (int64_t l = 0; l < 6; ++l) {
      const auto set = sets.ids(order.ids(s, 0)[0], l);
      ids.insert(ids.end(), set.begin(), set.end());
    }
    chain.append(Phase::decode, 1, ids);
  }
  PolicyOptions options = options_of(PolicyKind::adaptive, chain.shape(), 0.125);
  ExpertPolicy policy(options);
  replay(policy, chain, 0, 200);
  const PhaseReplay ahead = replay(policy, chain, 200, 600).decode;
  options.lookahead_layers = 0;
  CHECK(100 * ahead.hit_rate() > decode_hits(options, chain, 200, 600) + 5);
  CHECK(ahead.counts.lookahead_used > ahead.counts.copies_lookahead / 2);

  const RoutingTrace uniform = draw_trace({6, 128, 4}, UniformRouting{}, std::vector<DrawnStep>(400), 13);
  options.lookahead_layers = 1;
  ExpertPolicy idle(options);
  CHECK(replay(idle, uniform, 0, 400).decode.counts.copies_lookahead < 20);
}

TEST_CASE("planning_allocates_nothing_after_construction") {
  std::vector<DrawnStep> steps(30);
  steps[3] = steps[17] = {Phase::prefill, 64};
  steps[9] = {Phase::decode, 6};
  const RoutingTrace trace = draw_trace(kShape, SkewedRouting{}, steps, 1);
  for (const PolicyKind kind : {PolicyKind::lru, PolicyKind::adaptive})
    for (const double resident : {0.002, 0.25, 1.0}) {
      PolicyOptions options = options_of(kind, kShape, resident);
      options.lookahead_layers = 2;
      options.lookahead_chance_min = 0;
      options.host_permille = 100;
      ExpertPolicy policy(options);
      ActiveExperts active(kShape.experts);
      const int64_t before = heap_allocations();
      for (int64_t s = 0; s < trace.steps(); ++s)
        for (int64_t l = 0; l < kShape.layers; ++l)
          policy.on_routed(l, {active.collect(trace.ids(s, l)), trace.rows(s)}, trace.phase(s));
      CHECK(heap_allocations() == before);
    }
}

TEST_CASE("options_out_of_range_are_refused_by_name") {
  const PolicyOptions good{.shape = {2, 8, 2}, .slots = 4};
  const auto refusal = [&](auto&& spoil) {
    PolicyOptions bad = good;
    spoil(bad);
    try {
      const ExpertPolicy policy(bad);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::usage);
      return error.message();
    }
    return std::string();
  };
  CHECK(refusal([](PolicyOptions&) {}) == "");
  CHECK(refusal([](PolicyOptions& o) { o.slots = 0; }) == "expert policy: slots is 0, expected 1 or more");
  CHECK(refusal([](PolicyOptions& o) { o.shape.top_k = 9; }).find("top_k is 9") != std::string::npos);
  CHECK(refusal([](PolicyOptions& o) { o.rank = 1; }).find("rank is 1, expected less than world") != std::string::npos);
  CHECK(refusal([](PolicyOptions& o) { o.lookahead_layers = 3; }).find("lookahead_layers") != std::string::npos);
  CHECK(refusal([](PolicyOptions& o) { o.rows_per_staged = 0; }).find("rows_per_staged") != std::string::npos);
  CHECK(refusal([](PolicyOptions& o) { o.host_permille = o.zero_copy_permille = 600; }).find("zero_copy_permille") !=
        std::string::npos);
}

TEST_CASE("belady_evicts_what_is_needed_last") {
  RoutingTrace trace({1, 4, 1});
  for (const uint16_t id : {0, 1, 2, 0, 1, 3, 0, 1}) trace.append(Phase::decode, 1, std::vector<uint16_t>{id});
  // Two slots: 0 1 miss, 2 takes 1's place (or 0's), ...: by hand, 0 hits at 3 and 6 and one of the others misses.
  const PhaseReplay best = replay_belady(trace, 2, 0, trace.steps()).decode;
  CHECK(best.counts.hits == 2);
  CHECK(best.counts.misses == 6);
  CHECK(replay_belady(trace, 3, 0, trace.steps()).decode.counts.hits == 4);
  CHECK(replay_belady(trace, 3, 4, trace.steps()).decode.steps == 4);
}

TEST_CASE("a_scan_by_layers_copies_half_of_one_by_chunks_and_costs_decode_three_points_at_most") {
  for (const double resident : {0.1, 0.25}) {  // 307 slots for 256 experts a layer, and 768
    const Scan chunks = scan_of_two_chunks(kShape, resident, false),
               layers = scan_of_two_chunks(kShape, resident, true);
    CAPTURE(resident);
    CHECK(static_cast<double>(layers.copies) < 0.6 * static_cast<double>(chunks.copies));
    CHECK(layers.decode_hits > chunks.decode_hits - 3);
  }
}

// The tables of docs/policy.md: brain_tests --no-skip --test-case=the_tables_of_docs_policy
TEST_CASE("the_tables_of_docs_policy" * doctest::skip()) {
  const RoutingShape published{48, 512, 10};
  constexpr int64_t kExpertBytes = 3 * 2560 * 640 * 2;  // 9.375 MiB
  std::vector<ReplayRow> rows;
  for (const NamedTrace& one : shipped_traces(published, 400))
    for (const double resident : {0.125, 0.25, 0.31})
      rows.push_back(compare_policies(one.name, one.trace, 150, resident, kExpertBytes, 1));
  std::string scans = "| resident | lru | after a scan | adaptive | after a scan |\n|---:|---:|---:|---:|---:|\n";
  for (const double resident : {0.125, 0.25, 0.31}) {
    const auto lru = around_a_scan(PolicyKind::lru, published, resident);
    const auto adaptive = around_a_scan(PolicyKind::adaptive, published, resident);
    scans += fmt::format("| {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} % |\n", 100 * resident, lru.first,
                         lru.second, adaptive.first, adaptive.second);
  }
  std::string orders = "| resident | copies by chunks | by layers | decode hits by chunks | by layers |\n";
  orders += "|---:|---:|---:|---:|---:|\n";
  for (const double resident : {0.045, 0.125, 0.25, 0.31}) {
    const Scan chunks = scan_of_two_chunks(published, resident, false);
    const Scan layers = scan_of_two_chunks(published, resident, true);
    orders += fmt::format("| {:.1f} % | {} | {} | {:.1f} % | {:.1f} % |\n", 100 * resident, chunks.copies,
                          layers.copies, chunks.decode_hits, layers.decode_hits);
  }
  MESSAGE("\n" << replay_table(rows) << "\n" << scans << "\n" << orders);
}

}  // namespace offload::expert_policy_test
