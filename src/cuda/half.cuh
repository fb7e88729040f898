// BF16 rows as FP16 rows times a power of two, for tensor cores without BF16.
//
// A BF16 number has 8 significant bits and FP16 holds 11 from 2^-14 up, fewer down to 2^-24. With the row's largest
// magnitude scaled to [2^14, 2^15) every number of more than 2^-32 of it is exact; a smaller one is off by at most
// 2^-25 of the scaled row, which is 2^-39 of the row's largest, less than an FP32 sum of the row's products may lose.
#ifndef OFFLOAD_CUDA_HALF_CUH_
#define OFFLOAD_CUDA_HALF_CUH_

#include <cuda_fp16.h>

#include "cuda/pieces.cuh"

namespace offload::cuda {

// The larger magnitude of two BF16 numbers in a word, as bits, and `most`.
__device__ inline uint32_t largest_bits(uint32_t pair, uint32_t most) {
  return max(most, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
}

// Powers of two for a row whose largest magnitude has these BF16 bits. Exponents at the ends of the range are taken as
// the nearest from which both factors are normal numbers.
struct HalfScale {
  float factor, inverse;
  __device__ explicit HalfScale(uint32_t bits) {
    const uint32_t exponent = min(max(bits >> 7, 15u), 254u);
    factor = __uint_as_float((268u - exponent) << 23);
    inverse = __uint_as_float((exponent - 14u) << 23);
  }
};

// Two BF16 numbers of a word, scaled, as two FP16 numbers.
__device__ inline uint32_t half_pair(uint32_t pair, float factor) {
  float low, high;
  widen_pair(pair, low, high);
  const __half2 halves = __floats2half2_rn(low * factor, high * factor);
  return *reinterpret_cast<const uint32_t*>(&halves);
}
__device__ inline uint4 half_pairs(const uint4& pairs, float factor) {
  return make_uint4(half_pair(pairs.x, factor), half_pair(pairs.y, factor), half_pair(pairs.z, factor),
                    half_pair(pairs.w, factor));
}
__device__ inline uint32_t largest_bits(const uint4& pairs, uint32_t most) {
  return largest_bits(pairs.x, largest_bits(pairs.y, largest_bits(pairs.z, largest_bits(pairs.w, most))));
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_HALF_CUH_
