#include "offload/expert_executor.h"

#include <algorithm>

#include "offload/rank_trace.h"

namespace offload {
namespace {

// Copies of a plan that are issued ahead of the run whose turn it is: enough to keep a link busy while the host issues
// runs, few enough that the host never waits for room in the copy lane's queue while runs could be issued.
constexpr int64_t kCopiesAhead = 32;

// Copies of look-ahead that a prompt's layer issues at once: they keep the link busy while the host issues the ops up
// to the next routing. The others follow these, as the host may have to wait for room in the copy lane's queue.
constexpr size_t kLookaheadAtOnce = 64;

uint64_t mixed_in(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x100000001B3u + (hash >> 47);
}

// Neither waits for a copy of its own: they go to the ops in one call.
bool goes_with(const PlannedRun& a, const PlannedRun& b) {
  return a.where == b.where && !a.copy_first && !b.copy_first;
}

}  // namespace

ExpertExecutor::ExpertExecutor(Backend& backend, Ops* host_ops, const Residency& residency, int rank, int64_t top_k,
                               ExpertCacheOptions options)
    : backend_(backend),
      residency_(residency),
      rank_(rank),
      options_(options),
      slot_bytes_((residency.local_shape().block_bytes() + Arena::kAlignment - 1) / Arena::kAlignment *
                  Arena::kAlignment),
      active_(residency.local_shape().experts) {
  const int64_t experts = residency.local_shape().experts;
  begins_.resize(static_cast<size_t>(experts) + 1);
  runs_.reserve(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) owned_.push_back(std::byte{residency.owns(rank, e)});
  has_all_ = std::all_of(owned_.begin(), owned_.end(), [](std::byte is_owned) { return is_owned == std::byte{1}; });
  if (options_.slots == 0) return;
  cache_ = std::make_unique<ExpertCache>(residency.layers(), experts, options_.slots);
  const bool whole = residency.form() == ShardForm::expert;
  policy_ = std::make_unique<ExpertPolicy>(PolicyOptions{.kind = options_.policy,
                                                         .shape = {residency.layers(), experts, top_k},
                                                         .slots = options_.slots,
                                                         .world = whole ? residency.world() : 1,
                                                         .rank = whole ? rank : 0,
                                                         .lookahead_layers = options_.lookahead_layers,
                                                         .host_permille = options_.host_permille,
                                                         .zero_copy_permille = options_.zero_copy_permille,
                                                         .off_slab_rows_max = kCanonicalRowsMax});
  filling_.reserve(static_cast<size_t>(options_.slots));
  awaited_.reserve(static_cast<size_t>(experts));
  planned_.reserve(static_cast<size_t>(options_.slots));
  if (options_.host_permille == 0) return;
  OFL_ASSERT(host_ops != nullptr);
  host_.emplace(*host_ops);
  host_runs_.reserve(static_cast<size_t>(experts));
}

void ExpertExecutor::forget() {
  if (cache_ == nullptr) return;
  cache_ = std::make_unique<ExpertCache>(residency_.layers(), residency_.local_shape().experts, options_.slots);
  policy_ = std::make_unique<ExpertPolicy>(PolicyOptions(policy_->options()));
  filling_.clear();
  planned_.clear();
  directory_ = {};
}

void ExpertExecutor::set_slab(const Tensor& slab) {
  OFL_ASSERT(slab.bytes() == slab_bytes());
  slab_ = slab;
}

void ExpertExecutor::allocate_staging() {
  if (host_) host_->allocate();
}

// The host buffers that go to the device here are written again only after the next layer's routing has come from it,
// which is behind them on the compute lane.
void ExpertExecutor::run(const RoutedExperts& step) {
  const auto slots = static_cast<size_t>(step.ids.elements());
  ids_.resize(slots);
  rows_.resize(slots);
  out_rows_.resize(slots);
  present_.resize(slots);
  if (backend_.ops().planning()) return plan(step);
  issue_lookahead();
  if (runs_on_device_) return run_on_device(step);

  std::optional<HostSpan> wait(std::in_place, trace_, "wait_routing",
                               TraceSubject{.layer = static_cast<int32_t>(step.layer)});
  backend_.download(step.ids, std::as_writable_bytes(std::span(ids_)));
  for (size_t i = 0; i < slots; ++i) {
    OFL_ASSERT(ids_[i] >= 0 && ids_[i] < residency_.local_shape().experts);
    present_[i] = owned_[static_cast<size_t>(ids_[i])];
    routing_hash_ = mixed_in(routing_hash_, static_cast<uint64_t>(ids_[i]));
  }
  group_by_expert(step.ids.dim(1));
  if (!has_all_) backend_.compute_lane().copy_in(present_, step.present);
  wait.reset();
  if (recorder_ != nullptr && rank_ == 0) recorder_->record(step.layer, phase_, ids_);
  if (cache_ != nullptr)
    run_from_cache(step);
  else
    run_in_place(step);
}

int64_t ExpertExecutor::directory_bytes() const {
  if (!options_.routes_on_device || options_.slots == 0) return 0;
  return residency_.layers() * residency_.local_shape().experts * dtype_bytes(DType::i32);
}

bool ExpertExecutor::could_run_on_device() const {
  return options_.routes_on_device && cache_ != nullptr && policy_->is_complete() && recorder_ == nullptr;
}

void ExpertExecutor::begin_step(const StepStart& start) {
  issue_lookahead();
  phase_ = start.phase;
  continues_ = start.continues;
  runs_on_device_ = start.all_could_run_on_device && could_run_on_device();
  if (runs_on_device_ && !directory_) upload_directory();
}

void ExpertExecutor::upload_directory() {
  wait_for_lookahead(filling_.size());
  const int64_t layers = residency_.layers(), experts = residency_.local_shape().experts;
  std::vector<int32_t> slots;
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t e = 0; e < experts; ++e)
      slots.push_back(static_cast<int32_t>(policy_->slot_of({static_cast<int32_t>(layer), static_cast<int32_t>(e)})));
  directory_ = Tensor(slot_data(options_.slots), DType::i32, {layers, experts});
  backend_.upload(std::as_bytes(std::span(slots)), directory_);
}

void ExpertExecutor::run_on_device(const RoutedExperts& step) {
  const ExpertShape& shape = residency_.local_shape();
  const int64_t row_elements = slot_bytes_ / dtype_bytes(shape.dtype);
  runs_done_ += std::min(step.ids.elements(), shape.experts);
  backend_.ops()(SwigluRoutedArgs{.x = step.x,
                                  .ids = step.ids,
                                  .slab = Tensor(slab_.data(), shape.dtype, {options_.slots, row_elements})
                                              .narrow(1, 0, 3 * shape.intermediate * shape.hidden),
                                  .slots = directory_.narrow(0, step.layer, 1).reshaped({shape.experts}),
                                  .out = step.parts,
                                  .present = step.present,
                                  .intermediate = shape.intermediate,
                                  .rounding = step.rounding,
                                  .math = step.math});
}

ExpertRun ExpertExecutor::run_of(const std::byte* block, int64_t expert) const {
  const int64_t begin = begins_[static_cast<size_t>(expert)];
  return {block, block + residency_.local_shape().gate_up_bytes(), begin,
          begins_[static_cast<size_t>(expert) + 1] - begin};
}

SwigluExpertsArgs ExpertExecutor::args_of(const RoutedExperts& step, std::span<const ExpertRun> runs) const {
  return {.x = step.x,
          .out = step.parts,
          .runs = runs,
          .rows = rows_,
          .out_rows = out_rows_,
          .intermediate = residency_.local_shape().intermediate,
          .weight_dtype = residency_.local_shape().dtype,
          .rounding = step.rounding,
          .math = step.math};
}

void ExpertExecutor::compute(const RoutedExperts& step, std::span<const ExpertRun> runs) {
  if (runs.empty()) return;
  if (!backend_.ops().planning()) runs_done_ += static_cast<int64_t>(runs.size());
  backend_.ops()(args_of(step, runs));
}

void ExpertExecutor::run_in_place(const RoutedExperts& step) {
  runs_.clear();
  for (int64_t e = 0; e < residency_.local_shape().experts; ++e)
    if (begins_[static_cast<size_t>(e)] != begins_[static_cast<size_t>(e) + 1] && residency_.owns(rank_, e))
      runs_.push_back(run_of(residency_.block(rank_, step.layer, e), e));
  compute(step, runs_);
}

void ExpertExecutor::issue_copy(std::string_view name, ExpertKey key, int64_t slot) {
  if (cache_->is_filling(slot)) cache_->end_fill(slot);  // nobody waited for what look-ahead had put there
  cache_->begin_fill(slot, key);
  Lane& lane = backend_.copy_lane();
  const int64_t bytes = residency_.local_shape().block_bytes();
  traced_on_lane(trace_, lane, SimLane::copy, name, {.layer = key.layer, .expert = key.expert, .bytes = bytes}, [&] {
    lane.copy_in({residency_.block(rank_, key.layer, key.expert), static_cast<size_t>(bytes)},
                 Tensor(slot_data(slot), DType::u8, {bytes}));
  });
  lane.record(ready_event(slot));
  ++copies_;
}

// The first `most` of the copies that are planned.
void ExpertExecutor::issue_lookahead(size_t most) {
  const auto end = planned_.begin() + static_cast<std::ptrdiff_t>(std::min(most, planned_.size()));
  for (auto ahead = planned_.begin(); ahead != end; ++ahead) {
    issue_copy("look_ahead", ahead->key, ahead->slot);
    filling_.push_back(*ahead);
  }
  planned_.erase(planned_.begin(), end);
}

// For the first `count` copies of look-ahead that nobody has waited for. The copy lane keeps their order, so the
// compute lane waits for the last of them.
void ExpertExecutor::wait_for_lookahead(size_t count) {
  if (count == 0) return;
  backend_.compute_lane().wait(ready_event(filling_[count - 1].slot));
  for (size_t i = 0; i < count; ++i)
    if (is_under_way(filling_[i])) cache_->end_fill(filling_[i].slot);
  filling_.erase(filling_.begin(), filling_.begin() + static_cast<std::ptrdiff_t>(count));
}

// Whether the slot still awaits this copy: a later plan may have put another expert there.
bool ExpertExecutor::is_under_way(const PlannedCopy& ahead) const {
  return cache_->is_filling(ahead.slot) && cache_->find(ahead.key) == ahead.slot;
}

// How many of them there are up to the last one of `layer`.
size_t ExpertExecutor::lookahead_of(int32_t layer) const {
  const auto last = std::find_if(filling_.rbegin(), filling_.rend(),
                                 [&](const PlannedCopy& ahead) { return ahead.key.layer == layer; });
  return static_cast<size_t>(filling_.rend() - last);
}

void ExpertExecutor::add_run(int32_t layer, const PlannedRun& run) {
  switch (run.where) {
    case RunWhere::slab: {
      const ExpertCache::Pin pin = cache_->pin(run.slot, {layer, run.expert});
      if (run.copy_first) {
        backend_.compute_lane().wait(ready_event(run.slot));
        cache_->end_fill(run.slot);
      }
      runs_.push_back(run_of(slot_data(run.slot), run.expert));
      return;
    }
    case RunWhere::zero_copy:
      ++zero_copies_;
      runs_.push_back(run_of(residency_.block(rank_, layer, run.expert), run.expert));
      return;
    case RunWhere::host:
      host_runs_.push_back(run_of(residency_.block(rank_, layer, run.expert), run.expert));
      return;
  }
}

// Carries out the policy's plan. Copies are issued as early as the plan allows, as soon as the run that reads their
// slot last has been issued, but for kCopiesAhead; a run waits for its own copy alone. What read a slot in earlier
// plans is done: this layer's routing came from behind it on the compute lane. The host computes its share when the
// device has all of its own to do.
void ExpertExecutor::run_from_cache(const RoutedExperts& step) {
  const auto layer = static_cast<int32_t>(step.layer);
  const LayerRouting routing{active_.collect(std::span<const int32_t>(ids_)), step.ids.dim(0), step.visits_left,
                             continues_};
  const LayerPlan plan = policy_->on_routed(step.layer, routing, phase_);
  // Before anything is issued on the compute lane, which the download waits for.
  const auto on_host = [](const PlannedRun& run) { return run.where == RunWhere::host; };
  if (std::any_of(plan.runs.begin(), plan.runs.end(), on_host)) host_->fetch(backend_, step.x);
  wait_for_lookahead(lookahead_of(layer));

  const auto count = static_cast<int64_t>(plan.runs.size());
  const auto run_at = [&](int64_t i) -> const PlannedRun& { return plan.runs[static_cast<size_t>(i)]; };
  const int64_t first_copy =
      std::find_if(plan.runs.begin(), plan.runs.end(), [](const PlannedRun& run) { return run.copy_first; }) -
      plan.runs.begin();
  int64_t copies_issued_to = 0;  // runs below this index have had their copy issued
  const auto issue_copies = [&](int64_t runs_issued) {
    const int64_t end = std::min(count, std::max(runs_issued, first_copy) + kCopiesAhead);
    for (; copies_issued_to < end; ++copies_issued_to) {
      const PlannedRun& run = run_at(copies_issued_to);
      if (run.copy_first && run.after_run >= runs_issued) return;
      if (run.after_run >= 0) backend_.copy_lane().wait(read_event(run.slot));
      if (run.copy_first) issue_copy("copy", {layer, run.expert}, run.slot);
    }
  };
  awaited_.assign(plan.runs.size(), false);  // by a copy into their slot
  for (const PlannedRun& run : plan.runs)
    if (run.after_run >= 0) awaited_[static_cast<size_t>(run.after_run)] = true;
  host_runs_.clear();
  for (int64_t i = 0; i < count;) {
    issue_copies(i);
    runs_.clear();
    const int64_t begin = i;
    do add_run(layer, run_at(i++));
    while (i < count && goes_with(run_at(begin), run_at(i)));
    compute(step, runs_);
    for (int64_t r = begin; r < i; ++r)
      if (awaited_[static_cast<size_t>(r)]) backend_.compute_lane().record(read_event(run_at(r).slot));
  }
  planned_.assign(plan.lookahead.begin(), plan.lookahead.end());
  issue_lookahead(phase_ == Phase::decode ? SIZE_MAX : kLookaheadAtOnce);
  if (host_runs_.empty()) return;
  runs_done_ += static_cast<int64_t>(host_runs_.size());
  host_runs_done_ += static_cast<int64_t>(host_runs_.size());
  host_->run(backend_, args_of(step, host_runs_));
}

// Counting sort of the slots by expert; within an expert, slots stay in order.
void ExpertExecutor::group_by_expert(int64_t top_k) {
  std::fill(begins_.begin(), begins_.end(), 0);
  for (const int32_t id : ids_) ++begins_[static_cast<size_t>(id) + 1];
  for (size_t e = 1; e < begins_.size(); ++e) begins_[e] += begins_[e - 1];
  for (size_t slot = 0; slot < ids_.size(); ++slot) {
    const auto at = static_cast<size_t>(begins_[static_cast<size_t>(ids_[slot])]++);
    rows_[at] = static_cast<int32_t>(static_cast<int64_t>(slot) / top_k);
    out_rows_[at] = static_cast<int32_t>(slot);
  }
  std::rotate(begins_.rbegin(), begins_.rbegin() + 1, begins_.rend());  // each begin has advanced to the next one
  begins_[0] = 0;
}

// The two extremes of routing: every row to the same experts, and rows spread over as many experts as possible.
void ExpertExecutor::plan(const RoutedExperts& step) {
  const int64_t top_k = step.ids.dim(1), slots = step.ids.elements();
  const auto ask = [&](int64_t run_count) {
    runs_.clear();
    for (int64_t i = 0; i < run_count; ++i) {
      const int64_t begin = slots * i / run_count;
      runs_.push_back({this, this, begin, slots * (i + 1) / run_count - begin});
    }
    compute(step, runs_);
    if (host_ && step.ids.dim(0) <= kCanonicalRowsMax) host_->plan(args_of(step, runs_));
  };
  ask(top_k);
  ask(std::min(residency_.local_shape().experts, slots));
  if (directory_bytes() == 0) return;
  directory_ = Tensor(this, DType::i32, {residency_.layers(), residency_.local_shape().experts});
  run_on_device(step);
  directory_ = {};
}

}  // namespace offload
