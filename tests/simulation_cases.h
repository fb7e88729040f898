// What tests of the simulator and the planner share: the published machine and model, and routing of known balance.
#ifndef OFFLOAD_TESTS_SIMULATION_CASES_H_
#define OFFLOAD_TESTS_SIMULATION_CASES_H_

#include <cmath>
#include <string>
#include <vector>

#include "core/models/registry.h"
#include "offload/machine.h"
#include "offload/routing_trace.h"

namespace offload {

inline constexpr double kGibibyte = 1024.0 * 1024.0 * 1024.0;

// |value - expected| within that share of expected: unlike doctest::Approx, whose tolerance has an absolute part.
inline bool is_near(double value, double expected, double relative) {
  return std::abs(value - expected) <= relative * expected;
}

inline Machine published_machine() {
  return read_machine(OFFLOAD_SOURCE_DIR "/configs/machines/rtx2080ti_x4.json");
}

inline ModelSpec published_model() {
  const std::string path = OFFLOAD_SOURCE_DIR "/configs/models/qwen3.8-flash-next.json";
  return model_spec(parse_json(read_text_file(path, 1 << 20), path), path);
}

// Decode steps of one row in which, over two layers, each of four ranks has five experts: 3 + 2 or 2 + 3. No expert
// comes back within 40 steps, so nothing that was cached earlier hits.
// REQUIRES: at least 512 experts, top_k 10.
inline void append_balanced_steps(RoutingTrace& trace, int64_t steps) {
  const RoutingShape& shape = trace.shape();
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<uint16_t> ids;
    for (int64_t layer = 0; layer < shape.layers; ++layer)
      for (int64_t rank = 0; rank < 4; ++rank)
        for (int64_t i = 0; i < ((rank + layer) % 2 == 0 ? 3 : 2); ++i)
          ids.push_back(static_cast<uint16_t>(((step * 3 + i) * 4 + rank) % shape.experts));
    trace.append(Phase::decode, 1, ids);
  }
}

// One prefill step whose rows together choose every expert of every layer.
inline void append_full_prefill(RoutingTrace& trace) {
  const RoutingShape& shape = trace.shape();
  const int64_t rows = (shape.experts + shape.top_k - 1) / shape.top_k;
  std::vector<uint16_t> ids;
  for (int64_t layer = 0; layer < shape.layers; ++layer)
    for (int64_t i = 0; i < rows * shape.top_k; ++i) ids.push_back(static_cast<uint16_t>(i % shape.experts));
  trace.append(Phase::prefill, rows, ids);
}

// A prompt of so many rows as one step. Two topics and no partners: with the drawn popularity that touches three
// quarters of a rank's experts in 8192 rows, as was counted on the published machine (4652 of 6144).
inline RoutingTrace drawn_prompt(const RoutingShape& shape, int64_t rows, uint64_t seed) {
  const DrawnStep step{Phase::prefill, rows};
  return draw_trace(shape, SkewedRouting{.partner = 0, .topics = 2}, {&step, 1}, seed);
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_SIMULATION_CASES_H_
