// Where an expert's bytes are and when they move changes no bit: slots, policy, look-ahead, shard form and ranks.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>

#include "rank_rig.h"
#include "stored_model.h"

namespace offload::residency_invariance_test {

namespace {

// Computes as CpuOps does, but for one block of the `nth` selection (1, 2, ...) that leaves out other blocks.
class TamperingOps final : public Ops {
 public:
  explicit TamperingOps(int nth) : until_(nth) {}

 private:
#define OFL_FORWARD_OP(Args, name)                         \
  void execute(const Args& args) override {                \
    inner_.set_scratch(scratch());                         \
    inner_(args);                                          \
    tamper(args);                                          \
  }                                                        \
  int64_t scratch_bytes(const Args& args) const override { \
    inner_.set_planning(true);                             \
    inner_(args);                                          \
    inner_.set_planning(false);                            \
    return inner_.scratch_peak_bytes();                    \
  }
  OFL_FOR_EACH_OP(OFL_FORWARD_OP)
#undef OFL_FORWARD_OP
  template <typename Args>
  void tamper(const Args&) {}
  // The first block behind a gap moves into it, in the last row.
  void tamper(const BlockTopkArgs& args) {
    const int64_t row = args.blocks.dim(0) - 1;
    int32_t* blocks = args.blocks.as<int32_t>() + row * args.blocks.dim(1);
    for (int32_t i = 0; i < args.counts.as<int32_t>()[row]; ++i) {
      if (blocks[i] == i) continue;
      if (--until_ == 0) --blocks[i];
      return;
    }
  }

  mutable cpu::CpuOps inner_{cpu::CpuOpsOptions{.threads = 1}};
  int until_;
};

constexpr size_t kChain = 24;
// Ranks sum partial products in FP32, so that the arms differ from one rank's by the order of the sums alone.
constexpr double kRanksAbsolute = 5e-4;

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  return worst;
}

}  // namespace

TEST_CASE("slots_policy_and_look_ahead_change_no_bit") {
  const Golden golden;
  const std::vector<float> expected = Rig({}).run(long_chinese(golden), kChain);
  // 8 layers of 32 experts, 4 per token: one slot, one row's worth, a few, a layer's, more than all.
  for (const int64_t slots : {1, 4, 11, 32, 100, 300})
    for (const PolicyKind policy : {PolicyKind::lru, PolicyKind::adaptive})
      for (const int lookahead : {0, 1, 2}) {
        CAPTURE(slots);
        CAPTURE(lookahead);
        Rig rig({.cache = {.slots = slots, .policy = policy, .lookahead_layers = lookahead}});
        CHECK(rig.run(long_chinese(golden), kChain) == expected);
        const ExpertPolicy& used = *rig.engine().rank(0).executor().policy();
        if (slots == 300) CHECK(used.counts(Phase::decode).hits > used.counts(Phase::decode).misses);
      }
}

TEST_CASE("a_dawdling_copy_lane_changes_no_bit") {
  const Golden golden;
  const std::vector<float> expected = Rig({}).run(golden.prompts().front(), kChain);
  std::atomic<int> copies = 0;
  Rig rig({.cache = {.slots = 6, .lookahead_layers = 2}}, [&](cpu::CpuBackend& backend, int) {
    backend.lanes().set_before_copy([&] {
      if (++copies % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    });
  });
  CHECK(rig.run(golden.prompts().front(), kChain) == expected);
  CHECK(copies > 0);
}

TEST_CASE("ranks_agree_with_one_rank_and_with_the_published_numbers_and_repeat_their_own_bits") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  const Arithmetic fp32{DType::f32, Rounding::fused};
  const std::vector<float> one = Rig({.arithmetic = fp32}).run(prompt, kChain);
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice})
    for (const int ranks : {2, 4}) {
      CAPTURE(ranks);
      Rig rig({.ranks = ranks, .shard = shard, .arithmetic = fp32});
      const std::vector<float> logits = rig.run(prompt, kChain);
      CHECK(largest_difference(logits, one) <= kRanksAbsolute);
      CHECK(rig.run(prompt, kChain) == logits);
      const GoldenTensor last = golden.tensor(prompt.name + ".last_logits_fp32");
      const auto vocab = static_cast<size_t>(last.columns);
      for (int64_t i = 0; i < 4; ++i)
        for (size_t v = 0; v < vocab; ++v)
          REQUIRE(std::abs(logits[(prompt.ids.size() - 4 + static_cast<size_t>(i)) * vocab + v] - last.row(i)[v]) <=
                  kRanksAbsolute);
    }
}

TEST_CASE("chunks_that_pass_in_halves_have_the_bits_of_chunks_of_that_size") {
  const Golden golden;
  GoldenPrompt prompt = long_chinese(golden);
  prompt.ids.resize(96);  // 64 and 32: the first is halved, the last is not
  const auto halve = [](EngineOptions& options) { options.overlap_rows_min = 40; };
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice})
    for (const int ranks : {2, 4})
      for (const int64_t slots : {0, 2, 40, 300})
        for (const int64_t group : {0, 96}) {
          CAPTURE(ranks);
          CAPTURE(slots);
          CAPTURE(group);
          World whole{.ranks = ranks, .shard = shard, .cache = {.slots = slots}, .chunk = 32};
          World halves{.ranks = ranks, .shard = shard, .cache = {.slots = slots}, .chunk = 64, .prefill_group = group};
          halves.edit = halve;
          const std::vector<float> expected = Rig(whole).run(prompt, 4);
          CHECK(Rig(halves).run(prompt, 4) == expected);
          if (ranks == 2) CHECK(RemoteRig(halves).run(prompt, 4) == expected);
        }
}

TEST_CASE("taps_see_each_half_of_each_layer_in_order") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  Rig rig({.ranks = 2, .edit = [](EngineOptions& options) { options.overlap_rows_min = 16; }});
  Sequence sequence = rig.engine().new_sequence();
  std::vector<std::pair<size_t, int64_t>> seen;
  rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::none, {},
                    [&](size_t layer, const Tensor& stack) { seen.emplace_back(layer, stack.dim(0)); });
  std::vector<std::pair<size_t, int64_t>> expected;
  for (const auto& [first, second] : {std::pair<int64_t, int64_t>{32, 32}, {24, 18}})
    for (size_t layer = 0; layer < 8; ++layer) {
      expected.emplace_back(layer, first);
      expected.emplace_back(layer, second);
    }
  CHECK(seen == expected);
}

TEST_CASE("caches_of_ranks_change_no_bit_of_their_world") {
  const Golden golden;
  for (const ShardForm shard : {ShardForm::expert, ShardForm::slice}) {
    const std::vector<float> expected = Rig({.ranks = 2, .shard = shard}).run(golden.prompts().front(), kChain);
    for (const int64_t slots : {2, 40}) {
      Rig rig({.ranks = 2, .shard = shard, .cache = {.slots = slots}});
      CHECK(rig.run(golden.prompts().front(), kChain) == expected);
    }
  }
}

TEST_CASE("a_copy_that_fails_ends_the_feed_with_its_own_error_on_every_world_and_hangs_nothing") {
  const Golden golden;
  for (const int ranks : {1, 2, 4}) {
    for (const int nth : {1, 2, 50}) {
      std::atomic<int> copies = 0;
      Rig rig({.ranks = ranks, .cache = {.slots = 6}}, [&](cpu::CpuBackend& backend, int rank) {
        if (rank != ranks - 1) return;
        backend.lanes().set_before_copy([&] {
          if (++copies == nth) throw Error(ErrorCode::device, "the link broke");
        });
      });
      try {
        rig.run(golden.prompts().front(), 4);
        FAIL("no error");
      } catch (const Error& error) {
        CHECK(error.message() == "the link broke");
      }
      // The device is lost: every later step says so again instead of computing on what did not arrive.
      CHECK_THROWS_AS(rig.run(golden.prompts().front(), 1), Error);
    }
  }
}

TEST_CASE("an_allocation_that_fails_ends_the_load_or_the_sequence_with_its_own_error") {
  const Golden golden;
  for (const int ranks : {1, 2}) {
    int nth = 1, failures = 0;
    for (bool passed = false; !passed; ++nth) {
      int allocations = 0;
      try {
        Rig rig({.ranks = ranks, .cache = {.slots = 6}}, {}, [&](cpu::CpuBackend& backend, int) {
          backend.set_before_allocate([&] {
            if (++allocations == nth) throw Error(ErrorCode::resource, "no memory");
          });
        });
        rig.run(golden.prompts().front(), 1);
        passed = true;
      } catch (const Error& error) {
        CHECK(error.message() == "no memory");
        ++failures;
      }
      REQUIRE(nth < 100);
    }
    CHECK(failures == ranks * 6 + 1);  // weights, workspace, op scratch, expert slots, n-gram rows; then the sequence
  }
}

TEST_CASE("steps_take_no_device_memory_after_the_load") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  for (const int ranks : {1, 2})
    for (const int64_t slots : {0, 6, 300}) {
      int allocations = 0;
      Rig rig({.ranks = ranks, .cache = {.slots = slots}, .chunk = 20},
              [&](cpu::CpuBackend& backend, int) { backend.set_before_allocate([&] { ++allocations; }); });
      Sequence sequence = rig.engine().new_sequence();
      CHECK(allocations == ranks);  // the hook works
      const auto ignore = [](int64_t, std::span<const float>) {};
      rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::all, ignore);
      for (size_t i = 0; i < 4; ++i)
        rig.engine().feed(sequence, std::span(prompt.fp32.tokens).subspan(i, 1), Engine::LogitRows::last, ignore);
      CHECK(allocations == ranks);
    }
}

TEST_CASE("an_interrupted_step_leaves_a_world_that_can_start_again") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts().front();
  Rig rig({.ranks = 2, .cache = {.slots = 20}});
  const std::vector<float> expected = rig.run(prompt, 4);
  Sequence sequence = rig.engine().new_sequence();
  const auto ignore = [](int64_t, std::span<const float>) {};
  const auto stop_at_layer_3 = [](size_t layer, const Tensor&) {
    if (layer == 3) throw Error(ErrorCode::interrupted, "interrupted");
  };
  CHECK_THROWS_AS(rig.engine().feed(sequence, prompt.ids, Engine::LogitRows::last, ignore, stop_at_layer_3), Error);
  CHECK(rig.run(prompt, 4) == expected);
}

TEST_CASE("worlds_that_the_model_cannot_be_split_over_are_refused_with_those_that_it_can") {
  try {
    Rig rig({.ranks = 3});
    FAIL("three ranks were accepted");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    for (const char* part : {"--tp 3", "4 query heads", "1, 2, 4"})
      CHECK(error.message().find(part) != std::string::npos);
  }
}

TEST_CASE("ranks_select_the_same_blocks_and_one_that_selects_another_is_found_where_ranks_are_verified") {
  const Golden golden;
  const GoldenPrompt& prompt = long_chinese(golden);
  const auto verify = [](EngineOptions& options) { options.verify_ranks = true; };
  for (const int ranks : {2, 4}) {
    CAPTURE(ranks);
    const std::vector<float> expected = Rig({.ranks = ranks}).run(prompt, kChain);
    CHECK(Rig({.ranks = ranks, .edit = verify}).run(prompt, kChain) == expected);
    for (const int selection : {1, 2, 9}) {
      const auto tampering = [&](int rank) -> std::unique_ptr<Ops> {
        if (rank == ranks - 1) return std::make_unique<TamperingOps>(selection);
        return one_thread();
      };
      const World tampered{.ranks = ranks, .ops = tampering};
      // Every rank adds up the same wrong sum and routes alike: nothing else would notice.
      CHECK(Rig(tampered).run(prompt, kChain) != expected);
      World verified = tampered;
      verified.edit = verify;
      try {
        Rig(verified).run(prompt, kChain);
        FAIL("no error");
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::internal);
        CHECK(error.message().find("selected different blocks") != std::string::npos);
      }
    }
  }
  CHECK(Rig({.edit = verify}).run(prompt, 2) == Rig({}).run(prompt, 2));  // one rank has nobody to agree with
}

namespace {

// What a process holds that a failed load could leave behind.
int64_t entries_of(const char* folder) {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}
int64_t mapped_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE("a_read_that_fails_ends_the_load_with_one_line_that_names_the_file_and_leaves_nothing") {
  // Headers, hash constants, dense weights, the table and the experts, of the first four layers: both mixers and the
  // n-gram embedding.
  StoredModel model = StoredModel::demo();
  model.config["num_hidden_layers"] = 4;
  Json& mixers = model.config["layer_types"];
  mixers.erase(mixers.begin() + 4, mixers.end());
  std::erase_if(model.tensors, [](const auto& tensor) {
    for (const char* layer : {"layers.4.", "layers.5.", "layers.6.", "layers.7."})
      if (tensor.first.find(layer) != std::string::npos) return true;
    return false;
  });
  const StoredFolder folder;
  model.write(folder, 3);
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    std::set<std::string> kinds;
    int64_t files = 0, threads = 0, bytes = 0;
    int failures = 0;
    // Two ranks read their columns of a matrix row by row, in thousands of reads: there every seventh, after a while.
    for (int nth = 1;; nth += ranks == 1 || nth < 100 ? 1 : 7) {
      std::atomic<int> reads = 0;
      const auto edit = [&](EngineOptions& options) {
        options.model_dir = folder.path();
        options.load_threads = 2;
        options.read_fault = [&] { return ++reads == nth ? EIO : 0; };
      };
      try {
        Rig rig({.ranks = ranks, .cache = {.slots = 6}, .edit = edit});
        CHECK(reads < nth);  // the whole load passed
        const std::vector<int32_t> prompt{1, 2, 3};
        Sequence sequence = rig.engine().new_sequence();
        rig.engine().feed(sequence, prompt, Engine::LogitRows::none, {});
        break;
      } catch (const Error& error) {
        ++failures;
        CAPTURE(error.message());
        CHECK(error.code() == ErrorCode::input);
        CHECK(error.message().find("model") != std::string::npos);
        CHECK(error.message().find("Input/output error") != std::string::npos);
        CHECK(error.message().find('\n') == std::string::npos);
        for (const char* kind : {"experts", "ngram_embedding.shard", "layer_multipliers", "embed_tokens", "lm_head",
                                 "self_attn", "index.json: "})
          if (error.message().find(kind) != std::string::npos) kinds.insert(kind);
      }
      if (nth == 10)
        files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task"), bytes = mapped_bytes();
      REQUIRE(nth < 5000);
    }
    CHECK(kinds.size() == 7);
    CHECK(failures > 100);
    CHECK(entries_of("/proc/self/fd") == files);
    CHECK(entries_of("/proc/self/task") == threads);
    CHECK(mapped_bytes() - bytes < 64 << 20);  // one load takes 7 MiB and more
    MESSAGE("failed reads with " << ranks << " ranks: " << failures);
  }
}

}  // namespace offload::residency_invariance_test
