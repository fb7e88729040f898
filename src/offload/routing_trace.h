// RoutingTrace: which experts every token chose, step by step; recorded, read from a file, or drawn.
//
// Owns the ids. The file format is refused by the reader unless every length and id is in range. Deterministic: a
// drawn trace is a function of its shape, parameters and seed on every machine. Thread-safe to read.
#ifndef OFFLOAD_OFFLOAD_ROUTING_TRACE_H_
#define OFFLOAD_OFFLOAD_ROUTING_TRACE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/phase.h"

namespace offload {

struct RoutingShape {
  int64_t layers = 0;  // layers with routed experts
  int64_t experts = 0;
  int64_t top_k = 0;

  friend bool operator==(const RoutingShape&, const RoutingShape&) = default;
};

// Limits of a trace, in memory and in a file; far above any model or test.
inline constexpr int64_t kTraceLayersMax = 4096;
inline constexpr int64_t kTraceExpertsMax = 65536;
inline constexpr int64_t kTraceRowsMax = int64_t{1} << 20;  // of one step
inline constexpr int64_t kTraceIdsMax = int64_t{1} << 31;   // of the whole trace: 4 GiB

class RoutingTrace {
 public:
  // REQUIRES: 0 < layers <= kTraceLayersMax, 0 < top_k <= experts <= kTraceExpertsMax.
  explicit RoutingTrace(const RoutingShape& shape);

  const RoutingShape& shape() const { return shape_; }
  int64_t steps() const { return static_cast<int64_t>(steps_.size()); }
  Phase phase(int64_t step) const { return at(step).phase; }
  int64_t rows(int64_t step) const { return at(step).rows; }
  // [rows, top_k] of one layer. An id may stand in a row twice.
  std::span<const uint16_t> ids(int64_t step, int64_t layer) const;

  // `ids` is [layers, rows, top_k], every id < experts.
  void append(Phase phase, int64_t rows, std::span<const uint16_t> ids);
  // Takes memory for that much more, so that appending it allocates nothing.
  void reserve(int64_t steps, int64_t ids);
  bool has_room_for(int64_t ids) const;
  // Steps [begin, end) of this trace.
  RoutingTrace slice(int64_t begin, int64_t end) const;
  // REQUIRES: the same shape.
  void append(const RoutingTrace& other);

  friend bool operator==(const RoutingTrace&, const RoutingTrace&) = default;

 private:
  struct Step {
    Phase phase;
    int64_t rows;
    int64_t begin;  // of its ids

    friend bool operator==(const Step&, const Step&) = default;
  };

  const Step& at(int64_t step) const;
  int64_t ids_per_row() const { return shape_.layers * shape_.top_k; }

  RoutingShape shape_;
  std::vector<Step> steps_;
  std::vector<uint16_t> ids_;
};

// The file: all numbers little-endian. "OFLROUTE", u32 version = 1, u32 layers, u32 experts, u32 top_k, u64 steps; then
// per step u32 phase (0 prefill, 1 decode), u32 rows, u16 ids[layers][rows][top_k]. Nothing follows.
std::string serialize_trace(const RoutingTrace& trace);
// Throws Error{input} that names `origin`, the place, what was expected and what was found. Takes no memory for
// lengths that the text does not back.
RoutingTrace parse_trace(std::string_view bytes, std::string_view origin);
// Throw Error{input} or Error{resource} with the system's reason.
void write_trace(const RoutingTrace& trace, const std::string& path);
RoutingTrace read_trace(const std::string& path);

// Collects a trace layer by layer while a model runs. Allocates at construction only: when its room is used up it
// stops for good, and says so.
class RoutingRecorder {
 public:
  // Room for `steps_max` steps of `rows_max` rows at most each, `rows_total_max` rows in all.
  RoutingRecorder(const RoutingShape& shape, int64_t steps_max, int64_t rows_max, int64_t rows_total_max);

  // One layer's ids [rows, top_k]. REQUIRES: layers come in order 0, 1, ..., layers - 1 with the same phase and rows.
  void record(int64_t layer, Phase phase, std::span<const int32_t> ids);
  // Steps whose layers all came.
  const RoutingTrace& trace() const { return trace_; }
  bool full() const { return full_; }

 private:
  RoutingTrace trace_;
  std::vector<uint16_t> step_;
  int64_t steps_max_, rows_ = 0, layer_ = 0;
  Phase phase_ = Phase::prefill;
  bool full_ = false;
};

// Every row draws its experts uniformly and independently.
struct UniformRouting {};

// Rows that follow each other as text does. An expert of a row is, in this order of chance: one of the row before at
// the same layer; the partner of one that the row chose at the layer before; else drawn by popularity, from the
// topic's ranking or the layer's. Ranks are floor(experts * u^skew): a power law without a scale, so that a smaller
// model with the same top_k / experts gives the same hit rates.
// The values are fitted so that LRU over 48 x 512 top-10 hits 67 % with 12.5 % of the experts resident and 81 % with
// 25 %, the published curve; docs/policy.md has the fit.
struct SkewedRouting {
  double width = 0.055;        // popularity falls by e over this share of the ranks
  double reuse = 0.53;         // share of experts kept from the row before
  double partner = 0.10;       // share that follows from the layer before
  double topic = 0.5;          // share of the drawn ones that come from the topic's ranking
  double topic_change = 0.01;  // chance per row
  int64_t topics = 16;
};

// One step per entry of `rows`, with its phase. Rows continue from step to step.
struct DrawnStep {
  Phase phase = Phase::decode;
  int64_t rows = 1;
};
RoutingTrace draw_trace(const RoutingShape& shape, const UniformRouting& routing, std::span<const DrawnStep> steps,
                        uint64_t seed);
RoutingTrace draw_trace(const RoutingShape& shape, const SkewedRouting& routing, std::span<const DrawnStep> steps,
                        uint64_t seed);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_ROUTING_TRACE_H_
