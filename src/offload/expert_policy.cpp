#include "offload/expert_policy.h"

#include <algorithm>
#include <limits>

namespace offload {
namespace {

// Two slots at least take the copies of a layer in turn, so that one fills while the other is read.
constexpr size_t kRingMin = 2;
constexpr double kNever = std::numeric_limits<double>::infinity();

void check_option(bool good, const char* name, int64_t found, const char* expected) {
  if (!good) throw_error(ErrorCode::usage, "expert policy: {} is {}, expected {}", name, found, expected);
}

}  // namespace

ActiveExperts::ActiveExperts(int64_t experts) : rows_(static_cast<size_t>(experts)) {
  active_.reserve(rows_.size());
}

template <typename Id>
std::span<const ActiveExpert> ActiveExperts::count(std::span<const Id> ids) {
  std::fill(rows_.begin(), rows_.end(), 0);
  active_.clear();
  for (const Id id : ids) {
    OFL_ASSERT(static_cast<size_t>(id) < rows_.size());
    ++rows_[static_cast<size_t>(id)];
  }
  for (size_t e = 0; e < rows_.size(); ++e)
    if (rows_[e] > 0) active_.push_back({static_cast<int32_t>(e), rows_[e]});
  return active_;
}

std::span<const ActiveExpert> ActiveExperts::collect(std::span<const int32_t> ids) {
  return count(ids);
}
std::span<const ActiveExpert> ActiveExperts::collect(std::span<const uint16_t> ids) {
  return count(ids);
}

namespace {

const PolicyOptions& checked(const PolicyOptions& options) {
  const RoutingShape& shape = options.shape;
  check_option(shape.layers > 0 && shape.layers <= kTraceLayersMax, "layers", shape.layers, "1 to 4096");
  check_option(shape.experts > 0 && shape.experts <= kTraceExpertsMax, "experts", shape.experts, "1 to 65536");
  check_option(shape.top_k > 0 && shape.top_k <= shape.experts, "top_k", shape.top_k, "1 to the number of experts");
  check_option(options.slots > 0 && options.slots <= std::numeric_limits<int32_t>::max(), "slots", options.slots,
               "1 or more");
  check_option(options.world > 0, "world", options.world, "1 or more");
  check_option(options.rank >= 0 && options.rank < options.world, "rank", options.rank, "less than world");
  check_option(options.lookahead_layers >= 0 && options.lookahead_layers <= 2, "lookahead_layers",
               options.lookahead_layers, "0, 1 or 2");
  check_option(options.lookahead_copies_max >= 0, "lookahead_copies_max", options.lookahead_copies_max, "0 or more");
  check_option(options.host_permille >= 0 && options.host_permille <= 1000, "host_permille", options.host_permille,
               "0 to 1000");
  check_option(options.zero_copy_permille >= 0 && options.host_permille + options.zero_copy_permille <= 1000,
               "zero_copy_permille", options.zero_copy_permille, "0 to 1000, with host_permille at most 1000 in all");
  check_option(options.prefill_stream_permille >= 0 && options.prefill_stream_permille <= 1000,
               "prefill_stream_permille", options.prefill_stream_permille, "0 to 1000");
  check_option(options.group_stream_permille >= 0 && options.group_stream_permille <= 1000, "group_stream_permille",
               options.group_stream_permille, "0 to 1000");
  check_option(options.rows_per_staged > 0, "rows_per_staged", options.rows_per_staged, "1 or more");
  return options;
}

}  // namespace

ExpertPolicy::ExpertPolicy(const PolicyOptions& options) : options_(checked(options)), forecast_(options.shape) {
  const RoutingShape& shape = options_.shape;
  options_.slots = std::min(options_.slots, std::max<int64_t>(1, owned() * shape.layers));
  slot_of_.assign(static_cast<size_t>(shape.layers * shape.experts), -1);
  slots_.resize(static_cast<size_t>(options_.slots));
  for (int64_t s = options_.slots; s > 0; --s) free_.push_back(static_cast<int32_t>(s - 1));
  ranked_.resize(static_cast<size_t>(shape.layers));
  for (std::vector<Ranked>& list : ranked_) list.reserve(static_cast<size_t>(std::min(options_.slots, owned())));
  runs_.reserve(static_cast<size_t>(owned()));
  missed_.reserve(static_cast<size_t>(owned()));
  lookahead_.reserve(static_cast<size_t>(2 * owned()));
  residents_.reserve(static_cast<size_t>(std::min(options_.slots, owned())));
  ring_.reserve(static_cast<size_t>(std::min(options_.slots, owned())));
}

LayerPlan ExpertPolicy::on_routed(int64_t layer, const LayerRouting& routing, Phase phase) {
  OFL_ASSERT(layer >= 0 && layer < options_.shape.layers);
  is_grouped_ = routing.visits_left > 0 || (layer == layer_ && visits_left_ > 0);
  layer_ = layer;
  rows_ = routing.rows;
  visits_left_ = routing.visits_left;
  continues_ = routing.continues;
  is_complete_ = free_.empty() && options_.slots == owned() * options_.shape.layers;
  ++plan_;
  runs_.clear();
  missed_.clear();
  ring_.clear();
  lookahead_.clear();
  forecast_.observe(layer, routing.active, routing.rows, phase);
  plan_residents(routing);
  plan_off_slab(phase);
  plan_copies(phase);
  plan_lookahead(phase);
  rank_layer(layer);
  const auto runs_due = std::count_if(routing.active.begin(), routing.active.end(),
                                      [&](const ActiveExpert& one) { return owns(one.expert); });
  OFL_ASSERT(static_cast<size_t>(runs_due) == runs_.size());
  return {runs_, lookahead_};
}

// The layer's list loses the active ones for the time of the plan, so nothing can take their slots.
void ExpertPolicy::plan_residents(const LayerRouting& routing) {
  for (const ActiveExpert& one : routing.active) {
    if (!owns(one.expert)) continue;
    const ExpertKey key{static_cast<int32_t>(layer_), one.expert};
    const int32_t s = slot_of_[index(key)];
    if (s < 0) {
      missed_.push_back({delay(key), one.expert, one.rows});
      continue;
    }
    Slot& resident = slot(s);
    OFL_ASSERT(resident.key == key && resident.plan != plan_);
    resident.plan = plan_;
    resident.last_run = static_cast<int32_t>(runs_.size());
    runs_.push_back({.expert = one.expert, .rows = one.rows, .slot = s});
  }
  if (is_complete_) return;  // nothing will leave, so nothing needs a rank
  std::vector<Ranked>& list = ranked_[static_cast<size_t>(layer_)];
  std::erase_if(list, [&](const Ranked& ranked) { return slot(ranked.slot).plan == plan_; });
  for (Ranked& ranked : list) {
    slot(ranked.slot).staged = false;
    ranked = ranked_now(ranked.slot);
  }
  std::make_heap(list.begin(), list.end(), IsNeededBefore());
}

void ExpertPolicy::plan_off_slab(Phase phase) {
  // What stays longest unneeded comes first.
  std::sort(missed_.begin(), missed_.end(), [](const Candidate& a, const Candidate& b) {
    return a.delay != b.delay ? a.delay > b.delay : a.expert < b.expert;
  });
  if (phase != Phase::decode || options_.host_permille + options_.zero_copy_permille == 0) return;
  // A free slot costs no resident: as many as there are take those that will return soonest.
  size_t kept = 0;
  const size_t missed = missed_.size() - std::min(missed_.size(), free_.size());
  // What is due accrues with every miss, so that the long-run share is exact however few misses a layer has.
  host_due_ += options_.host_permille * static_cast<int64_t>(missed);
  zero_copy_due_ += options_.zero_copy_permille * static_cast<int64_t>(missed);
  for (size_t i = 0; i < missed; ++i) {
    const Candidate one = missed_[i];
    int64_t* due = host_due_ >= 1000 ? &host_due_ : zero_copy_due_ >= 1000 ? &zero_copy_due_ : nullptr;
    if (due == nullptr || one.rows > options_.off_slab_rows_max) {
      missed_[kept++] = one;
      continue;
    }
    *due -= 1000;
    runs_.push_back(
        {.expert = one.expert, .rows = one.rows, .where = due == &host_due_ ? RunWhere::host : RunWhere::zero_copy});
  }
  missed_.erase(missed_.begin() + static_cast<std::ptrdiff_t>(kept),
                missed_.begin() + static_cast<std::ptrdiff_t>(missed));
  host_due_ = std::min<int64_t>(host_due_, 1000);
  zero_copy_due_ = std::min<int64_t>(zero_copy_due_, 1000);
}

void ExpertPolicy::plan_copies(Phase phase) {
  PolicyCounts& counts = counts_[phase == Phase::decode ? 1 : 0];
  for (const PlannedRun& run : runs_) {
    if (run.where != RunWhere::slab) {
      ++counts.off_slab;
      continue;
    }
    ++counts.hits;
    Slot& resident = slot(run.slot);
    if (resident.staged) ++counts.lookahead_used;
    resident.staged = false;
    resident.used_at = ++uses_;
  }
  counts.misses += static_cast<int64_t>(missed_.size());
  if (missed_.empty()) return;
  gather_ring(missed_.size(), phase);
  for (size_t i = 0; i < missed_.size(); ++i) {
    const int32_t s = ring_[i % ring_.size()];
    Slot& target = slot(s);
    const int32_t after = target.plan == plan_ ? target.last_run : -1;
    const ExpertKey key{static_cast<int32_t>(layer_), missed_[i].expert};
    const ExpertKey evicted = target.key;
    place(s, key);
    target.plan = plan_;
    target.last_run = static_cast<int32_t>(runs_.size());
    target.used_at = ++uses_;
    runs_.push_back({.expert = key.expert,
                     .rows = missed_[i].rows,
                     .copy_first = true,
                     .slot = s,
                     .after_run = after,
                     .evicts = evicted});
  }
}

// The slots that `count` copies go through: free ones, then victims, then those of the plan's own residents.
void ExpertPolicy::gather_ring(size_t count, Phase phase) {
  const bool lru = options_.kind == PolicyKind::lru;
  const size_t victims_max = !lru && !returns() && phase == Phase::prefill
                                 ? std::max<size_t>(kRingMin, static_cast<size_t>(stream_slots()))
                                 : count;
  size_t victims = 0;
  while (ring_.size() < count) {
    if (!free_.empty()) {
      ring_.push_back(free_.back());
      free_.pop_back();
      continue;
    }
    if (victims == victims_max) break;
    // Beyond the ring's minimum, a victim must be needed later than the expert that would stay in its place.
    const bool must_gain = !lru && phase == Phase::decode && ring_.size() >= kRingMin;
    const Ranked stays{missed_[count - 1 - ring_.size()].delay, -1};
    const int32_t s = take_victim(must_gain ? delay_now(stays, layer_) : -kNever);
    if (s < 0) break;
    ring_.push_back(s);
    ++victims;
  }
  const size_t ring_min = lru ? count : std::min(count, kRingMin);
  if (ring_.size() < ring_min) {
    residents_.clear();
    for (const PlannedRun& run : runs_)
      if (run.where == RunWhere::slab) residents_.push_back(ranked_now(run.slot));
    std::sort(residents_.begin(), residents_.end(), IsNeededBefore());
    for (; ring_.size() < ring_min && !residents_.empty(); residents_.pop_back())
      ring_.push_back(residents_.back().slot);
  }
  OFL_ASSERT(!ring_.empty());
}

// Puts the plan's experts that are still in a slot back into the layer's list.
void ExpertPolicy::rank_layer(int64_t layer) {
  if (is_complete_) return;
  for (const PlannedRun& run : runs_)
    if (run.where == RunWhere::slab && slot(run.slot).key.expert == run.expert)
      insert_ranked(layer, ranked_now(run.slot));
}

void ExpertPolicy::plan_lookahead(Phase phase) {
  if (options_.lookahead_layers == 0 || options_.shape.layers == 1) return;
  if (phase == Phase::decode) return look_ahead_in_decode();
  // Behind the end of a prompt no expert of a chunk is wanted: decode would wait for copies that it does not need.
  const int64_t layers_left = continues_ ? options_.shape.layers - 1 : options_.shape.layers - 1 - layer_;
  // A layer that returns gets a slot for each of its experts first.
  int64_t room = options_.slots - (returns() ? owned() : 0);
  for (int64_t ahead = 1; ahead <= std::min<int64_t>(options_.lookahead_layers, layers_left); ++ahead)
    room = look_ahead_in_prefill((layer_ + ahead) % options_.shape.layers, staged_most(), room);
}

// Stages up to `budget` experts of the layer in place of others and more in free slots, at most `room` in all. Returns
// the room left for layers further ahead: none while this layer's next visit has more to stage.
int64_t ExpertPolicy::look_ahead_in_prefill(int64_t layer, int64_t budget, int64_t room) {
  missed_.clear();
  int64_t staged = 0;
  for (int64_t e = options_.rank; e < options_.shape.experts; e += options_.world) {
    const ExpertKey key{static_cast<int32_t>(layer), static_cast<int32_t>(e)};
    const int32_t s = slot_of_[index(key)];
    if (s >= 0) {
      staged += slot(s).staged ? 1 : 0;
    } else if (forecast_.prefill_chance(key) >= options_.lookahead_chance_min) {
      missed_.push_back({delay(key), key.expert, 0});
    }
  }
  std::sort(missed_.begin(), missed_.end(), is_candidate_before);
  // A share for each visit: what the next chunk misses itself must not wait behind all of another layer.
  int64_t due = (static_cast<int64_t>(missed_.size()) + visits_left_) / (visits_left_ + 1);
  int64_t displaced = staged;
  for (const Candidate& one : missed_) {
    if (staged >= room || (displaced >= budget && free_.empty())) break;
    if (due-- == 0) return 0;
    displaced += free_.empty() ? 1 : 0;
    if (!stage({static_cast<int32_t>(layer), one.expert}, 0)) break;
    ++staged;
    ++counts_[0].copies_lookahead;
  }
  return room - staged;
}

void ExpertPolicy::look_ahead_in_decode() {
  const auto next = static_cast<int32_t>((layer_ + 1) % options_.shape.layers);
  missed_.clear();
  forecast_.for_each_follower([&](int32_t expert, double chance) {
    const ExpertKey key{next, expert};
    if (owns(expert) && chance >= options_.lookahead_chance_min && slot_of_[index(key)] < 0)
      missed_.push_back({1 / chance - 1, expert, 0});
  });
  std::sort(missed_.begin(), missed_.end(), is_candidate_before);
  if (static_cast<int64_t>(missed_.size()) > options_.lookahead_copies_max)
    missed_.resize(static_cast<size_t>(options_.lookahead_copies_max));
  for (const Candidate& one : missed_) {
    if (!stage({next, one.expert}, one.delay)) break;
    ++counts_[1].copies_lookahead;
  }
}

bool ExpertPolicy::stage(ExpertKey key, double delay) {
  int32_t s = -1;
  const Ranked ranked{options_.kind == PolicyKind::lru ? -static_cast<double>(uses_ + 1) : delay, 0};
  if (!free_.empty()) {
    s = free_.back();
    free_.pop_back();
  } else {
    s = take_victim(delay_now(ranked, key.layer));
  }
  if (s < 0) return false;
  Slot& target = slot(s);
  const ExpertKey evicted = target.key;
  place(s, key);
  target.plan = plan_;
  target.last_run = -1;
  target.staged = true;
  target.used_at = ++uses_;
  insert_ranked(key.layer, {ranked.delay, s});
  lookahead_.push_back({key, s, evicted});
  return true;
}

bool ExpertPolicy::is_candidate_before(const Candidate& a, const Candidate& b) {
  return a.delay != b.delay ? a.delay < b.delay : a.expert < b.expert;
}

ExpertPolicy::Ranked ExpertPolicy::ranked_now(int32_t s) {
  const Slot& held = slot(s);
  return {options_.kind == PolicyKind::lru ? -static_cast<double>(held.used_at) : delay(held.key), s};
}

// Layer visits until the expert is expected, after its layer's next visit.
double ExpertPolicy::delay(ExpertKey key) const {
  return 1 / forecast_.chance(key) - 1;
}

// The same as seen from the current layer, in steps: the layer just visited comes back last, or next of all.
double ExpertPolicy::delay_now(const Ranked& ranked, int64_t layer) const {
  if (returns() && layer == layer_) return std::numeric_limits<double>::lowest();
  if (options_.kind == PolicyKind::lru) return ranked.delay;
  const int64_t layers = options_.shape.layers;
  const int64_t ahead = (layer - layer_ + layers - 1) % layers + 1;
  return ranked.delay + static_cast<double>(ahead) / static_cast<double>(layers);
}

// Takes the slot that is needed last of all that may go, if that is later than `delay_min`; -1 if there is none.
int32_t ExpertPolicy::take_victim(double delay_min) {
  int64_t from = -1;
  double worst = delay_min;
  for (size_t l = 0; l < ranked_.size(); ++l) {
    if (ranked_[l].empty()) continue;
    const double d = delay_now(ranked_[l].front(), static_cast<int64_t>(l));
    if (d <= worst) continue;
    worst = d;
    from = static_cast<int64_t>(l);
  }
  if (from < 0) return -1;
  std::vector<Ranked>& list = ranked_[static_cast<size_t>(from)];
  const int32_t s = list.front().slot;
  if (slot(s).plan == plan_) return -1;
  std::pop_heap(list.begin(), list.end(), IsNeededBefore());
  list.pop_back();
  return s;
}

void ExpertPolicy::insert_ranked(int64_t layer, Ranked ranked) {
  std::vector<Ranked>& list = ranked_[static_cast<size_t>(layer)];
  OFL_ASSERT(list.size() < list.capacity());
  list.push_back(ranked);
  std::push_heap(list.begin(), list.end(), IsNeededBefore());
}

void ExpertPolicy::place(int32_t s, ExpertKey key) {
  Slot& target = slot(s);
  if (target.key.exists()) {
    OFL_ASSERT(slot_of_[index(target.key)] == s);
    slot_of_[index(target.key)] = -1;
  }
  OFL_ASSERT(slot_of_[index(key)] < 0);
  slot_of_[index(key)] = s;
  target.key = key;
  target.staged = false;
}

void ExpertPolicy::check() const {
  size_t held = 0, listed = 0;
  for (size_t s = 0; s < slots_.size(); ++s) {
    if (!slots_[s].key.exists()) continue;
    ++held;
    OFL_ASSERT(slot_of_[index(slots_[s].key)] == static_cast<int32_t>(s) && owns(slots_[s].key.expert));
  }
  for (size_t l = 0; l < ranked_.size(); ++l) {
    listed += ranked_[l].size();
    for (const Ranked& ranked : ranked_[l])
      OFL_ASSERT(slots_[static_cast<size_t>(ranked.slot)].key.layer == static_cast<int32_t>(l));
    OFL_ASSERT(std::is_heap(ranked_[l].begin(), ranked_[l].end(), IsNeededBefore()));
  }
  const auto mapped = std::count_if(slot_of_.begin(), slot_of_.end(), [](int32_t s) { return s >= 0; });
  OFL_ASSERT(held == listed && held == static_cast<size_t>(mapped) && held + free_.size() == slots_.size());
}

// What the current layer and each of those that it looks ahead to may turn over.
int64_t ExpertPolicy::stream_slots() const {
  const int64_t permille = is_grouped_ ? options_.group_stream_permille : options_.prefill_stream_permille;
  return options_.slots * permille / 1000 / (options_.lookahead_layers + 1);
}

// Of one layer ahead.
int64_t ExpertPolicy::staged_most() const {
  return std::max(stream_slots(), std::min(rows_ / options_.rows_per_staged, options_.slots / 3));
}

}  // namespace offload
