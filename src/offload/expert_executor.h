// ExpertExecutor: turns one layer's routing into runs of experts, each expert of this rank once, and has the ops run
// them: in place out of the host shard, or as a policy plans it: out of a cache of device slots that it fills through
// the copy lane, by the device's ops reading the host shard, or by the host's cores.
//
// The device works on its lanes while the host plans: nothing here waits for it but the download of a layer's routing
// and, when the host computes experts of the layer, of their rows.
// Confined to its rank's thread. Allocates nothing after its first planning run of the largest step.
#ifndef OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_
#define OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_

#include <memory>
#include <optional>
#include <vector>

#include "core/backend.h"
#include "core/canonical.h"
#include "core/experts.h"
#include "offload/expert_cache.h"
#include "offload/expert_policy.h"
#include "offload/host_experts.h"
#include "offload/residency.h"
#include "offload/routing_trace.h"

namespace offload {

class RankTrace;

struct ExpertCacheOptions {
  int64_t slots = 0;  // 0: no cache, experts run where they lie
  PolicyKind policy = PolicyKind::adaptive;
  int lookahead_layers = 1;
  // Shares of the decode experts that miss the slots and run where they lie: by the host's cores, or by the device's
  // ops, which then must be able to read the host shards. See PolicyOptions.
  int64_t host_permille = 0, zero_copy_permille = 0;
  // Once every expert of every rank has a slot, the device reads a layer's routing itself and the host waits for none.
  // What it then runs is not counted as hits, nor is the routing part of the hash.
  bool routes_on_device = false;
};

class ExpertExecutor final : public ExpertRunner {
 public:
  // Backend, host_ops and residency outlive the executor. `host_ops`: ops on host memory for this thread alone, whose
  // scratch the executor provides; null when no expert runs on the host. `top_k`: experts per row.
  // REQUIRES: host_ops when host_permille is above 0.
  ExpertExecutor(Backend& backend, Ops* host_ops, const Residency& residency, int rank, int64_t top_k,
                 ExpertCacheOptions options);

  // Bytes of the slab that set_slab() wants, the slots and what the device finds them by; 0 without a cache.
  int64_t slab_bytes() const { return options_.slots * slot_bytes_ + directory_bytes(); }
  // Slots that fit a slab of so many bytes.
  int64_t slots_in(int64_t slab_bytes) const { return (slab_bytes - directory_bytes()) / slot_bytes_; }
  // Events of the backend that the executor uses: 0..events()-1.
  int events() const { return static_cast<int>(2 * options_.slots); }
  // U8 [slab_bytes()]; before the first step of a cache.
  void set_slab(const Tensor& slab);
  // Host memory that allocate_staging() takes: rows of experts that the host computes. REQUIRES: planned.
  int64_t staging_bytes() const { return host_ ? host_->bytes() : 0; }
  void allocate_staging();

  // Null: nothing is recorded. The trace outlives the executor.
  void set_trace(RankTrace* trace) { trace_ = trace; }
  // Null: no routing is recorded. The recorder outlives its use, gets the routing from rank 0 and keeps the others'
  // hosts looking at theirs.
  void set_recorder(RoutingRecorder* recorder) { recorder_ = recorder; }

  // Whether nothing will be copied or evicted any more, so that the host need not see a step's routing.
  bool could_run_on_device() const;

  struct StepStart {
    Phase phase = Phase::decode;           // which rules the policy goes by
    bool continues = false;                // another step of the same prompt comes next
    bool all_could_run_on_device = false;  // all ranks, when the step before ended
  };
  // REQUIRES: at most kCanonicalRowsMax rows of decode.
  void begin_step(const StepStart& start);

  // The slots and what the policy learned are as before the first step. Allocates, as measurements alone ask for it.
  // REQUIRES: the lanes are drained.
  void forget();

  void run(const RoutedExperts& step) override;
  bool runs_on_device() const override { return runs_on_device_; }
  bool has_all() const override { return has_all_; }
  DType parts_dtype(DType activations) const override {
    return residency_.form() == ShardForm::slice && residency_.world() > 1 ? DType::f32 : activations;
  }

  // Of experts computed so far: each run of one expert counts its weights once.
  int64_t expert_bytes() const { return runs_done_ * residency_.local_shape().block_bytes(); }
  // The part of it that the host's cores computed for the device.
  int64_t host_expert_bytes() const { return host_runs_done_ * residency_.local_shape().block_bytes(); }
  int64_t copied_bytes() const { return copies_ * residency_.local_shape().block_bytes(); }
  // Of experts that the device read where they lie.
  int64_t zero_copy_bytes() const { return zero_copies_ * residency_.local_shape().block_bytes(); }
  // Null without a cache.
  const ExpertPolicy* policy() const { return policy_.get(); }
  // A number of all routings so far; equal on all ranks or something is wrong.
  uint64_t routing_hash() const { return routing_hash_; }

 private:
  void plan(const RoutedExperts& step);
  void group_by_expert(int64_t top_k);
  void run_in_place(const RoutedExperts& step);
  void run_from_cache(const RoutedExperts& step);
  void run_on_device(const RoutedExperts& step);
  int64_t directory_bytes() const;
  void upload_directory();
  void issue_copy(std::string_view name, ExpertKey key, int64_t slot);
  void add_run(int32_t layer, const PlannedRun& run);
  ExpertRun run_of(const std::byte* block, int64_t expert) const;
  SwigluExpertsArgs args_of(const RoutedExperts& step, std::span<const ExpertRun> runs) const;
  void compute(const RoutedExperts& step, std::span<const ExpertRun> runs);
  void issue_lookahead(size_t most = SIZE_MAX);
  void wait_for_lookahead(size_t count);
  bool is_under_way(const PlannedCopy& ahead) const;
  size_t lookahead_of(int32_t layer) const;
  std::byte* slot_data(int64_t slot) const { return static_cast<std::byte*>(slab_.data()) + slot * slot_bytes_; }
  // Events of a slot: its content has arrived; a reader is done that a copy of the same plan waits for.
  int ready_event(int64_t slot) const { return static_cast<int>(2 * slot); }
  int read_event(int64_t slot) const { return static_cast<int>(2 * slot + 1); }

  Backend& backend_;
  const Residency& residency_;
  int rank_;
  ExpertCacheOptions options_;
  int64_t slot_bytes_;
  Phase phase_ = Phase::decode;
  bool continues_ = false;
  std::unique_ptr<ExpertCache> cache_;
  std::unique_ptr<ExpertPolicy> policy_;
  std::optional<HostExperts> host_;
  ActiveExperts active_;
  std::vector<std::byte> owned_;  // by expert: 1 where its block is this rank's
  bool has_all_ = false;          // is 1 for all
  bool runs_on_device_ = false;   // in this step
  Tensor slab_;
  Tensor directory_;                  // I32 [layers, experts] on the device: the slot of each expert, once all have one
  std::vector<PlannedCopy> planned_;  // look-ahead that is not issued yet
  std::vector<PlannedCopy> filling_;  // look-ahead that no run has waited for yet, in the order of the copy lane

  std::vector<int32_t> ids_;     // [rows, K] on the host
  std::vector<int64_t> begins_;  // [experts + 1] into rows_
  std::vector<int32_t> rows_, out_rows_;
  std::vector<ExpertRun> runs_, host_runs_;
  std::vector<std::byte> present_;
  std::vector<bool> awaited_;  // by run of the plan
  int64_t runs_done_ = 0, host_runs_done_ = 0, copies_ = 0, zero_copies_ = 0;
  uint64_t routing_hash_ = 0;
  RankTrace* trace_ = nullptr;
  RoutingRecorder* recorder_ = nullptr;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_
