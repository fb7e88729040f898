// The products of the chunked gated delta rule for a block of kDeltaThreads threads and 32 value columns: on the
// ordinary units in FP32, and from sm_80 on on matrix units.
//
// Each is a policy with the same calls over matrices in shared memory. A thread holds 4 x 4 sums of a chunk's
// [64 rows][32 columns]; place(i, c) says which. kStride: floats of a row of [*][32 columns].
#ifndef OFFLOAD_CUDA_GATED_DELTA_MATH_CUH_
#define OFFLOAD_CUDA_GATED_DELTA_MATH_CUH_

#include "cuda/gated_delta.cuh"

namespace offload::cuda {

inline constexpr int kDeltaThreads = 128;

struct DeltaPlace {
  int row, column;
};

// A thread has columns 4 (lane % 8) .. + 3; of a chunk's rows 16 warp + lane / 8 + 4 i, of the state's rows 32 warp +
// 8 (lane / 8) .. + 7.
class DeltaFma {
 public:
  static constexpr int kStride = kDeltaColumns;

  __device__ DeltaFma()
      : warp_(static_cast<int>(threadIdx.x) / kWarp),
        line_(static_cast<int>(threadIdx.x) % kWarp / 8),
        column_(static_cast<int>(threadIdx.x) % 8 * 4) {}

  __device__ DeltaPlace place(int i, int c) const { return {16 * warp_ + line_ + 4 * i, column_ + c}; }

  // sums += x[rows][0, depth) b[0, depth). depth: a multiple of 4.
  __device__ void multiply(const float* x, int stride, const float (*b)[kStride], int depth, float (&sums)[4][4]) const {
#pragma unroll 2
    for (int d = 0; d < depth; d += 4) {
      const float4 b0 = load4(&b[d][column_]), b1 = load4(&b[d + 1][column_]), b2 = load4(&b[d + 2][column_]),
                   b3 = load4(&b[d + 3][column_]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 a = load4(x + place(i, 0).row * stride + d);
        add_scaled(sums[i], a.x, b0);
        add_scaled(sums[i], a.y, b1);
        add_scaled(sums[i], a.z, b2);
        add_scaled(sums[i], a.w, b3);
      }
    }
  }
  // state[d] = decay state[d] + sum over l < rows of x[l][d] values[l], for all 128 d.
  __device__ void update(const float* x, int stride, const float (*values)[kStride], int rows, float decay,
                         float (*state)[kStride]) const {
    const int d = 32 * warp_ + 8 * line_;
    float sums[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 m = load4(&state[d + i][column_]);
      sums[i][0] = decay * m.x, sums[i][1] = decay * m.y, sums[i][2] = decay * m.z, sums[i][3] = decay * m.w;
    }
#pragma unroll 4
    for (int l = 0; l < rows; ++l) {
      const float* k = x + l * stride + d;
      const float4 low = load4(k), high = load4(k + 4), v = load4(&values[l][column_]);
      const float keys[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) add_scaled(sums[i], keys[i], v);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<float4*>(&state[d + i][column_]) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  }

 private:
  __device__ static void add_scaled(float (&sums)[4], float factor, const float4& x) {
    sums[0] = fmaf(factor, x.x, sums[0]);
    sums[1] = fmaf(factor, x.y, sums[1]);
    sums[2] = fmaf(factor, x.z, sums[2]);
    sums[3] = fmaf(factor, x.w, sums[3]);
  }

  const int warp_, line_, column_;
};

// A number as the sum of two with 11 significant bits each: what is left of it is below 2^-22.
struct Tf32Pair {
  uint32_t high, low;
};
__device__ inline uint32_t round_to_tf32(float x) {
  uint32_t bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}
__device__ inline Tf32Pair split_tf32(float x) {
  const uint32_t high = round_to_tf32(x);
  return {high, round_to_tf32(x - __uint_as_float(high))};
}

// d [16, 8] += a [16, 8] b [8, 8]; TF32, FP32 sums. Lane l holds of a: rows l / 4 (0, 2) and l / 4 + 8 (1, 3), columns
// l % 4 (0, 1) and l % 4 + 4 (2, 3); of b: rows l % 4 and l % 4 + 4 of column l / 4; of d as in mma.cuh.
__device__ inline void mma_tf32_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                     uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// Products of FP32 numbers as three products of TF32 ones, so that they err as FP32's own do. A warp has 16 of a
// chunk's rows and 32 of the state's.
class DeltaTensor {
 public:
  static constexpr int kStride = kDeltaColumns + 8;  // the rows that a fragment reads lie in different banks

  __device__ DeltaTensor()
      : warp_(static_cast<int>(threadIdx.x) / kWarp),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  __device__ DeltaPlace place(int i, int c) const { return {16 * warp_ + g_ + c / 2 * 8, 8 * i + 2 * t_ + c % 2}; }

  // As DeltaFma::multiply, but depth goes up to a multiple of 8 and what lies there must be finite.
  __device__ void multiply(const float* x, int stride, const float (*b)[kStride], int depth, float (&sums)[4][4]) const {
    const float* low_row = x + (16 * warp_ + g_) * stride + t_;
    const float* high_row = low_row + 8 * stride;
#pragma unroll 2
    for (int d = 0; d < depth; d += 8) {
      const Tf32Pair a[4] = {split_tf32(low_row[d]), split_tf32(high_row[d]), split_tf32(low_row[d + 4]),
                             split_tf32(high_row[d + 4])};
#pragma unroll
      for (int j = 0; j < 4; ++j) add(sums[j], a, b, d, j);
    }
  }
  __device__ void update(const float* x, int stride, const float (*values)[kStride], int rows, float decay,
                         float (*state)[kStride]) const {
    float sums[2][4][4];
    const auto at = [&](int m, int j, int c) -> float& {
      return state[32 * warp_ + 16 * m + g_ + c / 2 * 8][8 * j + 2 * t_ + c % 2];
    };
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[m][j][c] = decay * at(m, j, c);
    for (int l = 0; l < rows; l += 8) {
      const float* first = x + (l + t_) * stride + 32 * warp_ + g_;
      const float* second = first + 4 * stride;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const Tf32Pair a[4] = {split_tf32(first[16 * m]), split_tf32(first[16 * m + 8]), split_tf32(second[16 * m]),
                               split_tf32(second[16 * m + 8])};
#pragma unroll
        for (int j = 0; j < 4; ++j) add(sums[m][j], a, values, l, j);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) at(m, j, c) = sums[m][j][c];
  }

 private:
  // sum += a x rows d .. d + 7, columns 8 j .. + 7 of b; small terms first.
  __device__ void add(float (&sum)[4], const Tf32Pair (&a)[4], const float (*b)[kStride], int d, int j) const {
    const Tf32Pair b0 = split_tf32(b[d + t_][8 * j + g_]), b1 = split_tf32(b[d + t_ + 4][8 * j + g_]);
    mma_tf32_1688(sum, a[0].low, a[1].low, a[2].low, a[3].low, b0.high, b1.high);
    mma_tf32_1688(sum, a[0].high, a[1].high, a[2].high, a[3].high, b0.low, b1.low);
    mma_tf32_1688(sum, a[0].high, a[1].high, a[2].high, a[3].high, b0.high, b1.high);
  }

  const int warp_, g_, t_;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GATED_DELTA_MATH_CUH_
