// Running the demo checkpoint on any backend and holding what it gives against the reference outputs.
#ifndef OFFLOAD_TESTS_GOLDEN_RUN_H_
#define OFFLOAD_TESTS_GOLDEN_RUN_H_

#include <memory>

#include "golden.h"
#include "offload/engine.h"
#include "offload/parity.h"

namespace offload {

struct GoldenRunOptions {
  int64_t chunk = 2048;
  ExpertCacheOptions cache = {};
};

// An engine on the demo with all logits of a feed gathered into one vector.
class GoldenRun {
 public:
  GoldenRun(std::unique_ptr<Backend> backend, Arithmetic arithmetic, const GoldenRunOptions& run = {})
      : backend_(std::move(backend)), engine_(options(arithmetic, run), *backend_) {}

  Engine& engine() { return engine_; }

  std::vector<float> all_logits(Sequence& sequence, std::span<const int32_t> ids, const Model::LayerTap& tap = {}) {
    std::vector<float> out(ids.size() * static_cast<size_t>(engine_.spec().vocab));
    engine_.feed(
        sequence, ids, Engine::LogitRows::all,
        [&](int64_t row, std::span<const float> logits) {
          std::copy(logits.begin(), logits.end(), out.begin() + row * engine_.spec().vocab);
        },
        tap);
    return out;
  }
  std::vector<float> last_logits(Sequence& sequence, std::span<const int32_t> ids) {
    std::vector<float> out;
    engine_.feed(sequence, ids, Engine::LogitRows::last,
                 [&](int64_t, std::span<const float> logits) { out.assign(logits.begin(), logits.end()); });
    return out;
  }

 private:
  static EngineOptions options(Arithmetic arithmetic, const GoldenRunOptions& run) {
    EngineOptions options;
    options.model_dir = Golden::model_dir();
    options.context = 2048;
    options.chunk = run.chunk;
    options.load_threads = 2;
    options.cache = run.cache;
    options.arithmetic = arithmetic;
    return options;
  }
  std::unique_ptr<Backend> backend_;
  Engine engine_;
};

inline std::span<const float> row_of(const std::vector<float>& logits, size_t row, size_t vocab) {
  return std::span(logits).subspan(row * vocab, vocab);
}

inline double max_difference(std::span<const float> a, std::span<const float> b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  return worst;
}

inline constexpr Arithmetic kFp32{DType::f32, Rounding::fused};
inline constexpr Arithmetic kReference{DType::bf16, Rounding::reference};
inline constexpr Arithmetic kFused{DType::bf16, Rounding::fused};

// Feeds `ids` in pieces of the given sizes, repeated from the start when they run out; returns the last row's logits.
inline std::vector<float> feed_in_pieces(GoldenRun& runner, Sequence& sequence, std::span<const int32_t> ids,
                                         std::initializer_list<size_t> sizes) {
  std::vector<float> last;
  auto size = sizes.begin();
  for (size_t at = 0; at < ids.size(); ++size) {
    if (size == sizes.end()) size = sizes.begin();
    const size_t count = std::min(*size, ids.size() - at);
    last = runner.last_logits(sequence, ids.subspan(at, count));
    at += count;
  }
  return last;
}

struct Flips {
  int changed = 0;
  double largest_margin = 0;
};

// Feeds the golden chain token by token and compares each decision with the golden's.
inline Flips forced_chain(GoldenRun& runner, Sequence& sequence, std::vector<float> logits, const GoldenChain& chain) {
  Flips flips;
  for (size_t i = 0; i < chain.tokens.size(); ++i) {
    if (argmax(logits) != static_cast<size_t>(chain.tokens[i])) {
      ++flips.changed;
      flips.largest_margin = std::max(flips.largest_margin, chain.margins[i]);
    }
    logits = runner.last_logits(sequence, std::span(chain.tokens).subspan(i, 1));
  }
  return flips;
}

// Where every logit that the goldens hold was compared.
struct LogitDeviation {
  double largest = 0;
  int argmaxes_changed = 0;
};

inline LogitDeviation deviation_from_golden(GoldenRun& runner, const Golden& golden) {
  const auto vocab = static_cast<size_t>(runner.engine().spec().vocab);
  LogitDeviation found;
  for (const GoldenPrompt& prompt : golden.prompts()) {
    Sequence sequence = runner.engine().new_sequence();
    const std::vector<float> logits = runner.all_logits(sequence, prompt.ids);
    const GoldenTensor top_logits = golden.tensor(prompt.name + ".top5_logits_fp32");
    const GoldenTensor last = golden.tensor(prompt.name + ".last_logits_fp32");
    const std::vector<int32_t> ids = golden.ids(prompt.name + ".top5_ids");
    for (size_t r = 0; r < prompt.ids.size(); ++r) {
      const auto row = row_of(logits, r, vocab);
      if (argmax(row) != static_cast<size_t>(ids[5 * r])) ++found.argmaxes_changed;
      for (size_t i = 0; i < 5; ++i)
        found.largest = std::max(found.largest, std::abs(double{row[static_cast<size_t>(ids[5 * r + i])]} -
                                                         top_logits.row(static_cast<int64_t>(r))[i]));
    }
    for (int64_t i = 0; i < 4; ++i)
      found.largest =
          std::max(found.largest,
                   max_difference(row_of(logits, prompt.ids.size() - 4 + static_cast<size_t>(i), vocab), last.row(i)));
  }
  return found;
}

// How far a BF16 arm is from FP32 over all rows of all prompts, and which decisions of the golden chains it changes.
struct NoiseFloor {
  double mean_kl = 0, median_kl = 0, published_mean_kl = 0;
  Flips flips;

  // The specification's noise floor (twelve plain BF16 runs that differ in summation order) allows a mean KL of 1.25 x
  // and a median of 1.15 x a plain run's. The mean is taken against the published BF16 run, whose KL is in the goldens;
  // the median against the largest of the twelve runs, since the published run's rows are not all stored.
  static constexpr double kPlainMedianMax = 2.0e-4;
  static constexpr int kChangedMax = 20;
  static constexpr double kMarginMax = 0.25;
  bool within() const {
    return mean_kl <= 1.25 * published_mean_kl && median_kl <= 1.15 * kPlainMedianMax && flips.changed <= kChangedMax &&
           flips.largest_margin <= kMarginMax;
  }
  std::string text() const {
    return fmt::format("mean KL {:.3g} (published BF16 {:.3g}), median {:.2g}, changed {} of 336, largest margin {}",
                       mean_kl, published_mean_kl, median_kl, flips.changed, flips.largest_margin);
  }
};

// REQUIRES: `oracle` runs in FP32.
inline NoiseFloor noise_floor(GoldenRun& runner, GoldenRun& oracle, const Golden& golden) {
  NoiseFloor floor;
  const auto vocab = static_cast<size_t>(runner.engine().spec().vocab);
  std::vector<double> kl;
  for (const GoldenPrompt& prompt : golden.prompts()) {
    floor.published_mean_kl += prompt.bf16_mean_kl * static_cast<double>(prompt.ids.size());
    Sequence oracle_sequence = oracle.engine().new_sequence(), sequence = runner.engine().new_sequence();
    const std::vector<float> expected = oracle.all_logits(oracle_sequence, prompt.ids);
    const std::vector<float> logits = runner.all_logits(sequence, prompt.ids);
    for (size_t r = 0; r < prompt.ids.size(); ++r)
      kl.push_back(kl_divergence(row_of(expected, r, vocab), row_of(logits, r, vocab)));
    const auto last = row_of(logits, prompt.ids.size() - 1, vocab);
    const Flips of_prompt = forced_chain(runner, sequence, {last.begin(), last.end()}, prompt.bf16);
    floor.flips.changed += of_prompt.changed;
    floor.flips.largest_margin = std::max(floor.flips.largest_margin, of_prompt.largest_margin);
  }
  floor.published_mean_kl /= static_cast<double>(kl.size());
  for (const double v : kl) floor.mean_kl += v / static_cast<double>(kl.size());
  std::nth_element(kl.begin(), kl.begin() + static_cast<std::ptrdiff_t>(kl.size() / 2), kl.end());
  floor.median_kl = kl[kl.size() / 2];
  return floor;
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_GOLDEN_RUN_H_
