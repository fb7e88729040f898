// The model end to end against the published implementation's numbers on the demo checkpoint.
#include <doctest/doctest.h>

#include <cstdio>

#include "cpu/cpu_backend.h"
#include "cpu/ref_ops.h"
#include "golden.h"
#include "offload/engine.h"

using namespace offload;

namespace {

constexpr double kLogitsAbsolute = 5e-4;      // FP32 arm against FP32 goldens
constexpr double kHiddenOfScale = 1e-4;       // of the stack's largest magnitude
constexpr double kMarginThatDecides = 1e-3;   // greedy tokens must agree above this golden margin

std::unique_ptr<Ops> make_ops() { return std::make_unique<cpu::RefOps>(); }

// An engine on the demo with all logits of a feed gathered into one vector.
class Runner {
 public:
  explicit Runner(Arithmetic arithmetic, int64_t chunk = 2048)
      : backend_(make_ops()), engine_(options(arithmetic, chunk), backend_) {}

  Engine& engine() { return engine_; }

  std::vector<float> all_logits(SequenceState& sequence, std::span<const int32_t> ids, const Model::LayerTap& tap = {}) {
    std::vector<float> out(ids.size() * static_cast<size_t>(engine_.spec().vocab));
    engine_.feed(sequence, ids, Engine::LogitRows::all, [&](int64_t row, std::span<const float> logits) {
      std::copy(logits.begin(), logits.end(), out.begin() + row * engine_.spec().vocab);
    }, tap);
    return out;
  }
  std::vector<float> last_logits(SequenceState& sequence, std::span<const int32_t> ids) {
    std::vector<float> out;
    engine_.feed(sequence, ids, Engine::LogitRows::last,
                 [&](int64_t, std::span<const float> logits) { out.assign(logits.begin(), logits.end()); });
    return out;
  }

 private:
  static EngineOptions options(Arithmetic arithmetic, int64_t chunk) {
    EngineOptions options;
    options.model_dir = Golden::model_dir();
    options.context = 2048;
    options.chunk = chunk;
    options.load_threads = 2;
    options.arithmetic = arithmetic;
    return options;
  }
  cpu::CpuBackend backend_;
  Engine engine_;
};

std::span<const float> row_of(const std::vector<float>& logits, size_t row, size_t vocab) {
  return std::span(logits).subspan(row * vocab, vocab);
}

double max_difference(std::span<const float> a, std::span<const float> b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  return worst;
}

}  // namespace

TEST_CASE("fp32_arm_reproduces_the_published_logits_and_argmaxes_of_all_prompts") {
  const Golden golden;
  Runner runner({DType::f32, Rounding::fused});
  double worst = 0;
  for (const GoldenPrompt& prompt : golden.prompts()) {
    CAPTURE(prompt.name);
    SequenceState sequence = runner.engine().new_sequence();
    const std::vector<float> logits = runner.all_logits(sequence, prompt.ids);
    const auto vocab = static_cast<size_t>(runner.engine().spec().vocab);
    const GoldenTensor top_logits = golden.tensor(prompt.name + ".top5_logits_fp32");
    const GoldenTensor last = golden.tensor(prompt.name + ".last_logits_fp32");
    const GoldenTensor ids = [&] {
      GoldenTensor as_float{{}, 5};
      const Checkpoint file = Checkpoint::open(OFFLOAD_SOURCE_DIR "/tests/data/golden/demo-qwen4-exp/reference.safetensors");
      const TensorEntry& entry = file.at(prompt.name + ".top5_ids");
      std::vector<int32_t> raw(static_cast<size_t>(entry.bytes / 4));
      file.read(entry, 0, std::as_writable_bytes(std::span(raw)));
      as_float.values.assign(raw.begin(), raw.end());
      return as_float;
    }();
    for (size_t r = 0; r < prompt.ids.size(); ++r) {
      const auto row = row_of(logits, r, vocab);
      CHECK(argmax(row) == static_cast<size_t>(ids.row(static_cast<int64_t>(r))[0]));
      for (size_t i = 0; i < 5; ++i)
        worst = std::max(worst, std::abs(double{row[static_cast<size_t>(ids.row(static_cast<int64_t>(r))[i])]} -
                                         top_logits.row(static_cast<int64_t>(r))[i]));
    }
    for (int64_t i = 0; i < 4; ++i)
      worst = std::max(worst, max_difference(row_of(logits, prompt.ids.size() - 4 + static_cast<size_t>(i), vocab), last.row(i)));
    CHECK(worst <= kLogitsAbsolute);
  }
  MESSAGE("largest logit deviation ", worst);
}

TEST_CASE("fp32_arm_reproduces_the_published_stack_after_every_layer") {
  const Golden golden;
  Runner runner({DType::f32, Rounding::fused});
  const GoldenPrompt& prompt = golden.prompts().front();
  REQUIRE(prompt.name == "english");
  SequenceState sequence = runner.engine().new_sequence();
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
