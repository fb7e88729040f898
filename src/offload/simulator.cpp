#include "offload/simulator.h"

#include <algorithm>
#include <deque>
#include <map>

namespace offload {
namespace {

constexpr int32_t kLanesPerRank = 3;

void add(PolicyCounts& to, const PolicyCounts& after, const PolicyCounts& before) {
  to.hits += after.hits - before.hits;
  to.misses += after.misses - before.misses;
  to.off_slab += after.off_slab - before.off_slab;
  to.copies_lookahead += after.copies_lookahead - before.copies_lookahead;
  to.lookahead_used += after.lookahead_used - before.lookahead_used;
}

// Clocks: when the lane is free. Per slot: when its last reader and its last copy end.
struct Rank {
  Rank(const PolicyOptions& options, int64_t id_)
      : id(id_),
        policy(options),
        cache(options.shape.layers, options.shape.experts, policy.options().slots),
        read_end(static_cast<size_t>(policy.options().slots)),
        fill_end(read_end.size()) {
    filling.reserve(read_end.size());
  }

  int64_t id;
  ExpertPolicy policy;
  ExpertCache cache;
  int64_t compute = 0, copy = 0;
  std::vector<int64_t> read_end, fill_end;
  std::vector<int32_t> filling;
  std::array<int64_t, 4> busy_ns{};  // of the current phase, counted steps only
};

class Run {
 public:
  Run(const CostModel& costs, const StepProgrammer& programmer, const SimOptions& options, const RoutingTrace& trace,
      const SimOutputs& outputs);

  Simulation run();

 private:
  // One chunk of one step at one layer.
  struct Work {
    const StepTimes* times;
    std::span<const uint16_t> ids;
    int64_t rows;
    Phase phase;
    int32_t layer;
    int64_t visits_left;  // chunks that go through the same layer next
    bool continues;       // more of the prompt passes all layers
  };

  const StepTimes& times(int64_t rows, int64_t first);
  void step(int64_t index);
  void prefill(int64_t index);
  Work work(int64_t index, int64_t layer, int64_t begin, int64_t rows, const StepTimes& step_times) const;
  void layer(const Work& work);
  void carry_out(Rank& rank, const Work& work, const LayerPlan& plan, int64_t routed);
  void copy(Rank& rank, std::string_view name, ExpertKey key, int32_t slot, ExpertKey evicts, int64_t not_before);
  int64_t run_off_slab(Rank& rank, const Work& work, const PlannedRun& run, int64_t routed);
  void all_reduce(int64_t duration);
  void compute(Rank& rank, std::string_view name, int64_t duration, int32_t layer);
  void compute_all(std::string_view name, int64_t duration, int32_t layer);
  int64_t expert_ns(int64_t rows);
  int64_t stalled(int64_t duration);
  void emit(const SimEvent& event, int64_t bytes = -1);
  int64_t compute_end() const;

  const CostModel& costs_;
  const StepProgrammer& programmer_;
  SimOptions options_;
  const RoutingTrace& trace_;
  const SimOutputs& outputs_;
  ExpertShape shape_;            // of what one rank holds of an expert
  int64_t copy_ns_, routed_ns_;  // the latter from the end of a router until something is issued for its experts
  std::deque<Rank> ranks_;
  int64_t host_ = 0;  // the host's lane
  ActiveExperts active_;
  std::map<std::pair<int64_t, int64_t>, StepTimes> times_;
  std::map<int64_t, int64_t> expert_ns_;
  int64_t position_ = 0;
  PhaseTimes* phase_ = nullptr;  // null: not counted
  Phase last_phase_ = Phase::prefill;
  uint64_t draw_;
};

Run::Run(const CostModel& costs, const StepProgrammer& programmer, const SimOptions& options, const RoutingTrace& trace,
         const SimOutputs& outputs)
    : costs_(costs),
      programmer_(programmer),
      options_(options),
      trace_(trace),
      outputs_(outputs),
      shape_(programmer.expert_shape()),
      routed_ns_(costs.wait_ns() + costs.plan_ns()),
      active_(programmer.routing_shape().experts),
      draw_(options.stalls.seed | 1) {
  const RoutingShape shape = programmer.routing_shape();
  OFL_ASSERT(costs.world() == programmer.world());
  if (!(trace.shape() == shape))
    throw_error(ErrorCode::input,
                "the routing trace has {} layers x {} experts, top {}; the model has {} x {}, top {}: use a trace of "
                "this model",
                trace.shape().layers, trace.shape().experts, trace.shape().top_k, shape.layers, shape.experts,
                shape.top_k);
  if (options_.chunk < 1) throw_error(ErrorCode::usage, "a chunk of {} rows, expected 1 or more", options_.chunk);
  if (options_.policy.host_permille > 0 && !costs.has_host())
    throw_error(ErrorCode::usage, "the machine \"{}\" has no host.dram_gib_s, so no expert can be timed on its host",
                costs.machine().name);
  if (options_.decode_position >= programmer.context())
    throw_error(ErrorCode::usage, "decode at position {} is outside the context of {}", options_.decode_position,
                programmer.context());
  options_.policy.shape = shape;
  const bool is_sliced = options_.shard == ShardForm::slice;
  if (is_sliced) shape_.intermediate /= costs.world();
  copy_ns_ = costs.copy_ns(shape_.block_bytes());
  options_.policy.world = is_sliced ? 1 : costs.world();
  // Ranks that hold slices decide and take time alike: one stands for all.
  const int64_t simulated = is_sliced || options_.ranks == RankScope::first ? 1 : costs.world();
  for (int64_t r = 0; r < simulated; ++r) {
    options_.policy.rank = r;
    ranks_.emplace_back(options_.policy, r);
  }
}

const StepTimes& Run::times(int64_t rows, int64_t first) {
  const auto found = times_.find({rows, first});
  if (found != times_.end()) return found->second;
  if (first + rows > programmer_.context())
    throw_error(ErrorCode::usage, "the trace reaches position {}, the context is {}: raise --context", first + rows,
                programmer_.context());
  return times_[{rows, first}] = costs_.step_ns(programmer_.program(rows, first));
}

int64_t Run::expert_ns(int64_t rows) {
  const auto found = expert_ns_.find(rows);
  if (found != expert_ns_.end()) return found->second;
  return expert_ns_[rows] = costs_.expert_ns(shape_, rows);
}

int64_t Run::stalled(int64_t duration) {
  if (options_.stalls.permille == 0) return duration;
  const auto next = [&] {  // xorshift64
    draw_ ^= draw_ << 13;
    draw_ ^= draw_ >> 7;
    draw_ ^= draw_ << 17;
    return draw_ >> 11;
  };
  const bool stalls = next() % 1000 < static_cast<uint64_t>(options_.stalls.permille);
  return stalls ? duration + static_cast<int64_t>(next() % static_cast<uint64_t>(options_.stalls.ns_max + 1))
                : duration;
}

void Run::emit(const SimEvent& event, int64_t bytes) {
  OFL_ASSERT(event.begin_ns <= event.end_ns);
  const auto lane = static_cast<size_t>(event.lane);
  if (phase_ != nullptr) ranks_[static_cast<size_t>(event.rank)].busy_ns.at(lane) += event.end_ns - event.begin_ns;
  if (outputs_.on_event) outputs_.on_event(event);
  if (outputs_.trace == nullptr) return;
  int32_t thread = static_cast<int32_t>(ranks_.size()) * kLanesPerRank;  // the host's
  if (event.lane != SimLane::host)
    thread = static_cast<int32_t>(event.rank) * kLanesPerRank +
             (event.lane == SimLane::collective ? 2 : static_cast<int32_t>(lane));
  outputs_.trace->complete(thread, event.name, event.begin_ns, event.end_ns,
                           {.layer = event.key.layer, .expert = event.key.expert, .bytes = bytes});
}

int64_t Run::compute_end() const {
  int64_t end = 0;
  for (const Rank& rank : ranks_) end = std::max(end, rank.compute);
  return end;
}

void Run::compute(Rank& rank, std::string_view name, int64_t duration, int32_t layer) {
  const int64_t begin = rank.compute;
  rank.compute += stalled(duration);
  emit({SimLane::compute, rank.id, name, begin, rank.compute, {layer, -1}});
}

void Run::compute_all(std::string_view name, int64_t duration, int32_t layer) {
  for (Rank& rank : ranks_) compute(rank, name, duration, layer);
}

// All ranks leave together; what an early one waits is no work of the collective.
void Run::all_reduce(int64_t duration) {
  if (duration == 0) return;
  const int64_t begin = compute_end(), end = begin + stalled(duration);
  for (Rank& rank : ranks_) {
    rank.compute = end;
    emit({SimLane::collective, rank.id, "all_reduce", begin, end});
  }
}

void Run::copy(Rank& rank, std::string_view name, ExpertKey key, int32_t slot, ExpertKey evicts, int64_t not_before) {
  const auto s = static_cast<size_t>(slot);
  const ExpertKey evicted = rank.cache.begin_fill(slot, key);
  OFL_ASSERT(evicted == evicts);
  const bool in_line = options_.copies == CopyStart::in_line;
  int64_t& lane = in_line ? rank.compute : rank.copy;
  int64_t begin = std::max(lane, rank.read_end[s]);
  if (options_.copies != CopyStart::foreseen) begin = std::max(begin, not_before);
  lane = begin + stalled(copy_ns_);
  rank.fill_end[s] = lane;
  const int64_t bytes = costs_.has_link() ? shape_.block_bytes() : 0;
  if (phase_ != nullptr) phase_->copied_bytes += bytes;
  emit({SimLane::copy, rank.id, name, begin, lane, key, slot}, bytes);
}

// Returns when its rows are on the device.
int64_t Run::run_off_slab(Rank& rank, const Work& work, const PlannedRun& run, int64_t routed) {
  const ExpertKey key{work.layer, run.expert};
  if (run.where == RunWhere::host) {
    const int64_t begin = std::max(host_, routed);
    host_ = begin + stalled(costs_.expert_host_ns(shape_, run.rows));
    if (phase_ != nullptr) phase_->host_bytes += shape_.block_bytes();
    emit({SimLane::host, rank.id, "expert", begin, host_, key}, shape_.block_bytes());
    return host_;
  }
  // It computes as it reads: the link is taken, so both clocks move.
  const int64_t begin = std::max({rank.compute, rank.copy, routed});
  rank.compute = begin + stalled(costs_.expert_zero_copy_ns(shape_, run.rows));
  rank.copy = rank.compute;
  if (phase_ != nullptr) phase_->copied_bytes += shape_.block_bytes();
  emit({SimLane::compute, rank.id, "expert_zero_copy", begin, rank.compute, key}, shape_.block_bytes());
  return rank.compute;
}

// In program order, as the engine issues it: a copy waits for its slot's last reader, a run for its copy. Runs in a row
// that wait for no copy are one batch.
void Run::carry_out(Rank& rank, const Work& work, const LayerPlan& plan, int64_t routed) {
  for (const int32_t slot : rank.filling) rank.cache.end_fill(slot);  // by earlier plans' look-ahead
  rank.filling.clear();
  int64_t rows_end = 0, issued = routed;
  bool is_in_batch = false;
  for (const PlannedRun& run : plan.runs) {
    const ExpertKey key{work.layer, run.expert};
    if (run.where != RunWhere::slab) {
      rows_end = std::max(rows_end, run_off_slab(rank, work, run, routed));
      is_in_batch = false;
      continue;
    }
    const auto slot = static_cast<size_t>(run.slot);
    if (run.copy_first) copy(rank, "copy", key, run.slot, run.evicts, routed);
    const ExpertCache::Pin pin = rank.cache.pin(run.slot, key);
    if (run.copy_first) rank.cache.end_fill(run.slot);
    const bool starts_batch = run.copy_first || !is_in_batch;
    is_in_batch = !run.copy_first;
    if (starts_batch) issued += costs_.launch_ns();
    const int64_t begin = std::max({rank.compute, issued, rank.fill_end[slot]});
    rank.compute = begin + stalled(expert_ns(run.rows) - (starts_batch ? 0 : costs_.batch_ns(run.rows)));
    rank.read_end[slot] = rank.compute;
    emit({SimLane::compute, rank.id, "expert", begin, rank.compute, key, run.slot});
  }
  for (const PlannedCopy& ahead : plan.lookahead) {
    copy(rank, "look_ahead", ahead.key, ahead.slot, ahead.evicts, routed);
    rank.filling.push_back(ahead.slot);
  }
  rank.compute = std::max(rank.compute, rows_end);
}

void Run::layer(const Work& work) {
  const LayerTimes& layer = work.times->layers[static_cast<size_t>(work.layer)];
  const LayerRouting routing{active_.collect(work.ids), work.rows, work.visits_left, work.continues};
  compute_all("mixer", layer.mixer, work.layer);
  all_reduce(work.times->reduce);
  for (Rank& rank : ranks_) {
    compute(rank, "router", layer.router, work.layer);
    const int64_t routed = rank.compute + routed_ns_;
    compute(rank, "shared_expert", layer.shared, work.layer);
    carry_out(rank, work, rank.policy.on_routed(work.layer, routing, work.phase), routed);
    compute(rank, "combine", layer.combine, work.layer);
  }
  all_reduce(work.times->reduce);
  compute_all("write", layer.write, work.layer);
}

Run::Work Run::work(int64_t index, int64_t layer, int64_t begin, int64_t rows, const StepTimes& step_times) const {
  const auto top_k = static_cast<size_t>(trace_.shape().top_k);
  return {
      &step_times,
      trace_.ids(index, layer).subspan(static_cast<size_t>(begin) * top_k, static_cast<size_t>(rows) * top_k),
      rows,
      trace_.phase(index),
      static_cast<int32_t>(layer),
      0,
      trace_.phase(index) == Phase::prefill && index + 1 < trace_.steps() && trace_.phase(index + 1) == Phase::prefill};
}

// The step's rows in chunks; by layers over all chunks, or by chunks over all layers. Either way a chunk comes after
// the one before it at every layer, so recurrent state is in order.
void Run::prefill(int64_t index) {
  const int64_t rows = trace_.rows(index), layers = trace_.shape().layers, chunk = options_.chunk;
  const auto chunk_rows = [&](int64_t begin) { return std::min(chunk, rows - begin); };
  const auto chunk_times = [&](int64_t begin) -> const StepTimes& {
    return times(chunk_rows(begin), position_ + begin);
  };
  if (options_.order == PrefillOrder::layer_major) {
    for (int64_t begin = 0; begin < rows; begin += chunk) compute_all("embed", chunk_times(begin).prologue, -1);
    for (int64_t l = 0; l < layers; ++l)
      for (int64_t begin = 0; begin < rows; begin += chunk) {
        Work of_chunk = work(index, l, begin, chunk_rows(begin), chunk_times(begin));
        of_chunk.visits_left = (rows - 1 - begin) / chunk;
        layer(of_chunk);
      }
  } else {
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      compute_all("embed", chunk_times(begin).prologue, -1);
      for (int64_t l = 0; l < layers; ++l) {
        Work of_chunk = work(index, l, begin, chunk_rows(begin), chunk_times(begin));
        of_chunk.continues |= begin + chunk < rows;
        layer(of_chunk);
      }
    }
  }
  const StepTimes& last = chunk_times((rows - 1) / chunk * chunk);
  compute_all("final_mixer", last.epilogue, -1);
  compute_all("lm_head", last.head, -1);
}

void Run::step(int64_t index) {
  const int64_t rows = trace_.rows(index);
  if (rows == 0) return;
  if (trace_.phase(index) == Phase::prefill) {
    if (last_phase_ == Phase::decode) position_ = 0;  // a new prompt
    prefill(index);
    position_ += rows;
  } else {
    const StepTimes& now = times(rows, options_.decode_position > 0 ? options_.decode_position : position_);
    compute_all("embed", now.prologue, -1);
    for (int64_t l = 0; l < trace_.shape().layers; ++l) layer(work(index, l, 0, rows, now));
    compute_all("final_mixer", now.epilogue, -1);
    compute_all("lm_head", now.head, -1);
    position_ += rows;
  }
  last_phase_ = trace_.phase(index);
}

Simulation Run::run() {
  Simulation out;
  int64_t decode_steps = 0;
  for (int64_t s = 0; s < trace_.steps(); ++s) {
    const Phase phase = trace_.phase(s);
    const bool warms = s < options_.count_from || (phase == Phase::decode && decode_steps++ < options_.decode_warm);
    phase_ = warms ? nullptr : phase == Phase::prefill ? &out.prefill : &out.decode;
    std::vector<PolicyCounts> before;
    for (const Rank& rank : ranks_) before.push_back(rank.policy.counts(phase));
    const int64_t begin = compute_end();
    step(s);
    if (phase_ == nullptr) continue;
    phase_->ns += compute_end() - begin;
    phase_->tokens += trace_.rows(s);
    ++phase_->steps;
    std::array<int64_t, 4> busiest{};
    for (Rank& rank : ranks_) {
      add(phase_->counts, rank.policy.counts(phase), before[static_cast<size_t>(rank.id)]);
      for (size_t lane = 0; lane < busiest.size(); ++lane)
        busiest.at(lane) = static_cast<SimLane>(lane) == SimLane::host
                               ? busiest.at(lane) + rank.busy_ns.at(lane)
                               : std::max(busiest.at(lane), rank.busy_ns.at(lane));
      rank.busy_ns = {};
    }
    for (size_t lane = 0; lane < busiest.size(); ++lane) phase_->busy_ns.at(lane) += busiest.at(lane);
  }
  for (Rank& rank : ranks_) {
    for (const int32_t slot : rank.filling) rank.cache.end_fill(slot);
    rank.cache.check();
    rank.policy.check();
  }
  return out;
}

}  // namespace

SimLane PhaseTimes::bound() const {
  return static_cast<SimLane>(std::max_element(busy_ns.begin(), busy_ns.end()) - busy_ns.begin());
}

Simulation simulate(const CostModel& costs, const StepProgrammer& programmer, const SimOptions& options,
                    const RoutingTrace& trace, const SimOutputs& outputs) {
  return Run(costs, programmer, options, trace, outputs).run();
}

std::vector<TraceBuffer::Lane> simulation_lanes(int64_t ranks) {
  std::vector<TraceBuffer::Lane> lanes;
  for (int64_t r = 0; r < ranks; ++r)
    for (const char* name : {"compute", "copy", "collective"}) lanes.push_back({fmt::format("rank {}", r), name});
  lanes.push_back({"host", "cores"});
  return lanes;
}

}  // namespace offload
