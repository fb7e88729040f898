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
    meet();
    const auto world = static_cast<int64_t>(group_.tensors_.size()), rank = static_cast<int64_t>(rank_);
    const int64_t begin = tensor.elements() * rank / world, end = tensor.elements() * (rank + 1) / world;
    if (tensor.dtype() == DType::f32)
      sum<float>(begin, end, [](float v) { return v; });
    else
      sum<bf16>(begin, end, [](bf16 v) { return to_float(v); });
    meet();
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const float value = group_.sums_[static_cast<size_t>(i)];
      if (tensor.dtype() == DType::f32)
        tensor.as<float>()[i] = value;
      else
        tensor.as<bf16>()[i] = to_bf16(value);
    }
    meet();  // nobody writes sums_ again before all have read it
  }

  bool all_equal(uint64_t value) override { return group_.meeting_.all_equal(static_cast<int>(rank_), value); }
  void abort() noexcept override { group_.meeting_.abort(); }
  void recover() noexcept override { group_.meeting_.recover(); }

 private:
  void meet() { group_.meeting_.wait_for_all(static_cast<int>(rank_)); }
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

ThreadGroup::ThreadGroup(int world, std::chrono::milliseconds stall_after)
    : meeting_(world, stall_after), tensors_(static_cast<size_t>(world)) {}

std::unique_ptr<Collective> ThreadGroup::end(int rank) {
  OFL_ASSERT(rank >= 0 && rank < world());
  return std::make_unique<ThreadCollective>(*this, rank);
}

}  // namespace offload::cpu
