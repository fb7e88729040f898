// The model end to end against the published implementation's numbers on the demo checkpoint.
#include <doctest/doctest.h>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "golden_run.h"

namespace offload::model_golden_test {

namespace {

constexpr double kLogitsAbsolute = 5e-4;     // FP32 arm against FP32 goldens
constexpr double kHiddenOfScale = 1e-4;      // of the stack's largest magnitude
constexpr double kMarginThatDecides = 1e-3;  // greedy tokens must agree above this golden margin

std::unique_ptr<Ops> make_ops(int threads) {
  return std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = threads});
}

class Runner : public GoldenRun {
 public:
  explicit Runner(Arithmetic arithmetic, int64_t chunk = 2048, int threads = 1)
      : GoldenRun(std::make_unique<cpu::CpuBackend>(make_ops(threads)), arithmetic, {.chunk = chunk}) {}
};

}  // namespace

TEST_CASE("fp32_arm_reproduces_the_published_logits_and_argmaxes_of_all_prompts") {
  const Golden golden;
  Runner runner(kFp32);
  const LogitDeviation found = deviation_from_golden(runner, golden);
  CHECK(found.largest <= kLogitsAbsolute);
  CHECK(found.argmaxes_changed == 0);
  MESSAGE("largest logit deviation ", found.largest);
}

TEST_CASE("fp32_arm_reproduces_the_published_stack_after_every_layer") {
  const Golden golden;
  Runner runner(kFp32);
  const GoldenPrompt& prompt = golden.prompts().front();
  REQUIRE(prompt.name == "english");
  Sequence sequence = runner.engine().new_sequence();
  size_t layers_seen = 0;
  runner.all_logits(sequence, prompt.ids, [&](size_t layer, const Tensor& stack) {
    ++layers_seen;
    // Entry i + 1 of the published stacks is the output of layer i; the last entry is the final mixer's output instead.
    if (layer + 1 >= runner.engine().spec().layers.size()) return;
    const GoldenTensor expected = golden.tensor(fmt::format("english.hidden_fp32.{}", layer + 1));
    double scale = 0;
    for (const float v : expected.values) scale = std::max(scale, std::abs(double{v}));
    CHECK(max_difference({stack.as<float>(), static_cast<size_t>(stack.elements())}, expected.values) <=
          kHiddenOfScale * scale);
  });
  CHECK(layers_seen == runner.engine().spec().layers.size());
}

TEST_CASE("fp32_greedy_chains_equal_the_published_ones_for_every_chunking_of_the_prompt") {
  const Golden golden;
  Runner runner(kFp32);
  const std::initializer_list<size_t> kPieces[] = {{4096}, {1}, {7}, {64}, {100}, {7, 1, 1, 13, 64, 44, 3, 5}};
  for (const GoldenPrompt& prompt : golden.prompts()) {
    for (const auto& pieces : kPieces) {
      CAPTURE(prompt.name);
      CAPTURE(*pieces.begin());
      Sequence sequence = runner.engine().new_sequence();
      const std::vector<float> logits = feed_in_pieces(runner, sequence, prompt.ids, pieces);
      const Flips flips = forced_chain(runner, sequence, logits, prompt.fp32);
      CHECK(flips.largest_margin <= kMarginThatDecides);
    }
  }
}

TEST_CASE("prompt_chunking_moves_no_fp32_logit_by_more_than_the_tolerance") {
  const Golden golden;
  Runner runner(kFp32);
  for (const GoldenPrompt& prompt : golden.prompts()) {
    CAPTURE(prompt.name);
    Sequence whole = runner.engine().new_sequence();
    const std::vector<float> expected = runner.last_logits(whole, prompt.ids);
    for (const std::initializer_list<size_t>& pieces : {std::initializer_list<size_t>{1}, {7}, {64}, {5, 2, 130, 1}}) {
      Sequence sequence = runner.engine().new_sequence();
      CHECK(max_difference(feed_in_pieces(runner, sequence, prompt.ids, pieces), expected) <= kLogitsAbsolute);
    }
  }
}

TEST_CASE("bf16_arms_stay_within_the_noise_floor_of_plain_bf16") {
  const Golden golden;
  Runner oracle(kFp32);
  for (const Arithmetic& arithmetic : {kReference, kFused}) {
    Runner runner(arithmetic);
    const NoiseFloor floor = noise_floor(runner, oracle, golden);
    MESSAGE("bf16 ", std::string(arithmetic.rounding == Rounding::reference ? "reference: " : "fused: "), floor.text());
    CHECK(floor.within());
  }
}

TEST_CASE("logits_have_the_same_bits_on_repeat_and_for_one_and_two_threads") {
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts()[5];
  REQUIRE(prompt.name == "long_chinese");
  for (const Arithmetic& arithmetic : {kFp32, kReference, kFused}) {
    Runner one(arithmetic, 64, 1), two(arithmetic, 64, 2);
    Sequence a = one.engine().new_sequence(), b = one.engine().new_sequence(), c = two.engine().new_sequence();
    const std::vector<float> first = one.all_logits(a, prompt.ids);
    CHECK(one.all_logits(b, prompt.ids) == first);
    CHECK(two.all_logits(c, prompt.ids) == first);
    a.reset();
    CHECK(one.all_logits(a, prompt.ids) == first);
  }
}

TEST_CASE("what_is_planned_for_the_contexts_end_is_enough_for_every_shorter_step_and_any_thread_count") {
  const Golden golden;
  const std::vector<int32_t>& ids = golden.prompts()[5].ids;
  for (const int threads : {1, 16}) {
    Runner runner(kFused, 64, threads);
    for (const size_t rows : {size_t{1}, size_t{8}, size_t{9}, size_t{13}, size_t{20}, size_t{63}, size_t{64}}) {
      Sequence sequence = runner.engine().new_sequence();
      CHECK(!runner.last_logits(sequence, std::span(ids).first(rows)).empty());
    }
  }
}

}  // namespace offload::model_golden_test
