// ExpertExecutor: turns one layer's routing into runs of experts, each expert once, and has the ops run them.
//
// Confined to its rank's thread. Allocates nothing after its first planning run of the largest step.
#ifndef OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_
#define OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_

#include <vector>

#include "core/backend.h"
#include "core/experts.h"
#include "offload/residency.h"

namespace offload {

class ExpertExecutor final : public ExpertRunner {
 public:
  // Both outlive the executor.
  ExpertExecutor(Backend& backend, const Residency& residency) : backend_(backend), residency_(residency) {}

  void run(const RoutedExperts& step) override;

  // Weights read by all runs so far.
  int64_t expert_bytes() const { return expert_bytes_; }

 private:
  void plan(const RoutedExperts& step);
  void group_by_expert(int64_t top_k);

  Backend& backend_;
  const Residency& residency_;
  std::vector<int32_t> ids_;     // [rows, K] on the host
  std::vector<int64_t> begins_;  // [experts + 1] into rows_
  std::vector<int32_t> rows_, out_rows_;
  std::vector<ExpertRun> runs_;
  std::vector<std::byte> present_;
  int64_t expert_bytes_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_EXPERT_EXECUTOR_H_
