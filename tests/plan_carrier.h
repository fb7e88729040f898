// PlanCarrier: carries plans out on a make-believe device, to prove that their order is enough.
//
// Two lanes, copies and runs, each in order, and nothing else keeps them together but what a plan states: a copy waits
// for its slot's last reader, a run for its copy. A seeded draw picks the lane that moves, so that copies run far ahead
// of the runs, and runs far ahead of what the host has planned. At each run the slot must hold the run's expert.
#ifndef OFFLOAD_TESTS_PLAN_CARRIER_H_
#define OFFLOAD_TESTS_PLAN_CARRIER_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "core/base.h"
#include "offload/expert_cache.h"
#include "offload/expert_policy.h"

namespace offload {

class PlanCarrier {
 public:
  PlanCarrier(const PolicyOptions& options, uint64_t seed)
      : options_(options),
        cache_(options.shape.layers, options.shape.experts, options.slots),
        contents_(static_cast<size_t>(options.slots)),
        last_reader_(contents_.size(), -1),
        last_copy_(contents_.size(), -1),
        state_(seed) {}

  // Checks the plan against the routing that asked for it and puts it on the lanes. "" or what is wrong.
  std::string issue(int64_t layer, const LayerRouting& routing, const LayerPlan& plan) {
    for (size_t s = 0; s < contents_.size(); ++s)  // the copies of earlier plans: in order before anything from here on
      if (cache_.state(static_cast<int64_t>(s)) == ExpertCache::State::filling)
        cache_.end_fill(static_cast<int64_t>(s));
    std::set<int32_t> due;
    int64_t rows_due = 0, rows_run = 0;
    for (const ActiveExpert& one : routing.active)
      if (one.expert % options_.world == options_.rank) {
        due.insert(one.expert);
        rows_due += one.rows;
      }
    std::vector<int64_t> issued;  // by run of the plan: number on the run lane
    bool copies_began = false;
    for (const PlannedRun& run : plan.runs) {
      const ExpertKey key{static_cast<int32_t>(layer), run.expert};
      if (due.erase(run.expert) != 1) return fmt::format("expert {} runs twice or was not asked for", run.expert);
      rows_run += run.rows;
      if (run.where != RunWhere::slab) {
        if (run.copy_first || run.slot >= 0) return "a run off the slab has a slot";
        issued.push_back(-1);
        continue;
      }
      if (run.copy_first) {
        copies_began = true;
        const int64_t stated = run.after_run < 0 ? -1 : issued.at(static_cast<size_t>(run.after_run));
        const std::string fault = copy(key, run.slot, run.evicts);
        if (!fault.empty()) return fault;
        const int64_t reader = last_reader_[static_cast<size_t>(run.slot)];
        if (stated >= 0 ? stated != reader : reader >= static_cast<int64_t>(runs_issued_) - in_plan(issued))
          return fmt::format("expert {}: the copy's last reader in the plan is wrong", run.expert);
      } else if (copies_began) {
        return "a resident runs after a copy";
      }
      if (cache_.find(key) != run.slot) return fmt::format("expert {} is not in slot {}", run.expert, run.slot);
      const ExpertCache::Pin pin = cache_.pin(run.slot, key);
      if (run.copy_first) cache_.end_fill(run.slot);  // the run waits for the copy
      last_reader_[static_cast<size_t>(run.slot)] = static_cast<int64_t>(runs_issued_);
      issued.push_back(static_cast<int64_t>(runs_issued_++));
      runs_.push_back({key, run.slot, last_copy_[static_cast<size_t>(run.slot)]});
    }
    if (!due.empty()) return fmt::format("expert {} does not run", *due.begin());
    if (rows_run != rows_due) return fmt::format("{} rows run, {} are due", rows_run, rows_due);
    for (const PlannedCopy& ahead : plan.lookahead) {
      const auto used = [&](const PlannedRun& run) { return run.slot == ahead.slot; };
      if (std::any_of(plan.runs.begin(), plan.runs.end(), used)) return "look-ahead takes a slot of the current plan";
      if (ahead.key.layer == layer) return "look-ahead for the current layer";
      const std::string fault = copy(ahead.key, ahead.slot, ahead.evicts);
      if (!fault.empty()) return fault;
    }
    cache_.check();
    return "";
  }

  // Moves the lanes at random; all the way to their ends with `drain`. "" or what is wrong.
  std::string move(bool drain) {
    while (!runs_.empty() || !copies_.empty()) {
      if (!drain && draw() % 8 == 0) return "";
      const bool copy_can = !copies_.empty() && copies_.front().after_run < static_cast<int64_t>(runs_done_);
      const bool run_can = !runs_.empty() && runs_.front().after_copy < static_cast<int64_t>(copies_done_);
      if (!copy_can && !run_can) return "both lanes wait for ever";
      if (copy_can && (!run_can || draw() % 2 == 0)) {
        contents_[static_cast<size_t>(copies_.front().slot)] = copies_.front().key;
        copies_.pop_front();
        ++copies_done_;
      } else {
        const Run run = runs_.front();
        if (contents_[static_cast<size_t>(run.slot)] != run.key)
          return fmt::format("layer {} expert {} ran on the content of layer {} expert {}", run.key.layer,
                             run.key.expert, contents_[static_cast<size_t>(run.slot)].layer,
                             contents_[static_cast<size_t>(run.slot)].expert);
        runs_.pop_front();
        ++runs_done_;
      }
    }
    return "";
  }

  int64_t find(ExpertKey key) const { return cache_.find(key); }
  uint64_t copies_issued() const { return copies_issued_; }

 private:
  struct Copy {
    ExpertKey key;
    int32_t slot;
    int64_t after_run;
  };
  struct Run {
    ExpertKey key;
    int32_t slot;
    int64_t after_copy;
  };

  static int64_t in_plan(const std::vector<int64_t>& issued) {
    return std::count_if(issued.begin(), issued.end(), [](int64_t i) { return i >= 0; });
  }

  std::string copy(ExpertKey key, int32_t slot, ExpertKey evicts) {
    if (slot < 0 || slot >= cache_.slots()) return fmt::format("slot {} does not exist", slot);
    if (cache_.find(key) >= 0) return fmt::format("expert {} is copied though it lies in a slot", key.expert);
    if (cache_.state(slot) != ExpertCache::State::free && !cache_.evictable(slot))
      return fmt::format("slot {} may not be evicted", slot);
    if (cache_.begin_fill(slot, key) != evicts) return fmt::format("slot {} held another expert than stated", slot);
    last_copy_[static_cast<size_t>(slot)] = static_cast<int64_t>(copies_issued_++);
    copies_.push_back({key, slot, last_reader_[static_cast<size_t>(slot)]});
    return "";
  }

  uint64_t draw() {  // xorshift64
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 11;
  }

  PolicyOptions options_;
  ExpertCache cache_;
  std::vector<ExpertKey> contents_;  // what the device's slots really hold
  std::vector<int64_t> last_reader_, last_copy_;
  std::deque<Copy> copies_;
  std::deque<Run> runs_;
  uint64_t runs_issued_ = 0, runs_done_ = 0, copies_issued_ = 0, copies_done_ = 0;
  uint64_t state_;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_PLAN_CARRIER_H_
