// The twin of very different magnitudes: BF16 has the same bits on it, FP16 needs its rows scaled.
#include "offload/range_stress.h"

#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>

#include "golden.h"
#include "model_runner.h"
#include "offload/parity.h"
#include "stored_model.h"

namespace offload::range_stress_test {

namespace {

constexpr Arithmetic kBf16{DType::bf16, Rounding::fused};

Arithmetic with_math(std::initializer_list<Site> sites, Math math) {
  Arithmetic arithmetic = kBf16;
  for (const Site site : sites) arithmetic.rules.add({.site = site, .rows_min = 9, .math = math});
  return arithmetic;
}
Arithmetic everywhere(Math math) {
  return with_math({Site::dense, Site::hyper_connection, Site::experts}, math);
}

// The demo, and the demo stressed.
class Twins {
 public:
  Twins() {
    std::filesystem::copy(original(), twin());
    counts = stress_in_place(twin(), {});
  }
  static std::string original() { return Golden::model_dir(); }
  std::string twin() const { return folder_.file("twin"); }

  RangeStressCounts counts;

 private:
  StoredFolder folder_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Rows of all prompts of the goldens. At the level that every machine runs, so that the noise that the test compares is
// the same everywhere.
std::vector<std::vector<float>> all_logits(const std::string& model_dir, const Arithmetic& arithmetic) {
  ModelRunner runner(model_dir, arithmetic, 512, 1024, cpu::Isa::portable);
  const Golden golden;
  std::vector<std::vector<float>> out;
  for (const GoldenPrompt& prompt : golden.prompts()) out.push_back(runner.logits(prompt.ids));
  return out;
}

LogitComparison compare(const std::vector<std::vector<float>>& baseline,
                        const std::vector<std::vector<float>>& candidate) {
  LogitComparison sum;
  constexpr size_t kVocab = 4096;
  for (size_t p = 0; p < baseline.size(); ++p)
    for (size_t at = 0; at < baseline[p].size(); at += kVocab)
      sum.add(static_cast<int64_t>(at / kVocab), std::span(baseline[p]).subspan(at, kVocab),
              std::span(candidate[p]).subspan(at, kVocab));
  return sum;
}

std::string text_of(const LogitComparison& c) {
  return fmt::format("{} flips, largest margin {:.3g}, mean KL {:.3g}, {} rows not finite", c.flips(),
                     c.largest_margin(), c.mean_kl(), c.rows_not_finite());
}

}  // namespace

TEST_CASE("the_twin_has_other_weights_and_the_same_bf16_bits_and_only_scaled_fp16_keeps_them_apart_from_noise") {
  const Twins twins;
  // 8 layers of 32 experts and a shared one with 32 channels each; two layers of attention with 2 x 64.
  CHECK(twins.counts.channels == 8 * 33 * 32 + 2 * 128);
  CHECK(twins.counts.channels_kept == 0);
  const std::vector<std::vector<float>> plain = all_logits(Twins::original(), kBf16);
  const std::vector<std::vector<float>> plain_twin = all_logits(twins.twin(), kBf16);
  REQUIRE(plain.size() == 7);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(same_bits(plain[i], plain_twin[i]));

  const LogitComparison control = compare(plain, all_logits(Twins::original(), everywhere(Math::reordered)));
  MESSAGE("control: ", text_of(control));
  CHECK(control.flips() > 0);
  for (const Site site : {Site::experts, Site::dense}) {
    const Arithmetic fp16 = with_math({site}, Math::fp16);
    const LogitComparison original = compare(plain, all_logits(Twins::original(), fp16));
    const LogitComparison twin = compare(plain, all_logits(twins.twin(), fp16));
    MESSAGE("plain FP16, ", std::string(site_name(site)), ": ", text_of(original), "; on the twin ", text_of(twin));
    CHECK(twin.flips() + twin.rows_not_finite() > 0);
    CHECK(twin.flips() >= 4 * original.flips());
    CHECK(twin.mean_kl() >= 10 * original.mean_kl());
  }

  const std::vector<std::vector<float>> scaled = all_logits(Twins::original(), everywhere(Math::scaled_fp16));
  const LogitComparison moved = compare(scaled, all_logits(twins.twin(), everywhere(Math::scaled_fp16)));
  MESSAGE("scaled, twin against original: ", text_of(moved));
  CHECK(moved.rows_not_finite() == 0);
  CHECK(moved.flips() <= control.flips());
  CHECK(moved.largest_margin() <= control.largest_margin());
  CHECK(moved.mean_kl() <= control.mean_kl());
}

TEST_CASE("decoding_on_the_twin_has_the_same_bits_in_both_roundings") {
  const Twins twins;
  const std::vector<int32_t> prompt = Golden().prompts().front().ids;
  for (const Rounding rounding : {Rounding::fused, Rounding::reference}) {
    ModelRunner original(Twins::original(), {DType::bf16, rounding}), twin(twins.twin(), {DType::bf16, rounding});
    CHECK(same_bits(original.logits(prompt, {9, 1}), twin.logits(prompt, {9, 1})));
  }
}

TEST_CASE("fused_expert_storage_is_stressed_like_the_experts_apart") {
  const std::vector<int32_t> prompt = Golden().prompts().front().ids;
  const auto stack = [](StoredModel& model, const std::string& prefix, const std::vector<const char*>& parts,
                        const std::string& to) {
    std::vector<StoredTensor> taken;
    for (int e = 0; e < 32; ++e)
      for (const char* part : parts) taken.push_back(model.take(fmt::format("{}.{}.{}.weight", prefix, e, part)));
    std::vector<const StoredTensor*> all;
    for (const StoredTensor& tensor : taken) all.push_back(&tensor);
    StoredTensor joined = join_rows(all);
    joined.shape = {32, joined.shape[0] / 32, joined.shape[1]};
    model.tensors[prefix + "." + to] = std::move(joined);
  };
  StoredModel model = StoredModel::demo();
  for (int layer = 0; layer < 8; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.mlp.experts", layer);
    stack(model, prefix, {"gate_proj", "up_proj"}, "gate_up_proj");
    stack(model, prefix, {"down_proj"}, "down_proj");
  }
  const StoredFolder folder;
  model.write(folder);
  const std::vector<float> expected = ModelRunner(folder.path(), kBf16).logits(prompt);
  const RangeStressCounts counts = stress_in_place(folder.path(), {.exponent_max = 12, .seed = 5});
  CHECK(counts.channels == 8 * 33 * 32 + 2 * 128);
  CHECK(same_bits(ModelRunner(folder.path(), kBf16).logits(prompt), expected));
  CHECK(StoredModel::read(folder.path()).at("model.layers.3.mlp.experts.gate_up_proj").bytes !=
        model.at("model.layers.3.mlp.experts.gate_up_proj").bytes);
}

TEST_CASE("a_channel_that_would_leave_the_normal_range_is_left_alone") {
  StoredModel model = StoredModel::demo();
  const std::string up = "model.layers.0.mlp.experts.0.up_proj.weight";
  StoredTensor& weights = model.at(up);
  weights.set(0, 0x1p-126f);                    // row 0: the smallest normal number
  weights.set(weights.shape[1], 0x1p-130f);     // row 1: subnormal
  weights.set(2 * weights.shape[1], 0x1p127f);  // row 2: the largest power of two
  weights.set(3 * weights.shape[1], 0.0f);      // row 3: zeros are no obstacle
  const StoredFolder folder;
  model.write(folder);
  int64_t kept = 0;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const RangeStressCounts counts = stress_in_place(folder.path(), {.exponent_max = 2, .seed = seed});
    kept += counts.channels_kept;
    const StoredModel after = StoredModel::read(folder.path());
    const StoredTensor& now = after.tensors.at(up);
    const int64_t columns = now.shape[1];
    CHECK(now.value(columns) == 0x1p-130f);
    CHECK(now.value(0) >= 0x1p-126f);
    CHECK(std::isfinite(now.value(2 * columns)));
    CHECK(now.value(3 * columns) == 0.0f);
  }
  CHECK(kept >= 4);  // row 1, each time
}

TEST_CASE("checkpoints_of_other_types_are_refused_by_name") {
  StoredModel model = StoredModel::demo();
  StoredTensor& weights = model.at("model.layers.0.mlp.shared_expert.up_proj.weight");
  weights = weights.as_f32();
  const StoredFolder folder;
  model.write(folder);
  CHECK_THROWS_WITH_AS(stress_in_place(folder.path(), {}),
                       doctest::Contains("shared_expert.up_proj.weight has type F32"), Error);
}

}  // namespace offload::range_stress_test
