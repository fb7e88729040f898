// ExpertPolicy: which experts of a layer run where and in what order, which copies that takes, what they evict, and
// what is staged for the layers to come.
//
// A pure state machine: plans are functions of the options and of the routing handed in so far. No clock, no I/O, no
// device. It keeps the contents that the slots have once everything planned has been carried out; ExpertCache holds
// the executor to it. One per rank (or one for all ranks that hold slices, as they decide alike). Allocates nothing
// after construction.
#ifndef OFFLOAD_OFFLOAD_EXPERT_POLICY_H_
#define OFFLOAD_OFFLOAD_EXPERT_POLICY_H_

#include <cstdint>
#include <span>
#include <vector>

#include "offload/expert_cache.h"
#include "offload/expert_forecast.h"
#include "offload/routing_trace.h"

namespace offload {

enum class RunWhere : uint8_t {
  slab,       // on the device, out of a slot
  zero_copy,  // on the device, reading the host shard over the link
  host,       // on the CPU, where the expert lies
};

// One active expert. `rows` rows chose it.
struct PlannedRun {
  int32_t expert = 0;  // global id
  int32_t rows = 0;
  RunWhere where = RunWhere::slab;
  bool copy_first = false;  // a copy of the expert into `slot` precedes the run
  int32_t slot = -1;        // slab only
  int32_t after_run = -1;   // the copy waits for this earlier run of the same plan, the slot's last reader; -1: for
                            // whatever read the slot in earlier plans
  ExpertKey evicts{};       // what the copy overwrites, if anything
};

// A copy for a later layer, issued after all copies of the runs. Waits for what read the slot in earlier plans.
struct PlannedCopy {
  ExpertKey key;
  int32_t slot = -1;
  ExpertKey evicts;
};

// Valid until the next call of on_routed. The copy lane issues the copies of `runs` in their order, then `lookahead`.
// Residents come first in `runs`, then what runs on the host or by zero-copy, then what must be copied.
// A slot is read by `runs` in their order; with more experts than slots, a slot serves several of them in turn.
struct LayerPlan {
  std::span<const PlannedRun> runs;
  std::span<const PlannedCopy> lookahead;
};

// The routing of one layer in one step, over all its rows.
struct LayerRouting {
  std::span<const ActiveExpert> active;  // distinct, of all ranks, in any order
  int64_t rows = 0;
  int64_t visits_left = 0;  // routings of the same layer that come next: other chunks of a prompt
  bool continues = false;   // behind the last layer comes the first one again, with more of the prompt
};

// Distinct active experts of ids [rows, top_k], by ascending id. Owns the buffers; allocates at construction only.
class ActiveExperts {
 public:
  explicit ActiveExperts(int64_t experts);
  // An id may stand in a row twice; it counts twice and is listed once. REQUIRES: ids in range.
  std::span<const ActiveExpert> collect(std::span<const int32_t> ids);
  std::span<const ActiveExpert> collect(std::span<const uint16_t> ids);

 private:
  template <typename Id>
  std::span<const ActiveExpert> count(std::span<const Id> ids);

  std::vector<int32_t> rows_;
  std::vector<ActiveExpert> active_;
};

enum class PolicyKind : uint8_t {
  lru,       // least recently used goes; the yardstick
  adaptive,  // whatever is expected to be needed last goes
};

struct PolicyOptions {
  PolicyKind kind = PolicyKind::adaptive;
  RoutingShape shape;
  int64_t slots = 0;  // >= 1
  // This rank owns the experts with id % world == rank. Slices: world = 1, every rank holds a part of all.
  int64_t world = 1, rank = 0;
  int lookahead_layers = 1;  // 0, 1 or 2; decode looks one layer ahead at most
  // Decode look-ahead: experts of at least this learned chance, and so many per layer.
  double lookahead_chance_min = 0.5;
  int64_t lookahead_copies_max = 4;
  // Share of the missed decode experts with at most `off_slab_rows_max` rows that run off the slab, in 1/1000. They are
  // the missed ones least expected to return, and they are not copied. Those that a free slot takes do not count.
  int64_t host_permille = 0, zero_copy_permille = 0;
  int64_t off_slab_rows_max = 8;  // the canonical order of the expert FFN holds up to here
  // Share of the slots that prefill may turn over, in 1/1000: its layers and their look-ahead stream through these, and
  // a look-ahead through more where rows_per_staged says so.
  // What is staged for a layer need only keep the link busy until that layer is routed; every slot beyond costs
  // residents.
  int64_t prefill_stream_permille = 200;
  // The same while a layer is visited by chunk after chunk: the next one should be there when its turn comes. The layer
  // itself may turn over all: what it keeps is needed again at once. docs/simulation.md has both shares tried.
  int64_t group_stream_permille = 500;
  // A chunk has at least one expert staged for so many of its rows, in up to a third of the slots: the more rows, the
  // longer it takes until the next layer is routed.
  int64_t rows_per_staged = 64;
};

struct PolicyCounts {
  int64_t hits = 0, misses = 0;  // over slab runs; a run that look-ahead had staged is a hit
  int64_t off_slab = 0;
  int64_t copies_lookahead = 0, lookahead_used = 0;

  int64_t copies() const { return misses + copies_lookahead; }
};

class ExpertPolicy {
 public:
  // Throws Error{usage} that names an option out of range.
  explicit ExpertPolicy(const PolicyOptions& options);

  // REQUIRES: routing.active is distinct and in range.
  LayerPlan on_routed(int64_t layer, const LayerRouting& routing, Phase phase);

  const PolicyOptions& options() const { return options_; }
  // Whether every expert of this rank had a slot when the last plan began: nothing is copied or evicted any more.
  bool is_complete() const { return is_complete_; }
  bool owns(int64_t expert) const { return expert % options_.world == options_.rank; }
  // The slot in which `key` lies after everything planned, or -1.
  int64_t slot_of(ExpertKey key) const { return slot_of_[index(key)]; }
  // Asserts that slots, directory and lists agree; linear in their sizes.
  void check() const;
  const PolicyCounts& counts(Phase phase) const { return counts_[phase == Phase::decode ? 1 : 0]; }

 private:
  // A resident of a layer that may be evicted. The layer's list is a heap with the next to go in front.
  struct Ranked {
    double delay;  // adaptive: expected visits of its layer until it is needed, the next one being 0
    int32_t slot;
  };
  struct IsNeededBefore {
    bool operator()(const Ranked& a, const Ranked& b) const {
      return a.delay != b.delay ? a.delay < b.delay : a.slot < b.slot;
    }
  };
  struct Slot {
    ExpertKey key;
    int64_t used_at = 0;    // running number of its last use, for lru
    int64_t plan = -1;      // the last plan that uses it
    int32_t last_run = -1;  // in that plan
    bool staged = false;    // by look-ahead, and not used yet
  };

  struct Candidate {
    double delay;
    int32_t expert, rows;
  };

  size_t index(ExpertKey key) const { return static_cast<size_t>(key.layer * options_.shape.experts + key.expert); }
  Slot& slot(int32_t s) { return slots_[static_cast<size_t>(s)]; }
  static bool is_candidate_before(const Candidate& a, const Candidate& b);
  Ranked ranked_now(int32_t s);
  double delay(ExpertKey key) const;
  double delay_now(const Ranked& ranked, int64_t layer) const;
  void place(int32_t s, ExpertKey key);
  void rank_layer(int64_t layer);
  void insert_ranked(int64_t layer, Ranked ranked);
  int64_t layer_of_victim() const;
  int32_t take_victim(double delay_min);

  void plan_residents(const LayerRouting& routing);
  void plan_off_slab(Phase phase);
  void plan_copies(Phase phase);
  void gather_ring(size_t count, Phase phase);
  void plan_lookahead(Phase phase);
  int64_t look_ahead_in_prefill(int64_t layer, int64_t budget, int64_t room);
  void look_ahead_in_decode();
  bool stage(ExpertKey key, double delay);
  int64_t stream_slots() const;
  int64_t staged_most() const;
  bool returns() const { return visits_left_ > 0; }
  int64_t owned() const { return (options_.shape.experts - options_.rank + options_.world - 1) / options_.world; }

  PolicyOptions options_;
  ExpertForecast forecast_;
  PolicyCounts counts_[2];
  int64_t layer_ = 0, plan_ = 0, uses_ = 0;
  int64_t rows_ = 0, visits_left_ = 0;        // of the current plan's routing
  bool continues_ = false;                    // see LayerRouting
  bool is_grouped_ = false;                   // its layer is visited by several chunks in turn
  bool is_complete_ = false;                  // every expert of this rank has a slot, for good
  int64_t host_due_ = 0, zero_copy_due_ = 0;  // in 1/1000 of a run
  std::vector<int32_t> slot_of_;              // [layers, experts] -> slot or -1
  std::vector<Slot> slots_;
  std::vector<int32_t> free_;
  std::vector<std::vector<Ranked>> ranked_;  // by layer
  std::vector<PlannedRun> runs_;
  std::vector<PlannedCopy> lookahead_;
  std::vector<Candidate> missed_;  // of the current plan; then of a layer to look ahead to
  std::vector<Ranked> residents_;  // of the current plan
  std::vector<int32_t> ring_;      // slots that the current plan's copies go through in turn
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_EXPERT_POLICY_H_
