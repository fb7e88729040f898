#include "offload/rank_trace.h"

#include <chrono>

namespace offload {
namespace {

std::vector<TraceBuffer::Lane> lanes_of(int rank) {
  std::vector<TraceBuffer::Lane> lanes;
  for (const std::string_view name : kSimLaneNames) lanes.push_back({fmt::format("rank {}", rank), std::string(name)});
  return lanes;
}

}  // namespace

int64_t RankTrace::now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

RankTrace::RankTrace(Backend& backend, int rank, int64_t events_max, int64_t origin_ns)
    : backend_(backend), buffer_(lanes_of(rank), events_max, origin_ns) {}

TraceBuffer::Event* RankTrace::open(SimLane lane, std::string_view name, const TraceSubject& subject) {
  TraceBuffer::Event* event = buffer_.open(static_cast<int32_t>(lane));
  if (event == nullptr) return nullptr;
  event->name = name;
  event->subject = subject;
  return event;
}

// An op's name comes when it has ended; its place in the buffer and its begin are taken before.
void RankTrace::op_begins() {
  op_ = open(SimLane::compute, "", {.layer = layer_});
  if (op_ != nullptr) backend_.compute_lane().call(stamp, &op_->begin_ns);
}

void RankTrace::op_ended(std::string_view name, const Cost& cost) {
  if (op_ == nullptr) return;
  op_->name = name;
  op_->subject.bytes = cost.bytes_read + cost.bytes_written;
  backend_.compute_lane().call(stamp, &op_->end_ns);
}

HostSpan::HostSpan(RankTrace* trace, std::string_view name, const TraceSubject& subject)
    : event_(trace == nullptr ? nullptr : trace->open(SimLane::host, name, subject)) {
  if (event_ != nullptr) event_->begin_ns = RankTrace::now_ns();
}

HostSpan::~HostSpan() {
  if (event_ != nullptr) event_->end_ns = RankTrace::now_ns();
}

StepSpan::StepSpan(RankTrace& trace, int64_t rows, int64_t layers, int64_t chunks)
    : trace_(trace), layers_(layers), chunks_(chunks), step_(&trace, "step", {.rows = static_cast<int32_t>(rows)}) {
  begin_layer(0);
}

StepSpan::~StepSpan() {
  trace_.set_layer(-1);
}

void StepSpan::begin_layer(int64_t layer) {
  layer_.reset();
  trace_.set_layer(layer < layers_ ? layer : -1);
  if (layer < layers_) layer_.emplace(&trace_, "layer", TraceSubject{.layer = static_cast<int32_t>(layer)});
}

Model::LayerTap StepSpan::tap(const Model::LayerTap& tap) {
  return [this, &tap](size_t layer, const Tensor& stack) {
    begin_layer(++passed_ / chunks_);  // a layer takes all chunks in turn
    if (tap) tap(layer, stack);
  };
}

void TracedCollective::all_reduce_sum(const Tensor& tensor) {
  traced_on_lane(&trace_, backend_.compute_lane(), SimLane::collective, "all_reduce",
                 {.layer = trace_.layer(), .bytes = tensor.bytes()}, [&] { collective_.all_reduce_sum(tensor); });
}

void TracedCollective::start_sum(const Tensor& tensor) {
  Lane* const lane = collective_.sum_lane();
  // Or the bar would begin when the sum before has ended.
  collective_.follow_compute();
  traced_on_lane(&trace_, lane == nullptr ? backend_.compute_lane() : *lane, SimLane::collective, "all_reduce",
                 {.layer = trace_.layer(), .bytes = tensor.bytes()}, [&] { collective_.start_sum(tensor); });
}

bool TracedCollective::all_equal(uint64_t value) {
  const HostSpan wait(&trace_, "wait_ranks");
  return collective_.all_equal(value);
}

}  // namespace offload
