#include "offload/expert_executor.h"

#include <algorithm>

namespace offload {

void ExpertExecutor::run(const RoutedExperts& step) {
  const auto slots = static_cast<size_t>(step.ids.elements());
  const int64_t experts = residency_.local_shape().experts, top_k = step.ids.dim(1);
  ids_.resize(slots);
  rows_.resize(slots);
  out_rows_.resize(slots);
  present_.resize(slots);
  runs_.reserve(static_cast<size_t>(experts));
  begins_.resize(static_cast<size_t>(experts) + 1);
  if (backend_.ops().planning()) return plan(step);

  backend_.download(step.ids, std::as_writable_bytes(std::span(ids_)));
  group_by_expert(top_k);
  runs_.clear();
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = begins_[static_cast<size_t>(e)], count = begins_[static_cast<size_t>(e) + 1] - begin;
    if (count == 0) continue;
    const std::byte* block = residency_.block(0, step.layer, e);
    runs_.push_back({block, block + residency_.local_shape().gate_up_bytes(), begin, count});
  }
  expert_bytes_ += static_cast<int64_t>(runs_.size()) * residency_.shape().block_bytes();
  std::fill(present_.begin(), present_.end(), std::byte{1});
  backend_.upload(present_, step.present);
  backend_.ops()(SwigluExpertsArgs{.x = step.x,
                                   .out = step.parts,
                                   .runs = runs_,
                                   .rows = rows_,
                                   .out_rows = out_rows_,
                                   .intermediate = residency_.local_shape().intermediate,
                                   .weight_dtype = residency_.local_shape().dtype,
                                   .rounding = step.rounding});
}

// Counting sort of the slots by expert; within an expert, slots stay in order.
void ExpertExecutor::group_by_expert(int64_t top_k) {
  std::fill(begins_.begin(), begins_.end(), 0);
  for (const int32_t id : ids_) ++begins_[static_cast<size_t>(id) + 1];
  for (size_t e = 1; e < begins_.size(); ++e) begins_[e] += begins_[e - 1];
  for (size_t slot = 0; slot < ids_.size(); ++slot) {
    const auto at = static_cast<size_t>(begins_[static_cast<size_t>(ids_[slot])]++);
    rows_[at] = static_cast<int32_t>(static_cast<int64_t>(slot) / top_k);
    out_rows_[at] = static_cast<int32_t>(slot);
  }
  std::rotate(begins_.rbegin(), begins_.rbegin() + 1, begins_.rend());  // each begin has advanced to the next one
  begins_[0] = 0;
}

// The two extremes of routing: every row to the same experts, and rows spread over as many experts as possible.
void ExpertExecutor::plan(const RoutedExperts& step) {
  const int64_t rows = step.ids.dim(0), top_k = step.ids.dim(1), slots = rows * top_k;
  const auto ask = [&](int64_t run_count) {
    runs_.clear();
    for (int64_t i = 0; i < run_count; ++i) {
      const int64_t begin = slots * i / run_count;
      runs_.push_back({this, this, begin, slots * (i + 1) / run_count - begin});
    }
    backend_.ops()(SwigluExpertsArgs{.x = step.x,
                                     .out = step.parts,
                                     .runs = runs_,
                                     .rows = rows_,
                                     .out_rows = out_rows_,
                                     .intermediate = residency_.local_shape().intermediate,
                                     .weight_dtype = residency_.local_shape().dtype,
                                     .rounding = step.rounding});
  };
  ask(top_k);
  ask(std::min(residency_.local_shape().experts, slots));
}

}  // namespace offload
