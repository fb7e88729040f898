// Collective: how the ranks of one tensor-parallel group meet.
#ifndef OFFLOAD_CORE_COLLECTIVE_H_
#define OFFLOAD_CORE_COLLECTIVE_H_

#include <cstdint>

#include "core/base.h"
#include "core/tensor.h"

namespace offload {

class Lane;

// The part of a tensor-parallel group that one rank is.
struct RankSlice {
  int rank = 0;
  int world = 1;
};

// What a rank gets that waits for a peer which has failed; the peer's own error is the cause.
class Aborted : public Error {
 public:
  Aborted() : Error(ErrorCode::internal, "another rank failed") {}
};

// Called by all ranks in the same order; the result has the same bits on every rank.
class Collective {
 public:
  virtual ~Collective() = default;

  // Memory for tensors of up to `elements`. Called once, on one rank, before the ranks run.
  virtual void reserve(int64_t elements) = 0;

  // tensor = the sum over ranks of tensor, summed in rank order in FP32. F32 or BF16, contiguous. Throws Aborted.
  virtual void all_reduce_sum(const Tensor& tensor) = 0;

  // The same in two parts: the sum may run beside what the rank's device is given to do between them. At most two are
  // started and not finished; finish_sum() is for the oldest, and what the compute lane is given after it sees the sum.
  // REQUIRES: no all_reduce_sum() between them.
  virtual void start_sum(const Tensor& tensor) { all_reduce_sum(tensor); }
  virtual void finish_sum() {}
  // The lane that started sums run on; null where they are done when start_sum() returns, or on the compute lane.
  virtual Lane* sum_lane() { return nullptr; }
  // Whether a sum takes so long that prompts gain by passing the layers in halves, beside whose work sums run.
  virtual bool sums_are_slow() const { return false; }
  // Whether all_reduce_sum() of so many F32 elements has the ranks' devices work and nothing else, so that a device may
  // do it again by itself (Backend::repeat). The same on all ranks.
  virtual bool runs_on_device(int64_t elements) const {
    static_cast<void>(elements);
    return false;
  }
  // What sum_lane() is given next comes after all that the compute lane has been given; start_sum() does so itself.
  virtual void follow_compute() {}

  // Whether all ranks brought the same value. Throws Aborted.
  virtual bool all_equal(uint64_t value) = 0;

  // Ends every wait of the group, now and later, with Aborted. From any thread.
  virtual void abort() noexcept = 0;

  // Makes the group usable again after an abort. REQUIRES: no rank is in a call.
  virtual void recover() noexcept = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_COLLECTIVE_H_
