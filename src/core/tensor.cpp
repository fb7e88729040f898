#include "core/tensor.h"

namespace offload {

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape)
    : data_(data), dtype_(dtype), rank_(static_cast<int>(shape.size())) {
  OFL_ASSERT(rank_ <= kRankMax);
  size_t i = 0;
  for (const int64_t extent : shape) {
    OFL_ASSERT(extent >= 0);
    shape_[i++] = extent;
  }
  int64_t stride = 1;
  for (int d = rank_ - 1; d >= 0; --d) {
    stride_[static_cast<size_t>(d)] = stride;
    stride *= shape_[static_cast<size_t>(d)];
  }
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int d = 0; d < rank_; ++d) count *= dim(d);
  return count;
}

bool Tensor::contiguous() const {
  int64_t expected = 1;
  for (int d = rank_ - 1; d >= 0; --d) {
    if (dim(d) != 1 && stride(d) != expected) return false;
    expected *= dim(d);
  }
  return true;
}

Tensor Tensor::narrow(int i, int64_t begin, int64_t count) const {
  OFL_ASSERT(i >= 0 && i < rank_ && begin >= 0 && count >= 0 && begin + count <= dim(i));
  Tensor view = *this;
  view.data_ = static_cast<std::byte*>(data_) + begin * stride(i) * dtype_bytes(dtype_);
  view.shape_[static_cast<size_t>(i)] = count;
  return view;
}

Tensor Tensor::reshaped(std::initializer_list<int64_t> shape) const {
  OFL_ASSERT(contiguous());
  const Tensor view(data_, dtype_, shape);
  OFL_ASSERT(view.elements() == elements());
  return view;
}

Tensor Tensor::split_last(int64_t inner) const {
  OFL_ASSERT(rank_ >= 1 && rank_ < kRankMax && inner > 0 && dim(rank_ - 1) % inner == 0);
  Tensor view = *this;
  const auto last = static_cast<size_t>(rank_ - 1);
  view.rank_ = rank_ + 1;
  view.shape_[last] = shape_[last] / inner;
  view.stride_[last] = stride_[last] * inner;
  view.shape_[last + 1] = inner;
  view.stride_[last + 1] = stride_[last];
  return view;
}

std::string Tensor::describe() const {
  std::string text = fmt::format("{} [", dtype_name(dtype_));
  for (int d = 0; d < rank_; ++d) text += fmt::format("{}{}", d == 0 ? "" : ", ", dim(d));
  return text + "]";
}

}  // namespace offload
