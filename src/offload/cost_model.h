// CostModel: from bytes and flops to nanoseconds on one rank of a machine.
//
// Pure: a function of the machine, the arithmetic and the number of ranks; IEEE doubles in one order and one rounding
// to whole nanoseconds, so that every host gets the same figures. Roofs plus a fill rule for small GEMMs; does NOT know
// caches, clocks that throttle, or ops that overlap on one lane.
#ifndef OFFLOAD_OFFLOAD_COST_MODEL_H_
#define OFFLOAD_OFFLOAD_COST_MODEL_H_

#include <cstdint>
#include <vector>

#include "offload/machine.h"
#include "offload/step_program.h"

namespace offload {

// Durations in ns of the parts of a step; see LayerProgram.
struct LayerTimes {
  int64_t mixer = 0, router = 0, shared = 0, combine = 0, write = 0;
};
struct StepTimes {
  int64_t rows = 0;
  int64_t reduce = 0;  // each all-reduce
  int64_t prologue = 0, epilogue = 0, head = 0;
  std::vector<LayerTimes> layers{};
};

// Sums over one step; for comparison with published parts.
struct StepParts {
  int64_t dense = 0, attention = 0, lm_head = 0, collectives = 0;
};

class CostModel {
 public:
  // Throws Error{usage} when the machine has fewer devices than `world`.
  CostModel(const Machine& machine, GemmMath math, int64_t world);

  // Prices decode steps (up to kCanonicalRowsMax rows) by the machine's calibration from now on, when it was made for
  // this model at this number of ranks. Returns whether it was.
  bool calibrate(const StepProgrammer& programmer);

  // The same on a machine with other rates; what was calibrated keeps its ratio to the roofs.
  CostModel on(const Machine& machine) const;

  int64_t op_ns(const StepOp& op) const;
  StepTimes step_ns(const StepProgram& program) const;
  StepParts parts_ns(const StepProgram& program) const;

  // Pinned host memory to each rank's device, all ranks at once. 0 on a machine without a link.
  int64_t copy_ns(int64_t bytes) const;
  int64_t all_reduce_ns(int64_t bytes) const;

  // One expert, or a slice of it, over `rows` rows: out of device memory, read over the link, on the host's cores.
  int64_t expert_ns(const ExpertShape& shape, int64_t rows) const;
  // The part of expert_ns() that only the first run of a batch takes.
  int64_t batch_ns(int64_t rows) const;
  int64_t expert_zero_copy_ns(const ExpertShape& shape, int64_t rows) const;
  int64_t expert_host_ns(const ExpertShape& shape, int64_t rows) const;
  bool has_host() const { return machine_.host.dram_bytes_per_s > 0; }
  bool has_link() const { return machine_.link.h2d_bytes_per_s > 0; }
  // The host's: from the end of a device op until it goes on; until it has a layer's plan; to issue a batch of experts.
  int64_t wait_ns() const;
  int64_t plan_ns() const;
  int64_t launch_ns() const;

  int64_t world() const { return world_; }
  const Machine& machine() const { return machine_; }

 private:
  double seconds(const StepOp& op) const;
  double gemm_seconds(int64_t m, int64_t n, int64_t k, int64_t bytes) const;
  double link_bytes_per_s() const;
  int64_t part_ns(const StepOps& ops, bool is_head, int64_t rows) const;

  Machine machine_;
  GemmMath math_;
  double flops_;
  int64_t world_;
  double dense_factor_ = 1, attention_factor_ = 1, head_factor_ = 1;  // of calibrated decode steps
  double expert_bytes_per_s_ = 0;                                     // 0: not calibrated
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_COST_MODEL_H_
