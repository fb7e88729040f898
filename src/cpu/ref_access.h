// Reading and writing single numbers of a tensor as double, for the reference ops. Slow and plain by intent.
#ifndef OFFLOAD_CPU_REF_ACCESS_H_
#define OFFLOAD_CPU_REF_ACCESS_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/ops.h"

namespace offload::cpu {

// The BF16 or F32 number nearest to `value`, in one rounding. REQUIRES: dtype is f32 or bf16.
inline double round_to(DType dtype, double value) {
  if (dtype == DType::f32) return static_cast<double>(static_cast<float>(value));
  OFL_ASSERT(dtype == DType::bf16);
  return static_cast<double>(to_float(to_bf16(to_float_odd(value))));
}

// The inner rnd() of a formula: to A with Rounding::reference; with Rounding::fused, or A = F32, the chain goes on.
class RefRnd {
 public:
  RefRnd(DType activation, Rounding rounding)
      : rounds_(activation == DType::bf16 && rounding == Rounding::reference), dtype_(activation) {}
  double operator()(double value) const { return rounds_ ? round_to(dtype_, value) : value; }

 private:
  bool rounds_;
  DType dtype_;
};

inline int64_t offset(const Tensor& t, int64_t i, int64_t j, int64_t k) {
  return i * t.stride(0) + (t.rank() > 1 ? j * t.stride(1) : 0) + (t.rank() > 2 ? k * t.stride(2) : 0);
}

// Element (i), (i, j) or (i, j, k) of an F32 or BF16 tensor.
inline double get(const Tensor& t, int64_t i, int64_t j = 0, int64_t k = 0) {
  const int64_t at = offset(t, i, j, k);
  if (t.dtype() == DType::bf16) return static_cast<double>(to_float(t.as<bf16>()[at]));
  OFL_ASSERT(t.dtype() == DType::f32);
  return static_cast<double>(t.as<float>()[at]);
}

// rnd!: the store of a result, rounded once to the tensor's dtype.
inline void set(const Tensor& t, double value, int64_t i, int64_t j = 0, int64_t k = 0) {
  const int64_t at = offset(t, i, j, k);
  if (t.dtype() == DType::bf16) {
    t.as<bf16>()[at] = to_bf16(to_float_odd(value));
  } else {
    OFL_ASSERT(t.dtype() == DType::f32);
    t.as<float>()[at] = static_cast<float>(value);
  }
}

// Row (i, :) of a matrix or (i, j, :) of a rank-3 tensor.
inline std::vector<double> get_row(const Tensor& t, int64_t i, int64_t j = 0) {
  std::vector<double> row(static_cast<size_t>(t.dim(t.rank() - 1)));
  for (size_t k = 0; k < row.size(); ++k) {
    const auto last = static_cast<int64_t>(k);
    row[k] = t.rank() == 3 ? get(t, i, j, last) : get(t, i, last);
  }
  return row;
}

inline double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k) sum += x[k] * y[k];
  return sum;
}

inline double round_half(double value) {
  return static_cast<double>(to_float(to_fp16(to_float_odd(value))));
}

// The exponent of a row that product_math.h's scaled_fp16 scales it by.
inline int scale_exponent(const std::vector<double>& row) {
  double largest = 0;
  for (const double v : row) largest = std::max(largest, std::isnan(v) ? INFINITY : std::abs(v));
  if (largest == 0) return 127;
  if (std::isinf(largest)) return -114;
  return std::min(14 - std::ilogb(largest), 127);
}

// sum_k x[k] w[k] as product_math.h says.
inline double product(Math math, const std::vector<double>& x, const std::vector<double>& w) {
  if (math == Math::native || math == Math::reordered) return dot(x, w);
  const bool scales = math == Math::scaled_fp16;
  const int x_exponent = scales ? scale_exponent(x) : 0, w_exponent = scales ? scale_exponent(w) : 0;
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k)
    sum += round_half(std::ldexp(x[k], x_exponent)) * round_half(std::ldexp(w[k], w_exponent));
  sum = std::ldexp(sum, -(x_exponent + w_exponent));
  return math == Math::fp16_out ? round_half(sum) : sum;
}

inline double mean_square(const std::vector<double>& x) {
  return dot(x, x) / static_cast<double>(x.size());
}

inline double sigmoid(double t) {
  return 1.0 / (1.0 + std::exp(-t));
}
inline double silu(double t) {
  return t / (1.0 + std::exp(-t));
}

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_REF_ACCESS_H_
