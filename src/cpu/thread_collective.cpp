#include "cpu/thread_collective.h"

#include "core/dtype.h"

namespace offload::cpu {

class ThreadCollective final : public Collective {
 public:
  ThreadCollective(ThreadGroup& group, int rank) : group_(group), rank_(static_cast<size_t>(rank)) {}

  void reserve(int64_t elements) override { group_.sums_.resize(static_cast<size_t>(elements)); }

  // Each rank sums one part of the elements over all ranks, then all copy the whole result.
  void all_reduce_sum(const Tensor& tensor) override {
    OFL_ASSERT(tensor.contiguous() && tensor.elements() <= static_cast<int64_t>(group_.sums_.size()));
    OFL_ASSERT(tensor.dtype() == DType::f32 || tensor.dtype() == DType::bf16);
    group_.tensors_[rank_] = tensor;
    group_.wait_for_all();
    const auto world = static_cast<int64_t>(group_.tensors_.size()), rank = static_cast<int64_t>(rank_);
    const int64_t begin = tensor.elements() * rank / world, end = tensor.elements() * (rank + 1) / world;
    if (tensor.dtype() == DType::f32)
      sum<float>(begin, end, [](float v) { return v; });
    else
      sum<bf16>(begin, end, [](bf16 v) { return to_float(v); });
    group_.wait_for_all();
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const float value = group_.sums_[static_cast<size_t>(i)];
      if (tensor.dtype() == DType::f32)
        tensor.as<float>()[i] = value;
      else
        tensor.as<bf16>()[i] = to_bf16(value);
    }
    group_.wait_for_all();  // nobody writes sums_ again before all have read it
  }

  bool all_equal(uint64_t value) override {
    group_.values_[rank_] = value;
    group_.wait_for_all();
    bool equal = true;
    for (const uint64_t other : group_.values_) equal &= other == value;
    group_.wait_for_all();
    return equal;
  }

  void abort() noexcept override {
    const std::lock_guard lock(group_.mutex_);
    group_.aborted_ = true;
    group_.all_arrived_.notify_all();
  }

  void recover() noexcept override {
    const std::lock_guard lock(group_.mutex_);
    group_.aborted_ = false;
    group_.arrived_ = 0;
  }

 private:
  template <typename T, typename ToFloat>
  void sum(int64_t begin, int64_t end, const ToFloat& convert) {
    for (int64_t i = begin; i < end; ++i) {
      float total = 0.0f;
      for (const Tensor& tensor : group_.tensors_) total += convert(tensor.as<T>()[i]);
      group_.sums_[static_cast<size_t>(i)] = total;
    }
  }

  ThreadGroup& group_;
  size_t rank_;
};

ThreadGroup::ThreadGroup(int world) : tensors_(static_cast<size_t>(world)), values_(static_cast<size_t>(world)) {}

std::unique_ptr<Collective> ThreadGroup::end(int rank) {
  OFL_ASSERT(rank >= 0 && rank < world());
  return std::make_unique<ThreadCollective>(*this, rank);
}

void ThreadGroup::wait_for_all() {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  if (!aborted_ && ++arrived_ == world()) {
    arrived_ = 0;
    ++round_;
    all_arrived_.notify_all();
    return;
  }
  all_arrived_.wait(lock, [&] { return aborted_ || round_ != round; });
  if (round_ == round) throw Aborted();
}

}  // namespace offload::cpu
