// The chunked form of the gated delta rule over chunks of up to 64 rows, keys of up to 128 dimensions.
//
// With G the running sum of g in a chunk, M the state before it, and rows i, l of the chunk:
//   A[i][l] = beta_i (k_i . k_l) exp(G_i - G_l), l < i        T = (I + A)^-1
//   P[i][l] = (q_i . k_l) exp(G_i - G_l), l <= i
//   V' = T (beta v - beta exp(G) K M)        out = exp(G) Q M + P V'        M <- exp(G_n) M + sum_l exp(G_n - G_l) k_l
//   V'_l^T
// A missing row of a short chunk has k = q = beta = g = 0.
//
// A first kernel makes T, P and the factors of every row for a segment of chunks, all chunks and heads at once. A
// second one then goes through the segment chunk by chunk; value columns are independent of each other. Two of each:
// gated_delta_fma.cuh and gated_delta_mma.cuh. Here is what they share.
#ifndef OFFLOAD_CUDA_GATED_DELTA_CHUNKS_CUH_
#define OFFLOAD_CUDA_GATED_DELTA_CHUNKS_CUH_

#include "cuda/gated_delta.cuh"

namespace offload::cuda {

inline constexpr int kDeltaChunk = 64;                  // rows
inline constexpr int kKeyDims = 128;                    // of a key, zeros behind key_dim
inline constexpr int kProductStride = kDeltaChunk + 4;  // floats: 16-byte rows that spread over the banks

// Per row of a chunk and value head. M is read with q times `query` and k times `key_in` and takes k times `key_out`;
// decay[0] is the factor of M.
enum DeltaFactor : int { kQueryFactor, kKeyInFactor, kKeyOutFactor, kBetaFactor, kDecayFactor, kDeltaFactors };

// The rows of one launch, and what the first kernel leaves for the second.
struct DeltaSegment {
  int32_t first = 0, end = 0;   // rows of the call
  int32_t chunk = kDeltaChunk;  // rows of a chunk, at most kDeltaChunk
  int32_t product_bytes = 0;    // of a chunk and head
  char* products = nullptr;     // [chunks][heads][product_bytes]: T and P, laid out as the pair of kernels wants them
  float* factors = nullptr;     // [chunks][heads][kDeltaFactors][kDeltaChunk]

  template <typename T>
  __device__ T* products_of(const DeltaCall& a, int chunk_id, int head) const {
    return reinterpret_cast<T*>(products + (int64_t{chunk_id} * a.heads + head) * product_bytes);
  }
  __device__ float* factors_of(const DeltaCall& a, int chunk_id, int head) const {
    return factors + (int64_t{chunk_id} * a.heads + head) * kDeltaFactors * kDeltaChunk;
  }
  __device__ int chunks() const { return (end - first + chunk - 1) / chunk; }
  __device__ int first_row(int chunk_id) const { return first + chunk_id * chunk; }
  __device__ int rows(int chunk_id) const { return min(chunk, end - first_row(chunk_id)); }
};

// What a row's keys and queries are multiplied by to be normalised, and queries scaled; 0 for missing rows. -0 asks for
// it to be done before products, where those of the row as it is would overflow.
struct RowScales {
  float key[kDeltaChunk], query[kDeltaChunk];
};

// G and beta of one head's rows. G is the sum of two floats, so that differences cancel.
struct RowDecays {
  float high[kDeltaChunk], low[kDeltaChunk], beta[kDeltaChunk];

  // exp(G_row - G_column); 0 for column > row, where it could overflow.
  __device__ float between(int row, int column) const {
    return column > row ? 0.0f : expf((high[row] - high[column]) + (low[row] - low[column]));
  }

  // Finds them, and writes the head's factors. A warp calls it; a lane has rows 2 lane and 2 lane + 1.
  template <typename T>
  __device__ void find(const DeltaCall& a, const DeltaSegment& segment, int chunk_id, int head,
                       const RowScales& scales) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, first = segment.first_row(chunk_id);
    double g[2];
    float strength[2];
    for (int i = 0; i < 2; ++i) {
      const bool there = 2 * lane + i < segment.rows(chunk_id);
      const float one = there ? log_decay<T>(a, first + 2 * lane + i, head) : 0.0f;
      g[i] = static_cast<double>(one < kLogDecayLeast ? kLogDecayLeast : one);  // a NaN stays one
      strength[i] = there ? write_strength<T>(a, first + 2 * lane + i, head) : 0.0f;
    }
    double sum = g[0] + g[1];
    for (int width = 1; width < kWarp; width *= 2) {
      const double lower = __shfl_up_sync(kAllLanes, sum, width);
      if (lane >= width) sum += lower;
    }
    const double total = __shfl_sync(kAllLanes, sum, kWarp - 1), before_last = sum - g[1];
    float* factors = segment.factors_of(a, chunk_id, head);
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      const double here = i == 0 ? before_last : sum;
      const float since_start = expf(static_cast<float>(here));
      high[row] = static_cast<float>(here);
      low[row] = static_cast<float>(here - static_cast<double>(high[row]));
      beta[row] = strength[i];
      factors[kQueryFactor * kDeltaChunk + row] = scales.query[row] * since_start;
      factors[kKeyInFactor * kDeltaChunk + row] = strength[i] * scales.key[row] * since_start;
      factors[kKeyOutFactor * kDeltaChunk + row] = scales.key[row] * expf(static_cast<float>(total - here));
      factors[kBetaFactor * kDeltaChunk + row] = strength[i];
      factors[kDecayFactor * kDeltaChunk + row] = expf(static_cast<float>(total));
    }
  }
};

// Column `column` of T by forward substitution, from -A, of which only what is below the diagonal is read.
// REQUIRES: column >= kFirst.
template <int kFirst>
__device__ inline void substitute(const float (*minus_a)[kProductStride], int column, float (&x)[kDeltaChunk]) {
#pragma unroll
  for (int i = 0; i < kFirst; ++i) x[i] = 0;
#pragma unroll
  for (int i = kFirst; i < kDeltaChunk; ++i) {
    float sums[4] = {i == column ? 1.0f : 0.0f};
#pragma unroll
    for (int l = kFirst; l < i; l += 4) {
      const float4 a = load4(&minus_a[i][l]);
      sums[0] = fmaf(a.x, x[l], sums[0]);
      if (l + 1 < i) sums[1] = fmaf(a.y, x[l + 1], sums[1]);
      if (l + 2 < i) sums[2] = fmaf(a.z, x[l + 2], sums[2]);
      if (l + 3 < i) sums[3] = fmaf(a.w, x[l + 3], sums[3]);
    }
    x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}
// The same for any column: of columns of the second half the first half is zero, a third of the work.
__device__ inline void substitute_column(const float (*minus_a)[kProductStride], int column, float (&x)[kDeltaChunk]) {
  if (column < kDeltaChunk / 2)
    substitute<0>(minus_a, column, x);
  else
    substitute<kDeltaChunk / 2>(minus_a, column, x);
}

// Eight elements as they lie in memory, so that loads can be under way while registers are few.
template <typename T>
struct RawPiece {
  static constexpr int kWords = 8 * sizeof(T) / 4;
  uint32_t words[kWords];

  template <bool kVector>
  __device__ void load(const T* p, int valid) {
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 x = valid > 0 ? __ldg(reinterpret_cast<const uint4*>(p) + i / 4) : make_uint4(0, 0, 0, 0);
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i] = i < valid ? __float_as_uint(load_float(p + i)) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        words[i / 2] = (i < valid ? uint32_t{p[i].bits} : 0) | (i + 1 < valid ? uint32_t{p[i + 1].bits} << 16 : 0);
    }
  }
  __device__ void widen(float (&out)[8]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_pair(words[i], out[2 * i], out[2 * i + 1]);
    }
  }
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GATED_DELTA_CHUNKS_CUH_
