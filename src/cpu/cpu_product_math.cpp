#include "cpu/cpu_product_math.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace offload::cpu {
namespace {

float number_at(const void* row, DType dtype, int64_t i) {
  return dtype == DType::bf16 ? to_float(static_cast<const bf16*>(row)[i]) : static_cast<const float*>(row)[i];
}

float round_half(float value) {
  return to_float(to_fp16(value));
}

// 2^e. REQUIRES: e in [-126, 127].
float power_of_two(int32_t e) {
  return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
}

}  // namespace

int32_t ProductMath::exponent(const void* row, DType dtype, int64_t k) const {
  if (math_ != Math::scaled_fp16) return 0;
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(number_at(row, dtype, i)) & 0x7fffffffu);
  return half_exponent(largest >> 16);
}

void ProductMath::load(const void* row, DType dtype, int64_t k, int64_t begin, int64_t count, int32_t exponent,
                       float* out) const {
  switch (math_) {
    case Math::native:
      for (int64_t i = 0; i < count; ++i) out[i] = number_at(row, dtype, begin + i);
      return;
    case Math::reordered:
      for (int64_t i = 0; i < count; ++i) out[i] = number_at(row, dtype, k - 1 - begin - i);
      return;
    case Math::scaled_fp16: {
      const float scale = power_of_two(exponent);
      for (int64_t i = 0; i < count; ++i) out[i] = round_half(number_at(row, dtype, begin + i) * scale);
      return;
    }
    case Math::fp16:
    case Math::fp16_out:
      for (int64_t i = 0; i < count; ++i) out[i] = round_half(number_at(row, dtype, begin + i));
      return;
  }
}

void ProductMath::finish(float* sums, int64_t count, int32_t x_exponent, const int32_t* w_exponents) const {
  if (math_ == Math::scaled_fp16)
    for (int64_t i = 0; i < count; ++i) sums[i] = std::scalbn(sums[i], -(x_exponent + w_exponents[i]));
  if (math_ == Math::fp16_out)
    for (int64_t i = 0; i < count; ++i) sums[i] = round_half(sums[i]);
}

}  // namespace offload::cpu
