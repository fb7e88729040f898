// An engine on a checkpoint folder with the CPU backend, and the logits of what it is fed.
#ifndef OFFLOAD_TESTS_MODEL_RUNNER_H_
#define OFFLOAD_TESTS_MODEL_RUNNER_H_

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "offload/engine.h"

namespace offload {

inline constexpr Arithmetic kFp32Arithmetic{DType::f32, Rounding::fused};

class ModelRunner {
 public:
  explicit ModelRunner(const std::string& model_dir, Arithmetic arithmetic = kFp32Arithmetic, int64_t chunk = 512,
                       int64_t context = 512, cpu::Isa isa = cpu::best_isa())
      : backend_(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1, .isa = isa})),
        engine_(options(model_dir, arithmetic, chunk, context), backend_) {}

  Engine& engine() { return engine_; }
  int64_t vocab() const { return engine_.spec().vocab; }

  // [ids, vocab], of all rows.
  std::vector<float> feed(Sequence& sequence, std::span<const int32_t> ids, const Model::LayerTap& tap = {}) {
    std::vector<float> out(ids.size() * static_cast<size_t>(vocab()));
    engine_.feed(
        sequence, ids, Engine::LogitRows::all,
        [&](int64_t row, std::span<const float> logits) {
          std::copy(logits.begin(), logits.end(), out.begin() + row * vocab());
        },
        tap);
    return out;
  }

  // Of a fresh sequence, fed in pieces of these sizes, repeated from the start when they run out.
  std::vector<float> logits(std::span<const int32_t> ids, const std::vector<size_t>& pieces = {SIZE_MAX}) {
    Sequence sequence = engine_.new_sequence();
    std::vector<float> out;
    for (size_t at = 0, piece = 0; at < ids.size(); ++piece) {
      const size_t count = std::min(pieces[piece % pieces.size()], ids.size() - at);
      const std::vector<float> rows = feed(sequence, ids.subspan(at, count));
      out.insert(out.end(), rows.begin(), rows.end());
      at += count;
    }
    return out;
  }

 private:
  static EngineOptions options(const std::string& model_dir, Arithmetic arithmetic, int64_t chunk, int64_t context) {
    EngineOptions options;
    options.model_dir = model_dir;
    options.context = context;
    options.chunk = chunk;
    options.arithmetic = arithmetic;
    return options;
  }

  cpu::CpuBackend backend_;
  Engine engine_;
};

// Largest |a - b|; infinity when the lengths differ or a NaN is among them.
inline double largest_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(double{a[i]} - double{b[i]});
    if (std::isnan(difference)) return INFINITY;
    largest = std::max(largest, difference);
  }
  return largest;
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_MODEL_RUNNER_H_
