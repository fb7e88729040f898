// The AVX2 + FMA level: 16 registers of 8 lanes. See cpu_gemm.h for what a unit with -m flags may contain.
#include <immintrin.h>

#include "core/canonical.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {
namespace {

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kGemmRows = 6;
constexpr int kGemmVectors = 2;
constexpr int kCanonicalVectors = 12;  // of accumulators in registers
constexpr Isa kIsa = Isa::avx2;

inline Vec zero() {
  return _mm256_setzero_ps();
}
inline Vec broadcast(float s) {
  return _mm256_set1_ps(s);
}
inline Vec load(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v);
}
inline Vec fma_exact(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Vec mul_add(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
// a > b ? a : b, so b when either is NaN; smaller() likewise.
inline Vec larger(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
inline Vec smaller(Vec a, Vec b) {
  return _mm256_min_ps(a, b);
}
// p * 2^k with k in the low bits of `shifted`.
inline Vec scale_by_power(Vec p, Vec shifted) {
  const __m256i k = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), k));
}
inline Vec load(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
// The BF16 bits of each lane, in the upper halves; the lower halves hold what was cut.
inline __m256i rounded_bits(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
inline Vec round_bf16(Vec v) {
  return _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(v), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void store(uint16_t* p, Vec v) {
  const __m256i words = _mm256_srli_epi32(rounded_bits(v), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// The weights of accumulators [part * kWidth, part * kWidth + kWidth) of a canonical block: the elements with k % 8 <
// 4, or the others.
inline Vec canonical_half(const uint16_t* block, int part, int high) {
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + part * 16)),
                none = _mm256_setzero_si256();
  return _mm256_castsi256_ps(high != 0 ? _mm256_unpackhi_epi16(none, w) : _mm256_unpacklo_epi16(none, w));
}
inline Vec canonical_half(const float* block, int part, int high) {
  const Vec w0 = load(block + part * 16), w1 = load(block + part * 16 + 8);
  return high != 0 ? _mm256_permute2f128_ps(w0, w1, 0x31) : _mm256_permute2f128_ps(w0, w1, 0x20);
}
// Both halves from one load: without the empty asm the compiler would load twice to save an instruction, and loads are
// what bounds a product of one row.
inline void canonical_halves(const uint16_t* block, int part, Vec& low, Vec& high) {
  __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + part * 16));
  asm("" : "+x"(w));
  low = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), w));
  high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), w));
}
inline void canonical_halves(const float* block, int part, Vec& low, Vec& high) {
  low = canonical_half(block, part, 0);
  high = canonical_half(block, part, 1);
}
// acc[i] += acc[i + w] for w = 16, 8, 4, 2, 1.
inline float canonical_total(const Vec* acc) {
  const Vec v = (acc[0] + acc[2]) + (acc[1] + acc[3]);
  __m128 q = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
  q = q + _mm_movehl_ps(q, q);
  return _mm_cvtss_f32(q) + _mm_cvtss_f32(_mm_shuffle_ps(q, q, 1));
}
inline float total(Vec v) {
  __m128 q = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
  q = q + _mm_movehl_ps(q, q);
  return _mm_cvtss_f32(q) + _mm_cvtss_f32(_mm_shuffle_ps(q, q, 1));
}

}  // namespace
}  // namespace offload::cpu

#define OFL_KERNEL_TABLE avx2_kernels
#include "cpu/cpu_kernels_inl.h"
