// The AVX-512 level (F, BW, VL, DQ): 32 registers of 16 lanes. See cpu_gemm.h for what a unit with -m flags may
// contain.
#include <immintrin.h>

#include "core/canonical.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {
namespace {

using Vec = __m512;
constexpr int kWidth = 16;
constexpr int kGemmRows = 14;
constexpr int kGemmVectors = 2;
constexpr int kCanonicalVectors = 24;  // of accumulators in registers
constexpr Isa kIsa = Isa::avx512;

inline Vec zero() {
  return _mm512_setzero_ps();
}
inline Vec broadcast(float s) {
  return _mm512_set1_ps(s);
}
inline Vec load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void store(float* p, Vec v) {
  _mm512_storeu_ps(p, v);
}
inline Vec fma_exact(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Vec mul_add(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
// a > b ? a : b, so b when either is NaN; smaller() likewise.
inline Vec larger(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
inline Vec smaller(Vec a, Vec b) {
  return _mm512_min_ps(a, b);
}
// p * 2^k with k in the low bits of `shifted`.
inline Vec scale_by_power(Vec p, Vec shifted) {
  const __m512i k = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), k));
}
inline Vec load(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// The BF16 bits of each lane, in the upper halves; the lower halves hold what was cut.
inline __m512i rounded_bits(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), up, quiet);
}
inline Vec round_bf16(Vec v) {
  return _mm512_castsi512_ps(_mm512_and_si512(rounded_bits(v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void store(uint16_t* p, Vec v) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(v), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

// The weights of accumulators [part * kWidth, part * kWidth + kWidth) of a canonical block: the elements with k % 8 <
// 4, or the others.
inline Vec canonical_half(const uint16_t* block, int part, int high) {
  const __m512i w = _mm512_loadu_si512(block + part * 32), none = _mm512_setzero_si512();
  return _mm512_castsi512_ps(high != 0 ? _mm512_unpackhi_epi16(none, w) : _mm512_unpacklo_epi16(none, w));
}
inline Vec canonical_half(const float* block, int part, int high) {
  // w0 holds groups 0 and 1 as (0 low, 0 high, 1 low, 1 high), w1 groups 2 and 3.
  const Vec w0 = load(block + part * 32), w1 = load(block + part * 32 + 16);
  return high != 0 ? _mm512_shuffle_f32x4(w0, w1, 0xdd) : _mm512_shuffle_f32x4(w0, w1, 0x88);
}
// Both halves from one load: without the empty asm the compiler would load twice to save an instruction, and loads are
// what bounds a product of one row.
inline void canonical_halves(const uint16_t* block, int part, Vec& low, Vec& high) {
  __m512i w = _mm512_loadu_si512(block + part * 32);
  asm("" : "+v"(w));
  low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), w));
  high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), w));
}
inline void canonical_halves(const float* block, int part, Vec& low, Vec& high) {
  low = canonical_half(block, part, 0);
  high = canonical_half(block, part, 1);
}
inline float quad_total(__m128 q) {
  q = q + _mm_movehl_ps(q, q);
  return _mm_cvtss_f32(q) + _mm_cvtss_f32(_mm_shuffle_ps(q, q, 1));
}
inline float total(Vec v) {
  const __m256 half = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
  return quad_total(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
// acc[i] += acc[i + w] for w = 16, 8, 4, 2, 1.
inline float canonical_total(const Vec* acc) {
  return total(acc[0] + acc[1]);
}

}  // namespace
}  // namespace offload::cpu

#define OFL_KERNEL_TABLE avx512_kernels
#include "cpu/cpu_kernels_inl.h"
