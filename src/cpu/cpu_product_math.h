// Operands of a matrix product in another math than native (core/product_math.h) as F32 numbers for the FP32 GEMM, and
// what its sums become. Scalar code: on a CPU these maths are for judging an arm, not for speed.
//
// Immutable; owns nothing. Rows hold BF16 numbers, stored as BF16 or as F32.
#ifndef OFFLOAD_CPU_CPU_PRODUCT_MATH_H_
#define OFFLOAD_CPU_CPU_PRODUCT_MATH_H_

#include <cstdint>

#include "core/dtype.h"
#include "core/product_math.h"

namespace offload::cpu {

class ProductMath {
 public:
  ProductMath() = default;
  explicit ProductMath(Math math) : math_(math) {}

  // Then nothing below is needed: operands are used as they are.
  bool is_native() const { return math_ == Math::native; }

  // The power of two that a row of k numbers is scaled by; 0 where the math does not scale.
  int32_t exponent(const void* row, DType dtype, int64_t k) const;

  // Elements [begin, begin + count) of the row of k numbers, in the order in which the math sums them.
  void load(const void* row, DType dtype, int64_t k, int64_t begin, int64_t count, int32_t exponent, float* out) const;

  // sums[i], of one row of x and `count` rows of w, becomes what is rounded to out's dtype.
  void finish(float* sums, int64_t count, int32_t x_exponent, const int32_t* w_exponents) const;

 private:
  Math math_ = Math::native;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_PRODUCT_MATH_H_
