// The canonical order of small-row products: one sum, the same bits on every backend and ISA level.
//
// For up to kCanonicalRowsMax rows a product y = sum_k x[k] * w[k] is computed as
//   32 FP32 accumulators, all +0 at the start; element k goes to accumulator 4 * ((k / 8) % 8) + k % 4, in ascending k,
//   by one fused multiply-add; k runs to the next multiple of 64 with zeros behind the last element;
//   then acc[i] += acc[i + w] for i < w, for w = 16, 8, 4, 2, 1; y = acc[0].
// Why this map: eight lanes of a GPU warp load 16 bytes each of one row (128 contiguous bytes) and each keeps 4
// accumulators; on a CPU the even and odd halves of each 128-bit lane are one unpack of a plain 64-byte load. Weights
// stay row-major. exp is one polynomial in FMAs and silu one division, so that they too have the same bits everywhere.
//
// Header-only so that host and device code compile the same text. No state.
#ifndef OFFLOAD_CORE_CANONICAL_H_
#define OFFLOAD_CORE_CANONICAL_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define OFL_HOST_DEVICE __host__ __device__
#else
#define OFL_HOST_DEVICE
#endif

namespace offload {

inline constexpr int64_t kCanonicalRowsMax = 8;
inline constexpr int kCanonicalAccumulators = 32;
inline constexpr int64_t kCanonicalBlock = 64;  // elements after which the accumulator pattern repeats

OFL_HOST_DEVICE constexpr int canonical_accumulator(int64_t k) {
  return static_cast<int>(4 * ((k / 8) % 8) + k % 4);
}

// Constants of canonical_exp: Cody-Waite reduction by ln 2 in two parts (k * kLn2High is exact), degree-7 Taylor
// polynomial of the remainder |r| <= ln2 / 2 (truncation 5e-9 relative), exponent added to the bits.
namespace canonical {
inline constexpr float kExpMin = -86.0f;
inline constexpr float kExpMax = 88.0f;
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting rounds to integer
inline constexpr float kLn2High = 0.693359375f;
inline constexpr float kLn2Low = -2.12194440054690583e-4f;
// A function, as device code has no constant arrays of namespace scope.
OFL_HOST_DEVICE constexpr float exp_poly(int i) {
  constexpr float kPoly[6] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
  return kPoly[i];
}
}  // namespace canonical

// p * 2^k, where the low bits of `shifted` = k + kRoundMagic hold k. REQUIRES: p in [1/2, 2), k in [-125, 127].
OFL_HOST_DEVICE inline float canonical_scale(float p, float shifted) {
  uint32_t p_bits, k_bits;
  std::memcpy(&p_bits, &p, sizeof p);
  std::memcpy(&k_bits, &shifted, sizeof shifted);
  p_bits += k_bits << 23;  // the magic number's own bits are shifted out
  std::memcpy(&p, &p_bits, sizeof p);
  return p;
}

// exp(x), relative error below 2e-7. REQUIRES: x in [kExpMin, kExpMax]. Vector code repeats these steps one by one and
// so has the same bits.
OFL_HOST_DEVICE inline float canonical_exp_within(float x) {
  using namespace canonical;
  const float shifted = std::fma(x, kLog2E, kRoundMagic);
  const float k = shifted - kRoundMagic;
  float r = std::fma(k, -kLn2High, x);
  r = std::fma(k, -kLn2Low, r);
  float p = exp_poly(0);
  for (int i = 1; i < 6; ++i) p = std::fma(p, r, exp_poly(i));
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  return canonical_scale(p, shifted);
}

// The same for every x: outside, the value at the nearer end, so that nothing overflows or leaves the normal range.
OFL_HOST_DEVICE inline float canonical_exp(float x) {
  x = x < canonical::kExpMin ? canonical::kExpMin : x;
  x = x > canonical::kExpMax ? canonical::kExpMax : x;
  return canonical_exp_within(x);
}

// t * sigmoid(t) = t / (1 + exp(-t)).
OFL_HOST_DEVICE inline float canonical_silu(float t) {
  return t / (1.0f + canonical_exp(-t));
}

}  // namespace offload

#endif  // OFFLOAD_CORE_CANONICAL_H_
