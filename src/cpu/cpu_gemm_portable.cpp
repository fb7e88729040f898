// The level that every x86-64 processor runs: vectors of 4 lanes, and the C library's fmaf where a contract demands an
// FMA. Correct first; it is not meant to be fast.
#include <cstring>

#include "core/canonical.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kGemmRows = 4;
constexpr int kGemmVectors = 2;
constexpr int kCanonicalVectors = 12;
constexpr Isa kIsa = Isa::portable;

inline Vec zero() {
  return Vec{0.0f, 0.0f, 0.0f, 0.0f};
}
inline Vec broadcast(float s) {
  return Vec{s, s, s, s};
}
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) {
  std::memcpy(p, &v, sizeof v);
}
inline Vec fma_exact(Vec a, Vec b, Vec c) {
  return Vec{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
             __builtin_fmaf(a[3], b[3], c[3])};
}
inline Vec mul_add(Vec a, Vec b, Vec c) {
  return a * b + c;
}
// a > b ? a : b, so b when either is NaN; smaller() likewise.
inline Vec larger(Vec a, Vec b) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = a[i] > b[i] ? a[i] : b[i];
  return v;
}
inline Vec smaller(Vec a, Vec b) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = a[i] < b[i] ? a[i] : b[i];
  return v;
}
inline Bits bits_of(Vec v) {
  Bits bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline Vec from_bits(Bits bits) {
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
// p * 2^k with k in the low bits of `shifted`.
inline Vec scale_by_power(Vec p, Vec shifted) {
  return from_bits(bits_of(p) + (bits_of(shifted) << 23));
}
inline Vec load(const uint16_t* p) {
  return from_bits(Bits{static_cast<uint32_t>(p[0]) << 16, static_cast<uint32_t>(p[1]) << 16,
                        static_cast<uint32_t>(p[2]) << 16, static_cast<uint32_t>(p[3]) << 16});
}
inline uint32_t rounded_bits(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits | 0x400000u;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}
inline Vec round_bf16(Vec v) {
  Bits bits = bits_of(v);
  for (int i = 0; i < kWidth; ++i) bits[i] = rounded_bits(bits[i]) & 0xffff0000u;
  return from_bits(bits);
}
inline void store(uint16_t* p, Vec v) {
  const Bits bits = bits_of(v);
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint16_t>(rounded_bits(bits[i]) >> 16);
}

// The weights of accumulators [part * kWidth, part * kWidth + kWidth) of a canonical block: the elements with k % 8 <
// 4, or the others.
template <typename T>
inline Vec canonical_half(const T* block, int part, int high) {
  return load(block + part * 8 + high * 4);
}
template <typename T>
inline void canonical_halves(const T* block, int part, Vec& low, Vec& high) {
  low = canonical_half(block, part, 0);
  high = canonical_half(block, part, 1);
}
inline float total(Vec v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}
// acc[i] += acc[i + w] for w = 16, 8, 4, 2, 1.
inline float canonical_total(const Vec* acc) {
  const Vec a = acc[0] + acc[4], b = acc[1] + acc[5], c = acc[2] + acc[6], d = acc[3] + acc[7];
  return total((a + c) + (b + d));
}

}  // namespace
}  // namespace offload::cpu

#define OFL_KERNEL_TABLE portable_kernels
#include "cpu/cpu_kernels_inl.h"
