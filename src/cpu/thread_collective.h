// ThreadCollective: ranks that are threads of one process and whose tensors lie in host memory.
//
// Sums in rank order, so that the result has the same bits on every rank and on every run. A rank that fails aborts the
// group: every rank that waits or will wait gets an error instead of a hang. No allocation after reserve().
#ifndef OFFLOAD_CPU_THREAD_COLLECTIVE_H_
#define OFFLOAD_CPU_THREAD_COLLECTIVE_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "core/collective.h"

namespace offload::cpu {

class ThreadGroup {
 public:
  explicit ThreadGroup(int world);

  int world() const { return static_cast<int>(tensors_.size()); }
  // Rank `rank`'s end; the group outlives it. One per rank.
  std::unique_ptr<Collective> end(int rank);

 private:
  friend class ThreadCollective;
  void wait_for_all();

  std::vector<Tensor> tensors_;  // what each rank brought to the operation in progress
  std::vector<uint64_t> values_;
  std::vector<float> sums_;
  std::mutex mutex_;
  std::condition_variable all_arrived_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  bool aborted_ = false;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_THREAD_COLLECTIVE_H_
