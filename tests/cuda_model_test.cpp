// The model end to end on a CUDA device, on its own plans and on Turing's, against the published numbers and the CPU's.
// Skipped, with the reason, where there is no device.
#include <doctest/doctest.h>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cuda/cuda_backend.h"
#include "golden_run.h"

using namespace offload;

namespace {

constexpr double kLogitsAbsolute = 1e-3;     // FP32 arm against FP32 goldens
constexpr double kMarginThatDecides = 5e-3;  // greedy tokens must agree above this golden margin

bool no_device() {
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) MESSAGE("skipped: no CUDA device: ", devices.why_none);
  return devices.count == 0;
}

const std::vector<std::optional<int>> kPlans = {std::nullopt, 75};
constexpr ExpertCacheOptions kAllSlots{.slots = 256};  // 8 layers of 32 experts

std::unique_ptr<Backend> device(std::optional<int> force_sm) {
  return std::make_unique<cuda::CudaBackend>(0, force_sm);
}

std::string plan_name(std::optional<int> force_sm) {
  return force_sm ? "forced sm_75" : "native";
}

class CpuRun : public GoldenRun {
 public:
  explicit CpuRun(Arithmetic arithmetic)
      : GoldenRun(std::make_unique<cpu::CpuBackend>(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 2})),
                  arithmetic) {}
};

}  // namespace

TEST_CASE("fp32_arm_reproduces_the_published_logits_and_chains_on_a_device") {
  if (no_device()) return;
  const Golden golden;
  for (const std::optional<int> sm : kPlans) {
    CAPTURE(plan_name(sm));
    GoldenRun runner(device(sm), kFp32, {.cache = kAllSlots});
    const LogitDeviation found = deviation_from_golden(runner, golden);
    MESSAGE(plan_name(sm), ": largest logit deviation ", found.largest, ", argmaxes changed ", found.argmaxes_changed);
    CHECK(found.largest <= kLogitsAbsolute);
    const std::initializer_list<size_t> kPieces[] = {{4096}, {64}, {7, 1, 1, 13, 64, 44, 3, 5}};
    for (const GoldenPrompt& prompt : golden.prompts())
      for (const auto& pieces : kPieces) {
        CAPTURE(prompt.name);
        Sequence sequence = runner.engine().new_sequence();
        const std::vector<float> logits = feed_in_pieces(runner, sequence, prompt.ids, pieces);
        CHECK(forced_chain(runner, sequence, logits, prompt.fp32).largest_margin <= kMarginThatDecides);
      }
  }
}

TEST_CASE("bf16_arms_stay_within_the_noise_floor_of_plain_bf16_on_a_device") {
  if (no_device()) return;
  const Golden golden;
  CpuRun oracle(kFp32);
  for (const std::optional<int> sm : kPlans)
    for (const Arithmetic& arithmetic : {kReference, kFused}) {
      GoldenRun runner(device(sm), arithmetic, {.cache = kAllSlots});
      const NoiseFloor floor = noise_floor(runner, oracle, golden);
      MESSAGE(plan_name(sm), ", bf16 ",
              std::string(arithmetic.rounding == Rounding::reference ? "reference: " : "fused: "), floor.text());
      CHECK(floor.within());
    }
}

TEST_CASE("device_and_cpu_differ_in_bf16_by_no_more_than_two_summation_orders_do") {
  if (no_device()) return;
  const Golden golden;
  CpuRun on_cpu(kFused);
  GoldenRun on_device(device({}), kFused, {.cache = kAllSlots});
  double kl = 0, rows = 0, published = 0, largest = 0;
  const auto vocab = static_cast<size_t>(on_cpu.engine().spec().vocab);
  for (const GoldenPrompt& prompt : golden.prompts()) {
    Sequence a = on_cpu.engine().new_sequence(), b = on_device.engine().new_sequence();
    const std::vector<float> expected = on_cpu.all_logits(a, prompt.ids), found = on_device.all_logits(b, prompt.ids);
    for (size_t r = 0; r < prompt.ids.size(); ++r)
      kl += kl_divergence(row_of(expected, r, vocab), row_of(found, r, vocab));
    largest = std::max(largest, max_difference(expected, found));
    rows += static_cast<double>(prompt.ids.size());
    published += prompt.bf16_mean_kl * static_cast<double>(prompt.ids.size());
  }
  MESSAGE("BF16, device against CPU: mean KL ", kl / rows, ", largest logit difference ", largest);
  CHECK(kl <= 2 * published);  // each is within 1.25 x of FP32; two such may lie on opposite sides
}

TEST_CASE("slots_policy_look_ahead_and_repetition_change_no_bit_on_a_device") {
  if (no_device()) return;
  const Golden golden;
  const GoldenPrompt& prompt = golden.prompts()[5];
  const auto run = [&](GoldenRun& runner) {
    Sequence sequence = runner.engine().new_sequence();
    std::vector<float> logits = runner.all_logits(sequence, prompt.ids);
    for (size_t i = 0; i < 24; ++i) {
      const std::vector<float> next = runner.last_logits(sequence, std::span(prompt.fp32.tokens).subspan(i, 1));
      logits.insert(logits.end(), next.begin(), next.end());
    }
    return logits;
  };
  for (const std::optional<int> sm : kPlans) {
    GoldenRun all(device(sm), kFused, {.chunk = 64, .cache = kAllSlots});
    const std::vector<float> expected = run(all);
    CHECK(run(all) == expected);
    for (const int64_t slots : {1, 4, 11, 32, 100})
      for (const PolicyKind policy : {PolicyKind::lru, PolicyKind::adaptive})
        for (const int lookahead : {0, 2}) {
          CAPTURE(slots);
          GoldenRun runner(device(sm), kFused,
                           {.chunk = 64, .cache = {.slots = slots, .policy = policy, .lookahead_layers = lookahead}});
          CHECK(run(runner) == expected);
        }
  }
}
