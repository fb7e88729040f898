#include "offload/selection_hash.h"

#include "offload/rank_trace.h"

namespace offload {

void SelectionHash::selected(const Tensor& blocks, const Tensor& counts) {
  blocks_.resize(static_cast<size_t>(blocks.elements()));
  counts_.resize(static_cast<size_t>(counts.elements()));
  const HostSpan wait(trace_, "wait_selection", {.layer = trace_ == nullptr ? -1 : trace_->layer()});
  backend_.download(blocks, std::as_writable_bytes(std::span(blocks_)));
  backend_.download(counts, std::as_writable_bytes(std::span(counts_)));
  const auto mix = [&](int32_t value) {  // FNV-1a over words
    value_ = (value_ ^ static_cast<uint32_t>(value)) * 0x100000001B3u;
  };
  const auto budget = static_cast<size_t>(blocks.dim(1));
  for (size_t row = 0; row < counts_.size(); ++row) {
    OFL_ASSERT(counts_[row] >= 0 && static_cast<size_t>(counts_[row]) <= budget);
    mix(counts_[row]);
    for (size_t i = 0; i < static_cast<size_t>(counts_[row]); ++i) mix(blocks_[row * budget + i]);
  }
}

}  // namespace offload
