// SelectionHash: a number of all blocks that block-sparse attention has selected on one rank, for comparing ranks.
//
// A debugging aid: it downloads every selection, so the host waits for the device at each such layer. Confined to the
// rank's thread. Does NOT compare anything itself.
#ifndef OFFLOAD_OFFLOAD_SELECTION_HASH_H_
#define OFFLOAD_OFFLOAD_SELECTION_HASH_H_

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/step.h"

namespace offload {

class RankTrace;

class SelectionHash final : public SelectionObserver {
 public:
  // Both outlive it; `trace` may be null.
  SelectionHash(Backend& backend, RankTrace* trace) : backend_(backend), trace_(trace) {}

  void selected(const Tensor& blocks, const Tensor& counts) override;
  uint64_t value() const { return value_; }

 private:
  Backend& backend_;
  RankTrace* trace_;
  std::vector<int32_t> blocks_, counts_;  // on the host
  uint64_t value_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_SELECTION_HASH_H_
