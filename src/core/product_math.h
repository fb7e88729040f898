// Math: in which numbers the matrix products of linear and swiglu_experts compute.
//
// With f16(v) the FP16 number nearest to v (infinity from 65520 on, subnormals kept), for a row x of activations and a
// row w of weights:
//   native       sum_k x[k] w[k]
//   scaled_fp16  2^-(ex + ew) sum_k f16(x[k] 2^ex) f16(w[k] 2^ew), ex and ew the half_exponent() of the largest
//                magnitude of all of x and of all of w. FP16 counts in 2^-24 at its finest and BF16 has 8 significant
//                bits, so numbers of 2^-31 of their row's largest and more are exact. A part of w may take a larger
//                ew that it bears: that keeps more of its small numbers
//   fp16         sum_k f16(x[k]) f16(w[k])
//   fp16_out     f16(sum_k f16(x[k]) f16(w[k]))
//   reordered    native, its sum in another order than that of the backend's native: a control that shows what a
//                change of order alone does. The CPU takes k downwards
// Products are exact and sums FP32 (or better) in each, as in native; what they give is rounded once to out's dtype.
// Each holds for BF16 x and w in runs of more than kCanonicalRowsMax rows: other products are native whatever is asked
// (product_math()).
//
// Header-only, so that host and device code share the rule of the exponents. No state.
#ifndef OFFLOAD_CORE_PRODUCT_MATH_H_
#define OFFLOAD_CORE_PRODUCT_MATH_H_

#include <cstdint>

#include "core/canonical.h"
#include "core/dtype.h"

namespace offload {

enum class Math : uint8_t { native, scaled_fp16, fp16, fp16_out, reordered };

// What a product of `rows` rows computes in when `asked` was asked for.
constexpr Math product_math(Math asked, DType x, DType w, int64_t rows) {
  return x == DType::bf16 && w == DType::bf16 && rows > kCanonicalRowsMax ? asked : Math::native;
}

// e such that the magnitude with the BF16 bits `magnitude` (no sign) times 2^e lies in [2^14, 2^15); at most 127, so
// that 2^e is an FP32 number: a subnormal magnitude stays below, as zero does. Infinity and NaN give -114.
OFL_HOST_DEVICE constexpr int32_t half_exponent(uint32_t magnitude) {
  const int32_t e = 14 + 127 - static_cast<int32_t>(magnitude >> 7);
  return e < 127 ? e : 127;
}

}  // namespace offload

#endif  // OFFLOAD_CORE_PRODUCT_MATH_H_
