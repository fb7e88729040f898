// Where an expert runs, on which kind of device, and in which order a prompt's chunks pass the layers changes no bit.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <map>

#include "offload/simulator.h"
#include "rank_rig.h"
#include "simulation_cases.h"

namespace offload::placement_invariance_test {

namespace {

constexpr size_t kChain = 16;
constexpr int64_t kChunk = 20;      // of 106 tokens: five and one of 6 rows
constexpr int64_t kByChunks = 20;   // groups of one chunk
constexpr int64_t kByLayers = 120;  // of all chunks

struct Share {
  int64_t host, zero_copy;
};
constexpr Share kShares[] = {{0, 0}, {500, 0}, {1000, 0}, {0, 500}, {0, 1000}, {300, 400}};

ExpertCacheOptions cache_of(int64_t slots, Share share, int lookahead = 1, PolicyKind policy = PolicyKind::adaptive) {
  return {.slots = slots,
          .policy = policy,
          .lookahead_layers = lookahead,
          .host_permille = share.host,
          .zero_copy_permille = share.zero_copy};
}

PolicyCounts counts_of(Engine& engine, int rank, Phase phase) {
  return engine.rank(rank).executor().policy()->counts(phase);
}

}  // namespace

TEST_CASE("shares_off_the_slab_and_the_order_of_prefill_change_no_bit") {
  const Golden golden;
  const std::vector<float> expected = Rig({.chunk = kChunk}).run(long_chinese(golden), kChain);
  for (const int64_t slots : {3, 40})
    for (const int lookahead : {0, 2})
      for (const Share share : kShares)
        for (const int64_t group : {lookahead == 0 ? kByChunks : 60, kByLayers}) {
          CAPTURE(slots);
          CAPTURE(lookahead);
          CAPTURE(share.host);
          CAPTURE(share.zero_copy);
          CAPTURE(group);
          const PolicyKind policy = lookahead == 0 ? PolicyKind::lru : PolicyKind::adaptive;
          Rig rig({.cache = cache_of(slots, share, lookahead, policy), .chunk = kChunk, .prefill_group = group});
          CHECK(rig.run(long_chinese(golden), kChain) == expected);
          const PolicyCounts decode = counts_of(rig.engine(), 0, Phase::decode);
          CHECK((decode.off_slab > 0) == (share.host + share.zero_copy > 0));
          if (share.host + share.zero_copy == 1000) CHECK(decode.misses == 0);
          const ExpertExecutor& executor = rig.engine().rank(0).executor();
          CHECK((executor.host_expert_bytes() > 0) == (share.host > 0));
        }
}

TEST_CASE("a_device_with_memory_of_its_own_whose_work_is_late_gives_the_same_bits") {
  const Golden golden;
  const std::vector<float> expected = Rig({.chunk = kChunk}).run(long_chinese(golden), kChain);
  uint64_t seed = 1;
  for (const int64_t slots : {0, 3, 40, 300})
    for (const Share share : kShares)
      for (const int64_t group : {kByChunks, kByLayers}) {
        if (slots == 0 && share.host + share.zero_copy > 0) continue;
        CAPTURE(slots);
        CAPTURE(share.host);
        CAPTURE(share.zero_copy);
        CAPTURE(group);
        CAPTURE(seed);
        RemoteRig rig({.cache = cache_of(slots, share), .chunk = kChunk, .prefill_group = group, .seed = seed++});
        CHECK(rig.run(long_chinese(golden), kChain) == expected);
        CHECK(rig.device(0).repeats() > 0);
        if (slots == 3) CHECK((rig.device(0).zero_copy_runs() > 0) == (share.zero_copy > 0));
      }
}

TEST_CASE("once_all_experts_have_slots_the_device_routes_alone_and_gives_the_same_bits") {
  const Golden golden;
  const std::vector<float> expected = Rig({.chunk = kChunk}).run(long_chinese(golden), kChain);
  for (const uint64_t seed : {1, 2, 3}) {
    RemoteRig rig({.cache = {.slots = 300, .routes_on_device = true}, .chunk = kChunk, .seed = seed});
    int routings = 0;
    rig.device(0).set_on_download(
        [&](const Tensor& device, std::span<const std::byte>) { routings += device.dtype() == DType::i32; });
    const ExpertPolicy* policy = rig.engine().rank(0).executor().policy();
    for (const GoldenPrompt& prompt : golden.prompts())
      if (!policy->is_complete()) rig.run(prompt, 3);
    REQUIRE(policy->is_complete());
    CHECK(routings > 0);
    routings = 0;
    CHECK(rig.run(long_chinese(golden), kChain) == expected);
    CHECK(routings == 0);
  }
}

TEST_CASE("devices_that_route_alone_compute_experts_in_the_math_of_the_arm") {
  const Golden golden;
  const int64_t whole = 128;  // 106 rows at once give some experts more than the eight that are native under every arm
  World world{.chunk = whole};
  const std::vector<float> native = Rig(world).run(long_chinese(golden), kChain);
  world.arithmetic.rules.add({.site = Site::experts, .rows_min = 9, .math = Math::reordered});
  const std::vector<float> expected = Rig(world).run(long_chinese(golden), kChain);
  CHECK(expected != native);
  world.cache = {.slots = 300, .routes_on_device = true};
  RemoteRig rig(world);
  const ExpertPolicy* policy = rig.engine().rank(0).executor().policy();
  for (const GoldenPrompt& prompt : golden.prompts())
    if (!policy->is_complete()) rig.run(prompt, 3);
  REQUIRE(policy->is_complete());
  CHECK(rig.run(long_chinese(golden), kChain) == expected);
}

TEST_CASE("ranks_whose_devices_sum_and_route_alone_give_the_bits_of_ranks_whose_hosts_see_to_it") {
  const Golden golden;
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
    const std::vector<float> expected =
        Rig({.ranks = 2, .shard = shard, .chunk = kChunk}).run(long_chinese(golden), kChain);
    for (const int64_t slots : {24, 300}) {
      CAPTURE((shard == ShardForm::slice));
      CAPTURE(slots);
      RemoteRig rig({.ranks = 2,
                     .shard = shard,
                     .cache = {.slots = slots, .routes_on_device = true},
                     .chunk = kChunk,
                     .prefill_group = kByChunks,
                     .sums = true});
      std::atomic<int> routings = 0;
      for (int rank = 0; rank < 2; ++rank)
        rig.device(rank).set_on_download([&](const Tensor& device, std::span<const std::byte>) {
          routings += device.dtype() == DType::i32 && device.rank() == 2;
        });
      const auto is_complete = [&](int rank) { return rig.engine().rank(rank).executor().policy()->is_complete(); };
      for (const GoldenPrompt& prompt : golden.prompts())
        if (slots == 300 && !(is_complete(0) && is_complete(1))) rig.run(prompt, 3);
      CHECK(rig.run(long_chinese(golden), kChain) == expected);
      CHECK(routings > 0);
      routings = 0;
      CHECK(rig.run(long_chinese(golden), kChain) == expected);
      CHECK((routings == 0) == (slots == 300));
      for (int rank = 0; rank < 2; ++rank) CHECK(rig.device(rank).repeats() > 0);
      // Who looks at one rank's routing has all hosts look.
      RoutingRecorder recorder(rig.engine().routing_shape(), 64, 1024, 1024);
      rig.engine().record_routing(&recorder);
      CHECK(rig.run(long_chinese(golden), kChain) == expected);
      rig.engine().record_routing(nullptr);
      CHECK(recorder.trace().steps() == static_cast<int64_t>((106 + kChunk - 1) / kChunk + kChain));
      CHECK(rig.run(long_chinese(golden), kChain) == expected);
    }
  }
}

TEST_CASE("the_host_touches_no_memory_of_a_device_but_by_transfers") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();  // 18 tokens
  const std::vector<float> expected = Rig({.ranks = 2, .chunk = 9}).run(prompt, 3);
  RemoteRig rig({.ranks = 2, .cache = cache_of(5, {300, 400}), .chunk = 9, .prefill_group = 18, .is_closed = true});
  CHECK(rig.run(prompt, 3) == expected);
}

TEST_CASE("ranks_give_the_bits_of_their_world_wherever_their_experts_run") {
  const Golden golden;
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
    const std::vector<float> expected =
        Rig({.ranks = 2, .shard = shard, .chunk = kChunk}).run(long_chinese(golden), kChain);
    for (const int64_t slots : {2, 24})
      for (const Share share : kShares)
        for (const int64_t group : {kByChunks, kByLayers}) {
          CAPTURE(slots);
          CAPTURE(share.host);
          CAPTURE(share.zero_copy);
          CAPTURE(group);
          const World world{
              .ranks = 2, .shard = shard, .cache = cache_of(slots, share), .chunk = kChunk, .prefill_group = group};
          if (slots == 2) CHECK(Rig(world).run(long_chinese(golden), kChain) == expected);
          if (slots == 24) CHECK(RemoteRig(world).run(long_chinese(golden), kChain) == expected);
        }
  }
}

namespace {

// Nothing makes the host wait between the chunks but the routing of layers.
template <typename AnyRig>
std::vector<float> last_logits(AnyRig rig, const GoldenPrompt& prompt) {
  Sequence sequence = rig.engine().new_sequence();
  std::vector<float> out;
  std::vector<int64_t> rows;
  rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::last, [&](int64_t row, std::span<const float> logits) {
    rows.push_back(row);
    out.assign(logits.begin(), logits.end());
  });
  CHECK(rows == std::vector<int64_t>{105});
  CHECK(sequence.length() == 106);
  return out;
}

}  // namespace

TEST_CASE("logits_of_the_last_row_alone_do_not_depend_on_the_order_of_prefill") {
  const Golden golden;
  const std::vector<float> expected = last_logits(Rig({.chunk = kChunk}), long_chinese(golden));
  for (const int64_t group : {kByChunks, int64_t{60}, kByLayers})
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      CAPTURE(group);
      CAPTURE(seed);
      const World world{.cache = {.slots = 40}, .chunk = kChunk, .prefill_group = group, .seed = seed};
      CHECK(last_logits(RemoteRig(world), long_chinese(golden)) == expected);
    }
}

TEST_CASE("a_tap_sees_each_layer_of_each_chunk_in_the_order_of_the_group") {
  const Golden golden;
  for (const int64_t group : {kByChunks, int64_t{60}}) {
    Rig rig({.cache = {.slots = 40}, .chunk = kChunk, .prefill_group = group});
    Sequence sequence = rig.engine().new_sequence();
    std::vector<std::pair<size_t, int64_t>> seen;
    rig.engine().feed(sequence, std::span(long_chinese(golden).ids).first(86), Engine::LogitRows::none, {},
                      [&](size_t layer, const Tensor& stack) { seen.emplace_back(layer, stack.dim(0)); });
    std::vector<std::pair<size_t, int64_t>> expected;
    for (int64_t begin = 0; begin < 86; begin += group)
      for (size_t layer = 0; layer < 8; ++layer)
        for (int64_t row = begin; row < std::min(begin + group, int64_t{86}); row += kChunk)
          expected.emplace_back(layer, std::min(kChunk, 86 - row));
    CHECK(seen == expected);
  }
}

namespace {

// Copies of each expert of rank 0 during one prompt.
struct CopyCounts {
  std::map<ExpertKey, int, bool (*)(const ExpertKey&, const ExpertKey&)> by_key{
      [](const ExpertKey& a, const ExpertKey& b) {
        return a.layer != b.layer ? a.layer < b.layer : a.expert < b.expert;
      }};
  int total = 0;

  int most(int32_t layer_min) const {
    int most = 0;
    for (const auto& [key, count] : by_key)
      if (key.layer >= layer_min) most = std::max(most, count);
    return most;
  }
};

CopyCounts count_copies(const GoldenPrompt& prompt, const ExpertCacheOptions& cache, int64_t group) {
  RemoteRig rig({.cache = cache, .chunk = kChunk, .prefill_group = group});
  const Residency& residency = rig.engine().residency();
  std::map<const std::byte*, ExpertKey> keys;
  for (int64_t layer = 0; layer < residency.layers(); ++layer)
    for (int64_t expert = 0; expert < residency.shape().experts; ++expert)
      keys[residency.block(0, layer, expert)] = {static_cast<int32_t>(layer), static_cast<int32_t>(expert)};
  CopyCounts counts;
  rig.device(0).set_on_copy([&](const std::byte* host) {
    const auto found = keys.find(host);
    if (found == keys.end()) return;  // rows of the n-gram table
    ++counts.by_key[found->second];
    ++counts.total;
  });
  rig.run(prompt, 0);
  return counts;
}

}  // namespace

TEST_CASE("by_layers_an_expert_is_copied_once_per_prompt_when_the_slots_hold_a_layer") {
  const Golden golden;
  for (const PolicyKind policy : {PolicyKind::lru, PolicyKind::adaptive}) {
    const ExpertCacheOptions no_lookahead = cache_of(34, {0, 0}, 0, policy);
    const CopyCounts by_layers = count_copies(long_chinese(golden), no_lookahead, kByLayers);
    CHECK(by_layers.most(0) == 1);
    CHECK(by_layers.total > 200);  // of 8 x 32; nearly all are active in 106 rows
    CHECK(count_copies(long_chinese(golden), no_lookahead, kByChunks).total > 2 * by_layers.total);
  }
  // Behind the last layer, look-ahead stages the first one's experts for tokens that could come next.
  for (const int lookahead : {1, 2})
    CHECK(count_copies(long_chinese(golden), cache_of(48, {0, 0}, lookahead), kByLayers).most(lookahead) == 1);
}

TEST_CASE("the_n_th_copy_that_fails_ends_a_prompt_by_layers_with_its_own_error") {
  const Golden golden;
  for (const int ranks : {1, 2})
    for (const int nth : {1, 2, 40, 120}) {
      CAPTURE(ranks);
      CAPTURE(nth);
      std::atomic<int> copies = 0;
      RemoteRig rig({.ranks = ranks, .cache = cache_of(6, {500, 0}), .chunk = kChunk, .prefill_group = kByLayers},
                    [&](RemoteDevice& device, int rank) {
                      if (rank != ranks - 1) return;
                      device.set_on_copy([&](const std::byte*) {
                        if (++copies == nth) throw Error(ErrorCode::device, "the link broke");
                      });
                    });
      for (int again = 0; again < 2; ++again) {
        try {
          rig.run(long_chinese(golden), 4);
          FAIL("no error");
        } catch (const Error& error) {
          CHECK(error.message() == "the link broke");
        }
      }
    }
}

TEST_CASE("the_n_th_allocation_that_fails_ends_the_load_with_stacks_and_staging_with_its_own_error") {
  const Golden golden;
  int nth = 1, failures = 0;
  for (bool passed = false; !passed; ++nth) {
    int allocations = 0;
    try {
      RemoteRig rig({.cache = cache_of(6, {500, 0}), .chunk = kChunk, .prefill_group = kByLayers}, {},
                    [&](RemoteDevice& device, int) {
                      device.set_before_allocate([&] {
                        if (++allocations == nth) throw Error(ErrorCode::resource, "no memory");
                      });
                    });
      rig.run(long_chinese(golden), 1);
      passed = true;
    } catch (const Error& error) {
      CHECK(error.message() == "no memory");
      ++failures;
    }
    REQUIRE(nth < 100);
  }
  CHECK(failures == 7);  // weights, workspace, op scratch, expert slots, n-gram rows, logits; then the sequence
}

TEST_CASE("a_prompt_interrupted_between_chunks_of_a_layer_leaves_an_engine_that_can_start_again") {
  const Golden golden;
  for (const int ranks : {1, 2}) {
    RemoteRig rig({.ranks = ranks, .cache = cache_of(20, {300, 300}), .chunk = kChunk, .prefill_group = kByLayers});
    const std::vector<float> expected = rig.run(long_chinese(golden), 4);
    for (const int stop_after : {1, 2, 9, 20, 48}) {
      Sequence sequence = rig.engine().new_sequence();
      int steps = 0;
      const auto stop = [&](size_t, const Tensor&) {
        if (++steps == stop_after) throw Error(ErrorCode::interrupted, "interrupted");
      };
      CHECK_THROWS_AS(rig.engine().feed(sequence, long_chinese(golden).ids, Engine::LogitRows::none, {}, stop), Error);
      sequence.reset();
      CHECK(rig.run(long_chinese(golden), 4) == expected);
    }
  }
}

TEST_CASE("the_simulator_plans_for_the_routing_of_a_run_what_the_engine_did") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  Machine machine = published_machine();
  machine.host.dram_bytes_per_s = machine.host.dram_with_h2d_bytes_per_s = 1e10;
  const ModelSpec spec = load_model_spec(Golden::model_dir());
  const StepProgrammer programmer(spec, 1, 1024);
  for (const PrefillOrder order : {PrefillOrder::chunk_major, PrefillOrder::layer_major})
    for (const int64_t slots : {6, 34, 60}) {
      CAPTURE(slots);
      const bool by_layers = order == PrefillOrder::layer_major;
      const ExpertCacheOptions cache = cache_of(slots, {300, 0}, 1);
      RemoteRig rig({.cache = cache, .chunk = kChunk, .prefill_group = by_layers ? kByLayers : kByChunks});
      // The ids as the engine read them: [chunks][layers] or [layers][chunks] blocks of the prompt, then decode steps.
      std::vector<std::vector<uint16_t>> blocks;
      rig.device(0).set_on_download([&](const Tensor& device, std::span<const std::byte> host) {
        if (device.dtype() != DType::i32) return;
        std::vector<int32_t> ids(static_cast<size_t>(device.elements()));
        std::memcpy(ids.data(), host.data(), host.size());
        blocks.emplace_back(ids.begin(), ids.end());
      });
      rig.run(prompt, kChain);
      const RoutingShape shape = programmer.routing_shape();
      const auto layers = static_cast<size_t>(shape.layers), chunks = (prompt.ids.size() + kChunk - 1) / kChunk;
      REQUIRE(blocks.size() == layers * (chunks + kChain));
      RoutingTrace trace(shape);
      std::vector<uint16_t> of_prompt;
      for (size_t layer = 0; layer < layers; ++layer)
        for (size_t chunk = 0; chunk < chunks; ++chunk) {
          const std::vector<uint16_t>& ids = blocks[by_layers ? layer * chunks + chunk : chunk * layers + layer];
          of_prompt.insert(of_prompt.end(), ids.begin(), ids.end());
        }
      trace.append(Phase::prefill, static_cast<int64_t>(prompt.ids.size()), of_prompt);
      for (size_t step = 0; step < kChain; ++step) {
        std::vector<uint16_t> ids;
        for (size_t layer = 0; layer < layers; ++layer) {
          const std::vector<uint16_t>& block = blocks[layers * (chunks + step) + layer];
          ids.insert(ids.end(), block.begin(), block.end());
        }
        trace.append(Phase::decode, 1, ids);
      }
      SimOptions options{.order = order, .chunk = kChunk};
      options.policy.slots = slots;
      options.policy.lookahead_layers = cache.lookahead_layers;
      options.policy.host_permille = cache.host_permille;
      const Simulation simulated = simulate(CostModel(machine, GemmMath::bf16, 1), programmer, options, trace);
      for (const Phase phase : {Phase::prefill, Phase::decode}) {
        const PolicyCounts engine = counts_of(rig.engine(), 0, phase);
        const PolicyCounts& other = (phase == Phase::prefill ? simulated.prefill : simulated.decode).counts;
        CHECK(engine.hits == other.hits);
        CHECK(engine.misses == other.misses);
        CHECK(engine.off_slab == other.off_slab);
        CHECK(engine.copies_lookahead == other.copies_lookahead);
        CHECK(engine.lookahead_used == other.lookahead_used);
      }
    }
}

TEST_CASE("residual_stacks_and_the_host_s_rows_are_counted_and_the_advice_names_their_flag") {
  EngineOptions options;
  options.model_dir = Golden::model_dir();
  options.context = 1024;
  options.chunk = kChunk;
  options.cache = cache_of(6, {500, 0});
  options.plan_only = true;
  cpu::CpuBackend backend(one_thread());
  const auto host = one_thread();
  const auto plan_of = [&](int64_t group) {
    options.prefill_group = group;
    Engine engine(options, Devices({&backend}, {}, {host.get()}));
    return std::pair(engine.memory(), engine.prefill_group());
  };
  const auto [one, one_group] = plan_of(kByChunks);
  CHECK(one_group == kByChunks);
  CHECK(one.stacks == 0);
  CHECK(one.staging > 0);
  const auto [automatic, automatic_group] = plan_of(0);
  CHECK(automatic_group == 4 * kChunk);
  const auto [odd, odd_group] = plan_of(50);
  CHECK(odd_group == 60);
  const auto [all, all_group] = plan_of(5000);
  CHECK(all_group == 1024);
  const ModelSpec spec = load_model_spec(Golden::model_dir());
  const int64_t row_bytes = spec.hyper.streams * spec.hidden * 2;
  CHECK(automatic.stacks >= 3 * kChunk * row_bytes);
  CHECK(all.stacks >= (1024 - kChunk) * row_bytes);
  CHECK(all.stacks < (1024 - kChunk) * row_bytes * 2);
  CHECK(all.workspace == one.workspace);
  int64_t table_row_bytes = 0;  // BF16, of all tables
  for (const LayerSpec& layer : spec.layers) table_row_bytes += layer.ngram ? layer.ngram->width * 2 : 0;
  CHECK(table_row_bytes > 0);
  CHECK(all.host_buffers - one.host_buffers == (1024 - kChunk) * table_row_bytes);
  CHECK(all.total() - one.total() == all.stacks + all.host_buffers - one.host_buffers);
  Engine engine(options, Devices({&backend}, {}, {host.get()}));
  for (const char* row : {"residual stacks", "experts on the CPU", "host buffers"})
    CHECK(engine.budget().table().find(row) != std::string::npos);
}

namespace {

EngineOptions options_of(const ExpertCacheOptions& cache) {
  EngineOptions options;
  options.model_dir = Golden::model_dir();
  options.context = 64;
  options.cache = cache;
  return options;
}

// That no engine comes of it, and why not.
void check_refused(const EngineOptions& options, const Devices& devices, ErrorCode code,
                   std::initializer_list<std::string_view> parts) {
  try {
    Engine engine(options, devices);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == code);
    for (const std::string_view part : parts) CHECK(error.message().find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("experts_on_the_host_are_refused_where_the_host_has_no_ops") {
  cpu::CpuBackend backend(one_thread());
  check_refused(options_of(cache_of(6, {500, 0})), backend, ErrorCode::usage, {"--cpu-experts"});
}

TEST_CASE("zero_copy_is_refused_where_the_device_cannot_read_the_hosts_memory") {
  RemoteDevice device({.reads_pinned_memory = false});
  CHECK(Engine(options_of(cache_of(6, {0, 0})), device).warnings().empty());
  check_refused(options_of(cache_of(6, {0, 500})), device, ErrorCode::usage,
                {"--zero-copy-experts: remote", "use off"});
}

TEST_CASE("a_plan_beyond_what_a_device_has_free_is_refused_before_it_loads") {
  RemoteDevice device({.free_bytes = 1 << 20});
  bool loads = false;
  EngineOptions options = options_of(cache_of(6, {0, 0}));
  options.vram_budget_bytes = int64_t{1} << 40;
  options.progress = [&](int64_t, int64_t) { loads = true; };
  check_refused(options, device, ErrorCode::resource,
                {"of remote, which has 1.00 MiB free", "lower --vram-budget, or stop"});
  CHECK_FALSE(loads);
  options.plan_only = true;  // shows the plan all the same
  CHECK(Engine(options, device).world() == 1);
}

TEST_CASE("zero_copy_is_refused_where_memory_cannot_be_page_locked") {
  cpu::CpuBackend backend(one_thread());
  Devices devices(backend);
  devices.pinning = {.pin = [](std::span<std::byte>) { return false; }, .unpin = [](std::span<std::byte>) {}};
  CHECK(Engine(options_of(cache_of(6, {0, 0})), devices).warnings().size() == 1);
  check_refused(options_of(cache_of(6, {0, 500})), devices, ErrorCode::resource,
                {"--zero-copy-experts", "pinning stopped"});
}

}  // namespace offload::placement_invariance_test
