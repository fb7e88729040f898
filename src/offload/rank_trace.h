// RankTrace: what one rank did when, while a model runs: ops, expert copies, all-reduces, and where its host waited.
//
// Owns a TraceBuffer with the simulator's lanes and names. Work on an asynchronous lane is timed by the lane itself:
// Lane::call stamps the clock into the event before and after it, in the lane's order. Recording allocates nothing.
// Confined to the rank's thread, but for those stamps; buffer() may be read once the lanes have been drained.
// Everything that takes a RankTrace* does nothing but its work for a null one.
#ifndef OFFLOAD_OFFLOAD_RANK_TRACE_H_
#define OFFLOAD_OFFLOAD_RANK_TRACE_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/backend.h"
#include "core/collective.h"
#include "core/model.h"
#include "offload/simulator.h"
#include "offload/trace.h"

namespace offload {

class RankTrace final : public OpObserver {
 public:
  // A clock that never goes back.
  static int64_t now_ns();
  // For Lane::call: writes now_ns() to an int64_t.
  static void stamp(void* ns) { *static_cast<int64_t*>(ns) = now_ns(); }

  // Times count from `origin_ns`. The backend outlives the trace.
  RankTrace(Backend& backend, int rank, int64_t events_max, int64_t origin_ns);

  const TraceBuffer& buffer() const { return buffer_; }
  void clear() { buffer_.clear(); }

  // Null when the buffer is full.
  TraceBuffer::Event* open(SimLane lane, std::string_view name, const TraceSubject& subject);
  // The layer that ops belong to from here on; -1: none.
  void set_layer(int64_t layer) { layer_ = static_cast<int32_t>(layer); }
  int32_t layer() const { return layer_; }

  // As the observer of the backend's ops.
  void op_begins() override;
  void op_ended(std::string_view name, const Cost& cost) override;

 private:
  Backend& backend_;
  TraceBuffer buffer_;
  TraceBuffer::Event* op_ = nullptr;
  int32_t layer_ = -1;
};

// Has `issue` put work on `lane` and records when the lane does it.
template <typename Issue>
void traced_on_lane(RankTrace* trace, Lane& lane, SimLane where, std::string_view name, const TraceSubject& subject,
                    const Issue& issue) {
  TraceBuffer::Event* event = trace == nullptr ? nullptr : trace->open(where, name, subject);
  if (event != nullptr) lane.call(RankTrace::stamp, &event->begin_ns);
  issue();
  if (event != nullptr) lane.call(RankTrace::stamp, &event->end_ns);
}

// From its construction to its end, on the host's lane.
class HostSpan {
 public:
  HostSpan(RankTrace* trace, std::string_view name, const TraceSubject& subject = {});
  HostSpan(const HostSpan&) = delete;
  HostSpan& operator=(const HostSpan&) = delete;
  ~HostSpan();

 private:
  TraceBuffer::Event* event_;
};

// One step on the host's lane, and within it each layer, from the end of the one before.
class StepSpan {
 public:
  // `rows` pass each of the layers in `chunks` chunks.
  StepSpan(RankTrace& trace, int64_t rows, int64_t layers, int64_t chunks);
  StepSpan(const StepSpan&) = delete;
  StepSpan& operator=(const StepSpan&) = delete;
  ~StepSpan();

  // A tap that ends each chunk's pass of a layer, then calls `tap` if there is one. Both outlive it.
  Model::LayerTap tap(const Model::LayerTap& tap);

 private:
  void begin_layer(int64_t layer);

  RankTrace& trace_;
  int64_t layers_, chunks_, passed_ = 0;
  HostSpan step_;
  std::optional<HostSpan> layer_;
};

// Records what passes through a collective.
class TracedCollective final : public Collective {
 public:
  // All outlive it.
  TracedCollective(Collective& collective, Backend& backend, RankTrace& trace)
      : collective_(collective), backend_(backend), trace_(trace) {}

  void reserve(int64_t elements) override { collective_.reserve(elements); }
  void all_reduce_sum(const Tensor& tensor) override;
  void start_sum(const Tensor& tensor) override;
  void finish_sum() override { collective_.finish_sum(); }
  Lane* sum_lane() override { return collective_.sum_lane(); }
  bool sums_are_slow() const override { return collective_.sums_are_slow(); }
  bool runs_on_device(int64_t elements) const override { return collective_.runs_on_device(elements); }
  void follow_compute() override { collective_.follow_compute(); }
  bool all_equal(uint64_t value) override;
  void abort() noexcept override { collective_.abort(); }
  void recover() noexcept override { collective_.recover(); }

 private:
  Collective& collective_;
  Backend& backend_;
  RankTrace& trace_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RANK_TRACE_H_
