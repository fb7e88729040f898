// The model end to end over ranks on CUDA devices, shared and not, against the published numbers and one rank's.
// Skipped, with the reason, where there is no device.
#include <chrono>

#include "cuda_group.h"
#include "golden_chain.h"

using namespace offload;

namespace {

constexpr size_t kChain = 24;
constexpr double kLogitsAbsolute = 1e-3;     // FP32 arm against FP32 goldens
constexpr double kRanksAbsolute = 5e-4;      // ranks sum partial products in FP32, in another order than one rank
constexpr double kMarginThatDecides = 5e-3;  // greedy tokens must agree above this golden margin
constexpr Arithmetic kFp32{DType::f32, Rounding::fused};
constexpr Arithmetic kFused{DType::bf16, Rounding::fused};

struct RigOptions {
  ShardForm shard = ShardForm::expert;
  Arithmetic arithmetic = kFp32;
  ExpertCacheOptions cache{.slots = 256};  // 8 layers of 32 experts
  cuda::GroupOptions group{.measure = false};
  std::optional<int> force_sm = {};
  std::function<void(EngineOptions&)> edit = {};
};

class CudaRig {
 public:
  CudaRig(const Layout& layout, const RigOptions& rig) : group_(layout, rig.group, rig.force_sm) {
    EngineOptions options;
    options.model_dir = Golden::model_dir();
    options.context = 1024;
    options.chunk = 64;
    options.load_threads = 2;
    options.shard = rig.shard;
    options.cache = rig.cache;
    options.arithmetic = rig.arithmetic;
    options.verify_ranks = true;
    if (rig.edit) rig.edit(options);
    std::vector<Backend*> backends;
    std::vector<Collective*> ends;
    for (int rank = 0; rank < group_.world(); ++rank) {
      backends.push_back(&group_.backend(rank));
      ends.push_back(&group_.end(rank));
    }
    Devices devices(backends, group_.world() > 1 ? ends : std::vector<Collective*>());
    devices.pinning = {.pin = cuda::pin_host_memory, .unpin = cuda::unpin_host_memory};
    engine_ = std::make_unique<Engine>(options, devices);
  }

  Engine& engine() { return *engine_; }

  std::vector<float> run(const GoldenPrompt& prompt, size_t chain_tokens) {
    return chain_logits(*engine_, prompt, chain_tokens);
  }

 private:
  CudaGroup group_;
  std::unique_ptr<Engine> engine_;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  return worst;
}

// Tokens of the forced chain that another decision than the golden's would have changed, above the margin.
int changed_decisions(const std::vector<float>& logits, const GoldenPrompt& prompt, size_t vocab) {
  int changed = 0;
  for (size_t i = 0; i < kChain; ++i) {
    const auto row = std::span(logits).subspan((prompt.ids.size() - 1 + i) * vocab, vocab);
    if (argmax(row) != static_cast<size_t>(prompt.fp32.tokens[i]) && prompt.fp32.margins[i] > kMarginThatDecides)
      ++changed;
  }
  return changed;
}

}  // namespace

TEST_CASE("ranks_on_devices_agree_with_one_rank_and_the_published_numbers_and_repeat_their_own_bits") {
  const std::vector<Layout> all = layouts();
  if (all.empty()) return;
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  const std::vector<float> one = CudaRig({0}, {}).run(prompt, kChain);
  for (const Layout& layout : all) {
    if (layout.size() > 4) continue;  // the demo has four query heads
    for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
      CAPTURE(layout_text(layout));
      CAPTURE((shard == ShardForm::slice));
      CudaRig rig(layout, {.shard = shard});
      const std::vector<float> logits = rig.run(prompt, kChain);
      const double difference = largest_difference(logits, one);
      MESSAGE(layout_text(layout), ": largest difference to one rank ", difference);
      CHECK(difference <= kRanksAbsolute);
      CHECK(rig.run(prompt, kChain) == logits);
      const GoldenTensor last = golden.tensor(prompt.name + ".last_logits_fp32");
      const auto vocab = static_cast<size_t>(last.columns);
      CHECK(changed_decisions(logits, prompt, vocab) == 0);
      double worst = 0;
      for (int64_t i = 0; i < 4; ++i)
        for (size_t v = 0; v < vocab; ++v)
          worst = std::max(
              worst,
              std::abs(double{logits[(prompt.ids.size() - 4 + static_cast<size_t>(i)) * vocab + v]} - last.row(i)[v]));
      CHECK(worst <= kLogitsAbsolute);
    }
  }
}

TEST_CASE("the_way_that_sums_travel_the_slots_and_the_look_ahead_of_ranks_change_no_bit_of_their_world") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();
  for (const Layout& layout : layouts()) {
    if (layout.size() > 4) continue;
    for (const std::optional<int> sm : {std::optional<int>(), std::optional<int>(75)})
      for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
        CAPTURE(layout_text(layout));
        const RigOptions base{.shard = shard, .arithmetic = kFused, .force_sm = sm};
        const std::vector<float> expected = CudaRig(layout, base).run(prompt, kChain);
        for (const int64_t slots : {2, 40}) {
          RigOptions few = base;
          few.cache = {.slots = slots, .lookahead_layers = 2};
          CHECK(CudaRig(layout, few).run(prompt, kChain) == expected);
        }
        RigOptions by_host = base;
        by_host.group.prove_path = [](int, int) { return cuda::PeerPath{cuda::Reach::absent, "left out"}; };
        CHECK(CudaRig(layout, by_host).run(prompt, kChain) == expected);
        for (const cuda::GroupWay way : {cuda::GroupWay::ordered, cuda::GroupWay::nccl}) {
          RigOptions other = base;
          other.group.only = way;
          CHECK(CudaRig(layout, other).run(prompt, kChain) == expected);
        }
      }
  }
}

TEST_CASE("ranks_whose_devices_route_alone_give_the_bits_of_ranks_whose_hosts_look") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();
  for (const Layout& layout : layouts()) {
    if (layout.size() > 4) continue;
    for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
      CAPTURE(layout_text(layout));
      CAPTURE((shard == ShardForm::slice));
      RigOptions looking{.shard = shard, .arithmetic = kFused}, alone = looking;
      alone.edit = [](EngineOptions& options) { options.verify_ranks = false; };
      const std::vector<float> expected = CudaRig(layout, looking).run(prompt, kChain);
      CudaRig rig(layout, alone);
      const auto is_complete = [&] {
        for (int rank = 0; rank < rig.engine().world(); ++rank)
          if (!rig.engine().rank(rank).executor().policy()->is_complete()) return false;
        return true;
      };
      for (const GoldenPrompt& each : golden.prompts())
        if (!is_complete()) CHECK_FALSE(rig.run(each, 3).empty());
      REQUIRE(is_complete());
      for (int i = 0; i < 2; ++i) {
        const auto hits = rig.engine().rank(0).executor().policy()->counts(Phase::decode).hits;
        CHECK(rig.run(prompt, kChain) == expected);
        // What the device routes is not counted.
        CHECK(rig.engine().rank(0).executor().policy()->counts(Phase::decode).hits == hits);
      }
    }
  }
}

TEST_CASE("chunks_in_halves_on_devices_agree_with_whole_ones_repeat_their_bits_and_are_the_same_by_every_way") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  for (const Layout& layout : layouts()) {
    if (layout.size() > 4) continue;
    for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
      CAPTURE(layout_text(layout));
      RigOptions whole{.shard = shard}, halves = whole;
      halves.edit = [](EngineOptions& options) { options.overlap_rows_min = 16; };
      CudaRig rig(layout, halves);
      const std::vector<float> logits = rig.run(prompt, kChain);
      CHECK(largest_difference(logits, CudaRig(layout, whole).run(prompt, kChain)) <= kRanksAbsolute);
      CHECK(rig.run(prompt, kChain) == logits);
      RigOptions ordered = halves;
      ordered.group.only = cuda::GroupWay::ordered;
      ordered.cache = {.slots = 40, .lookahead_layers = 2};
      CHECK(CudaRig(layout, ordered).run(prompt, kChain) == logits);
    }
  }
}

TEST_CASE("the_largest_logits_found_on_the_devices_are_those_of_the_row") {
  std::vector<Layout> all = layouts();
  if (all.empty()) return;
  all.push_back({0});
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();
  for (const Layout& layout : all) {
    if (layout.size() > 4) continue;
    CAPTURE(layout_text(layout));
    CudaRig rig(layout, {});
    Sequence sequence = rig.engine().new_sequence();
    rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::none, {});
    for (int i = 0; i < 16; ++i) {
      const std::span<const Logit> found = rig.engine().largest_logits(i % 2 == 0 ? 1 : 32);
      REQUIRE(!found.empty());
      rig.engine().last_logits([&](int64_t, std::span<const float> logits) {
        std::vector<Logit> expected(i % 2 == 0 ? 1 : 32);
        REQUIRE(largest_logits(logits, expected));
        CHECK(std::equal(found.begin(), found.end(), expected.begin(), expected.end(),
                         [](const Logit& a, const Logit& b) { return a.id == b.id && a.value == b.value; }));
      });
      rig.engine().feed(sequence, std::span(&found.front().id, 1), Engine::LogitRows::none, {});
    }
  }
}

TEST_CASE("an_interrupted_step_on_devices_leaves_a_world_that_can_start_again") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();
  for (const Layout& layout : layouts()) {
    if (layout.size() > 4) continue;
    CAPTURE(layout_text(layout));
    CudaRig rig(layout, {.cache = {.slots = 20}});
    const std::vector<float> expected = rig.run(prompt, 4);
    const auto ignore = [](int64_t, std::span<const float>) {};
    for (const size_t stop : {0, 3, 7}) {
      const auto begin = std::chrono::steady_clock::now();
      Sequence sequence = rig.engine().new_sequence();
      const auto interrupt = [&](size_t layer, const Tensor&) {
        if (layer == stop) throw Error(ErrorCode::interrupted, "interrupted");
      };
      try {
        rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::last, ignore, interrupt);
        FAIL("no error");
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::interrupted);
      }
      CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < 5.0);
      CHECK(rig.run(prompt, 4) == expected);
    }
  }
}

TEST_CASE("ranks_that_share_a_device_share_its_memory_and_a_plan_beyond_it_is_refused") {
  const std::vector<Layout> all = layouts();
  if (all.empty()) return;
  cuda::CudaBackend alone(0), shared(0, {}, 4);
  CHECK(std::abs(static_cast<double>(*alone.free_bytes()) / 4 - static_cast<double>(*shared.free_bytes())) <
        0.1 * static_cast<double>(*alone.free_bytes()));
  try {
    CudaRig rig(all.front(), {.edit = [](EngineOptions& options) { options.vram_budget_bytes = 4 << 20; }});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resource);
    CHECK(error.message().find("--vram-budget") != std::string::npos);
  }
}
