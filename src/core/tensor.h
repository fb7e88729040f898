// Tensor: a strided view of numbers that somebody else owns, on whichever device the owner put them.
//
// Owns nothing and never touches the bytes. A value type: copy it freely between threads.
#ifndef OFFLOAD_CORE_TENSOR_H_
#define OFFLOAD_CORE_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/base.h"
#include "core/dtype.h"

namespace offload {

class Tensor {
 public:
  static constexpr int kRankMax = 4;

  Tensor() = default;
  // A contiguous view, last dimension fastest. REQUIRES: at most kRankMax dimensions, none negative.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape);

  void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t dim(int i) const { return shape_[static_cast<size_t>(i)]; }
  int64_t stride(int i) const { return stride_[static_cast<size_t>(i)]; }  // in elements
  int64_t elements() const;
  int64_t bytes() const { return elements() * dtype_bytes(dtype_); }
  bool contiguous() const;
  explicit operator bool() const { return data_ != nullptr; }

  // The first element. REQUIRES: T is the C++ type of dtype().
  template <typename T>
  T* as() const {
    OFL_ASSERT(sizeof(T) == static_cast<size_t>(dtype_bytes(dtype_)));
    return static_cast<T*>(data_);
  }
  // Element (i, 0, ...) of a T tensor.
  template <typename T>
  T* row(int64_t i) const {
    return as<T>() + i * stride_[0];
  }

  // Elements [begin, begin + count) of dimension `i`; the other dimensions are kept.
  Tensor narrow(int i, int64_t begin, int64_t count) const;
  // The same elements under another shape. REQUIRES: contiguous, the same number of elements.
  Tensor reshaped(std::initializer_list<int64_t> shape) const;
  // Splits the last dimension n into [n / inner, inner]. REQUIRES: rank < kRankMax, inner divides n.
  Tensor split_last(int64_t inner) const;

  std::string describe() const;  // "BF16 [3, 128]"

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  int rank_ = 0;
  std::array<int64_t, kRankMax> shape_{};
  std::array<int64_t, kRankMax> stride_{};
};

}  // namespace offload

#endif  // OFFLOAD_CORE_TENSOR_H_
