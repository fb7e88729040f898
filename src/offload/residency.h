// Residency: the routed experts of a model in host memory, one contiguous block per (layer, expert).
//
// Owns the blocks; immutable once loaded, so any thread may read. Every piece is read once, in parallel, straight into
// its block.
#ifndef OFFLOAD_OFFLOAD_RESIDENCY_H_
#define OFFLOAD_OFFLOAD_RESIDENCY_H_

#include <functional>
#include <vector>

#include "core/experts.h"
#include "core/host_memory.h"

namespace offload {

class Residency {
 public:
  // Validates every expert's tensors; loads nothing. Throws Error{input}.
  Residency(const WeightSource& source, std::vector<ExpertLayer> layers, const ExpertShape& shape);

  int64_t bytes() const { return static_cast<int64_t>(layers_.size()) * shape_.experts * block_stride_; }

  // Reads all blocks with `threads` threads. `progress` is called from them, one at a time, with the bytes just read;
  // it may throw to stop the load. Rethrows the first error after all threads have ended.
  void load(int threads, const std::function<void(int64_t bytes)>& progress);

  const ExpertShape& shape() const { return shape_; }
  // REQUIRES: loaded.
  const std::byte* block(int64_t layer, int64_t expert) const {
    return memory_.data() + (layer * shape_.experts + expert) * block_stride_;
  }

 private:
  const WeightSource& source_;
  std::vector<ExpertLayer> layers_;
  ExpertShape shape_;
  int64_t block_stride_;
  HostMemory memory_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RESIDENCY_H_
