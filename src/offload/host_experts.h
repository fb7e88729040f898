// HostExperts: the experts of a decode step that the host's cores compute where they lie in host memory.
//
// Owns the step's rows and parts on the host and the scratch of the ops. Canonical products (core/canonical.h) make
// the bits those of any device. Does NOT choose which experts these are (expert_policy.h). Confined to its rank's
// thread; allocates nothing after allocate().
#ifndef OFFLOAD_OFFLOAD_HOST_EXPERTS_H_
#define OFFLOAD_OFFLOAD_HOST_EXPERTS_H_

#include <vector>

#include "core/backend.h"
#include "core/host_memory.h"

namespace offload {

class HostExperts {
 public:
  // `ops` works on host memory, belongs to the rank's thread and outlives this.
  explicit HostExperts(Ops& ops) : ops_(ops) {}

  // Sizes memory for steps of these shapes; no tensor is touched.
  void plan(const SwigluExpertsArgs& args);
  int64_t bytes() const { return staging_bytes_ + ops_.scratch_peak_bytes(); }
  // Throws Error{resource}.
  void allocate();

  // The step's rows `x` come from the device. Waits for what was issued on the compute lane before.
  void fetch(Backend& backend, const Tensor& x);
  // args.runs of the step whose `x` was fetched, with weights in host memory; their rows of args.out go to the device
  // in the order of the compute lane. REQUIRES: by the next fetch() the lane has come past them.
  void run(Backend& backend, const SwigluExpertsArgs& args);

 private:
  Ops& ops_;
  int64_t staging_bytes_ = 0;
  HostMemory memory_;              // rows and parts, then scratch
  std::vector<int32_t> out_rows_;  // that the runs write
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_HOST_EXPERTS_H_
