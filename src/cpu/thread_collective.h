// ThreadCollective: ranks that are threads of one process and whose tensors lie in host memory.
//
// Sums in rank order, so that the result has the same bits on every rank and on every run. A rank that fails aborts the
// group: every rank that waits or will wait gets an error instead of a hang. No allocation after reserve().
#ifndef OFFLOAD_CPU_THREAD_COLLECTIVE_H_
#define OFFLOAD_CPU_THREAD_COLLECTIVE_H_

#include <chrono>
#include <memory>
#include <vector>

#include "core/rank_meeting.h"

namespace offload::cpu {

class ThreadGroup {
 public:
  // `stall_after`: as in RankMeeting.
  explicit ThreadGroup(int world, std::chrono::milliseconds stall_after = {});

  int world() const { return meeting_.world(); }
  // Rank `rank`'s end; the group outlives it. One per rank.
  std::unique_ptr<Collective> end(int rank);

 private:
  friend class ThreadCollective;

  RankMeeting meeting_;
  std::vector<Tensor> tensors_;  // what each rank brought to the operation in progress
  std::vector<float> sums_;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_THREAD_COLLECTIVE_H_
