// Collective: how the ranks of one tensor-parallel group meet.
#ifndef OFFLOAD_CORE_COLLECTIVE_H_
#define OFFLOAD_CORE_COLLECTIVE_H_

#include "core/tensor.h"

namespace offload {

// The part of a tensor-parallel group that one rank is.
struct RankSlice {
  int rank = 0;
  int world = 1;
};

// Called by all ranks in the same order; the result has the same bits on every rank.
class Collective {
 public:
  virtual ~Collective() = default;

  // tensor = the sum over ranks of tensor, summed in rank order. F32 or BF16, contiguous.
  virtual void all_reduce_sum(const Tensor& tensor) = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_COLLECTIVE_H_
