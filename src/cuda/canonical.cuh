// The canonical product of core/canonical.h on a GPU: the same bits as on the CPU at every ISA level.
//
// Eight lanes own one row of w: lane j reads elements 8j .. 8j + 7 of each block of 64, 16 bytes of BF16, and keeps the
// accumulators 4j .. 4j + 3. A warp reads four rows at once, 128 contiguous bytes of each. Bound by reading w, so what
// counts is bytes under way: a lane starts the loads of kUnroll blocks before it uses the first, and where there are
// few rows of w the blocks are single warps, so that every multiprocessor has some. x comes from the L1 cache; fetching
// it ahead into registers as well was slower (n = 320, k = 10240 on an H200: 80 us against 13).
#ifndef OFFLOAD_CUDA_CANONICAL_CUH_
#define OFFLOAD_CUDA_CANONICAL_CUH_

#include "cuda/kernel.cuh"

namespace offload::cuda {

inline constexpr int kRowLanes = 8;
inline constexpr int kCanonicalThreads = 128;  // of a block at most

// Elements [at, at + 8) of a row of k as floats, zeros behind k. kVector: 16-byte loads. REQUIRES then: the row is
// aligned to 16 bytes and 8 divides k.
template <bool kVector, typename T>
struct Eight {
  T raw[8];
  __device__ void load(const T* row, int64_t at, int64_t k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) raw[i] = at + i < k ? row[at + i] : T{};
  }
  __device__ float operator[](int i) const {
    return load_float(raw + i);
  }
};
template <>
struct Eight<true, bf16> {
  uint4 raw;
  __device__ void load(const bf16* row, int64_t at, int64_t k) {
    raw = at < k ? *reinterpret_cast<const uint4*>(row + at) : uint4{0, 0, 0, 0};
  }
  __device__ float operator[](int i) const {
    const uint32_t two = i < 2 ? raw.x : i < 4 ? raw.y : i < 6 ? raw.z : raw.w;
    return __uint_as_float(i % 2 == 0 ? two << 16 : two & 0xffff0000u);
  }
};
template <>
struct Eight<true, float> {
  float4 low, high;
  __device__ void load(const float* row, int64_t at, int64_t k) {
    const bool there = at < k;
    low = there ? *reinterpret_cast<const float4*>(row + at) : float4{0, 0, 0, 0};
    high = there ? *reinterpret_cast<const float4*>(row + at + 4) : float4{0, 0, 0, 0};
  }
  __device__ float operator[](int i) const {
    const float4& four = i < 4 ? low : high;
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }
};

// sums[m][s] = canonical sum of x[m] and w[s], on all eight lanes. kUnroll blocks of 64 elements are under way at once.
template <bool kVector, int kRows, int kStreams, int kUnroll, typename TX, typename TW>
__device__ inline void canonical_sums(const TX* const (&x)[kRows], const TW* const (&w)[kStreams], int64_t k,
                                      float (&sums)[kRows][kStreams]) {
  const int j = static_cast<int>(threadIdx.x) % kRowLanes;
  float acc[kRows][kStreams][4] = {};
  for (int64_t begin = 0; begin < k; begin += kUnroll * kCanonicalBlock) {
    Eight<kVector, TW> ws[kUnroll][kStreams];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) ws[u][s].load(w[s], begin + u * kCanonicalBlock + 8 * j, k);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        Eight<kVector, TX> xs;
        xs.load(x[m], begin + u * kCanonicalBlock + 8 * j, k);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
#pragma unroll
          for (int i = 0; i < 8; ++i) acc[m][s][i % 4] = fmaf(xs[i], ws[u][s][i], acc[m][s][i % 4]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      float(&a)[4] = acc[m][s];
#pragma unroll
      for (int lanes = 4; lanes > 0; lanes /= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] += __shfl_xor_sync(kAllLanes, a[i], lanes);
      }
      sums[m][s] = (a[0] + a[2]) + (a[1] + a[3]);
    }
  }
}

// Threads of a block for so many columns of all runs together: whole blocks only where they still reach every
// multiprocessor of a large card.
inline int canonical_threads(int64_t columns) {
  return columns < 8192 ? kWarp : kCanonicalThreads;
}

// Calls function(vector, rows): whether rows are read in 16-byte pieces, and the least of the compiled row counts that
// holds `rows`. What BF16 models run has them all; the rest, for oracles and odd alignments, only what it needs.
template <bool kAllCounts, typename Function>
void with_canonical_shape(bool aligned, int64_t rows, const Function& function) {
  if (!aligned) return function(std::false_type{}, std::integral_constant<int, 8>{});
  if (rows <= 1) return function(std::true_type{}, std::integral_constant<int, 1>{});
  if constexpr (kAllCounts) {
    if (rows <= 2) return function(std::true_type{}, std::integral_constant<int, 2>{});
    if (rows <= 4) return function(std::true_type{}, std::integral_constant<int, 4>{});
  }
  function(std::true_type{}, std::integral_constant<int, 8>{});
}

template <typename TX, typename TW>
constexpr bool is_bf16_product() {
  return std::is_same_v<TX, bf16> && std::is_same_v<TW, bf16>;
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_CANONICAL_CUH_
