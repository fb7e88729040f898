// Matrix products of gathered rows with one of several weights ("runs"): out[out_row] = sum_k x[x_row][k] * w[n][k].
//
// One launch serves all runs. A block owns a tile of rows of one run and of output columns; grid x walks the columns,
// so that the tiles of one run's weights are close in time and a second tile of rows finds them in the L2 cache. With
// kSwiglu, w holds gate rows, then up rows, and what is stored is silu(gate) * up: a warp's columns are half gate, half
// up of the same outputs, so that no product leaves the registers.
//
// Two kernels here: on BF16 matrix units, and on the ordinary units in FP32 for every other type and alignment; those
// on FP16 and on Hopper's warpgroup units have their own files. Sums run over k in ascending blocks of the tile depth.
#ifndef OFFLOAD_CUDA_GEMM_CUH_
#define OFFLOAD_CUDA_GEMM_CUH_

#include <cuda_fp16.h>

#include "cuda/kernel.cuh"
#include "cuda/mma.cuh"

namespace offload::cuda {

// Rows [first, first + count) of the call's row lists, all for one weight matrix.
struct GemmRun {
  const void* w = nullptr;               // [n or 2n, k] contiguous
  const int32_t* w_exponents = nullptr;  // e of each row of w, where needs_exponents()
  int32_t first = 0;
  int32_t count = 0;
};

// Rows [row, row + tile rows) of a run.
struct GemmTile {
  int32_t run = 0;
  int32_t row = 0;
};

struct GroupedGemm {
  const void* x = nullptr;
  int64_t x_stride = 0;                  // elements
  const int32_t* x_rows = nullptr;       // by list index; null: the list index itself
  const int32_t* x_exponents = nullptr;  // e of each row of x, where prepare_x() set them
  const GemmRun* runs = nullptr;
  const GemmTile* tiles = nullptr;
  const int32_t* tile_count = nullptr;  // in device memory; null: as many as the grid has
  int64_t n = 0, k = 0;                 // output columns
  void* out = nullptr;
  int64_t out_stride = 0;
  const int32_t* out_rows = nullptr;  // by list index; null: the list index itself
  bool pairs_aligned = false;         // two neighbouring outputs may be stored at once
  bool chunks_aligned = false;        // as many as the kernel stores at once
  Rounding rounding = Rounding::fused;
  Math math = Math::native;

  // The sum as `math` has it before it is stored.
  __device__ float finished(float sum) const {
    return math == Math::fp16_out ? __half2float(__float2half_rn(sum)) : sum;
  }
  // Where step i of `steps` along k begins, in steps.
  __device__ int step_at(int i, int steps) const { return math == Math::reordered ? steps - 1 - i : i; }

  __device__ bool has_tile(unsigned i) const { return tile_count == nullptr || static_cast<int32_t>(i) < *tile_count; }
  __device__ int64_t x_row(int64_t i) const { return x_rows == nullptr ? i : x_rows[i]; }
  __device__ int64_t out_row(int64_t i) const { return out_rows == nullptr ? i : out_rows[i]; }
};

// rnd!(rnd(silu(rnd(gate))) * rnd(up)) before the final rounding, which the store does. TA: the activations' type.
template <typename TA>
__device__ inline float swiglu_of(float gate, float up, Rounding rounding) {
  return rnd<TA>(silu(rnd<TA>(gate, rounding)), rounding) * rnd<TA>(up, rounding);
}

__device__ inline void store_pair(float* p, float first, float second) {
  *reinterpret_cast<float2*>(p) = {first, second};
}
__device__ inline void store_pair(bf16* p, float first, float second) {
  *reinterpret_cast<uint32_t*>(p) = round_to_bf16_pair(first, second);
}

// --- matrix units ---

inline constexpr int kGemmThreads = 256;  // 2 warps of rows x 4 of columns
inline constexpr int kTileK = 64;
inline constexpr int kChunk = 8;  // elements of 16 bytes
inline constexpr int kChunks = kTileK / kChunk;
inline constexpr int kGemmStages = 3;

template <int kTileM, int kTileN>
constexpr int64_t gemm_shared_bytes() {
  return int64_t{kGemmStages} * (kTileM + kTileN) * kTileK * 2;
}

// Where chunk `chunk` of a tile's row lies: rows of 128 bytes, shuffled so that the eight rows of one ldmatrix and the
// chunks that one warp stores fall into different banks.
__device__ inline int tile_offset(int row, int chunk) {
  return row * kChunks + (chunk ^ (row & (kChunks - 1)));
}

// 2^e; 0 for -127. REQUIRES: -127 <= e <= 127.
__device__ inline float power_of_two(int e) {
  return __int_as_float((e + 127) << 23);
}

// One thread's share of a tile [kRows, kTileK]: chunk threadIdx % 8 of rows threadIdx / 8 + 32 i.
template <int kRows>
struct TileLoader {
  static constexpr int kMine = kRows * kChunks / kGemmThreads;
  const bf16* source[kMine];  // null: zeros

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / kChunks + i * (kGemmThreads / kChunks); }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  __device__ void copy(uint4* tile, int64_t k_begin, int64_t k, const void* somewhere) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const bool there = source[i] != nullptr && k_begin + chunk() * kChunk < k;
      copy_async_16(tile + tile_offset(row(i), chunk()), there ? source[i] + k_begin + chunk() * kChunk : somewhere,
                    there);
    }
  }
};

// d [rows of the warp / 16][columns of the warp / 8] += the products of one stage.
template <int kFragmentsM, int kFragmentsN>
__device__ inline void multiply_stage(float (&d)[kFragmentsM][kFragmentsN][4], const uint4* a_tile, const uint4* b_tile,
                                      int m0, int n0) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 0; step < kTileK / 16; ++step) {
    uint32_t a[kFragmentsM][4], b[kFragmentsN / 2][4];
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i)
      ldmatrix_x4(a[i], a_tile + tile_offset(m0 + i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
    for (int j = 0; j < kFragmentsN / 2; ++j)
      ldmatrix_x4(b[j], b_tile + tile_offset(n0 + j * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j)
        mma_bf16_16816(d[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
    }
  }
}

// Row of w for row `b` of the block's tile of w, or -1 behind the last. With kSwiglu a warp's kWarpN columns are half
// gate, half up.
template <bool kSwiglu, int kWarpN>
__device__ inline int64_t weight_row(const GroupedGemm& p, int64_t n0, int b) {
  if constexpr (!kSwiglu) return n0 + b < p.n ? n0 + b : -1;
  constexpr int kHalf = kWarpN / 2;
  const int64_t j = n0 + b / kWarpN * kHalf + b % kHalf;
  if (j >= p.n) return -1;
  return b % kWarpN < kHalf ? j : p.n + j;
}

// Output columns of a block.
template <bool kSwiglu, int kTileN>
constexpr int64_t gemm_tile_columns() {
  return kSwiglu ? kTileN / 2 : kTileN;
}

// Grid (columns / gemm_tile_columns, tiles), kGemmThreads threads. Bytes: the weights once (a second tile of rows reads
// them from the L2 cache), x once per block of columns. What bounds it once runs have some 100 rows was not found: it
// reaches a third of an H200's rate with tiles of 128 columns and of 256 alike.
template <int kTileM, int kTileN, bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(kGemmThreads, kTileN == 128 ? 2 : 1) grouped_mma_kernel(const GroupedGemm p) {
  extern __shared__ uint4 shared[];
  constexpr int kStages = kGemmStages, kStageChunks = (kTileM + kTileN) * kChunks, kFragmentsM = kTileM / 32;
  constexpr int kWarpN = kTileN / 4, kFragmentsN = kWarpN / 8;
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * gemm_tile_columns<kSwiglu, kTileN>();
  const auto* x = static_cast<const bf16*>(p.x);
  const auto* w = static_cast<const bf16*>(run.w);

  TileLoader<kTileM> a;
#pragma unroll
  for (int i = 0; i < a.kMine; ++i) {
    const int row = tile.row + a.row(i);
    a.source[i] = row < run.count ? x + p.x_row(run.first + row) * p.x_stride : nullptr;
  }
  TileLoader<kTileN> b;
#pragma unroll
  for (int i = 0; i < b.kMine; ++i) {
    const int64_t row = weight_row<kSwiglu, kWarpN>(p, n0, b.row(i));
    b.source[i] = row < 0 ? nullptr : w + row * p.k;
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int m0 = warp / 4 * (kTileM / 2), warp_n = warp % 4;
  const bool has_rows = tile.row + m0 < run.count;  // else this warp has nothing to multiply
  float d[kFragmentsM][kFragmentsN][4] = {};
  const auto a_tile = [&](int stage) { return shared + stage * kStageChunks; };
  const auto b_tile = [&](int stage) { return shared + stage * kStageChunks + kTileM * kChunks; };
  const int steps = static_cast<int>((p.k + kTileK - 1) / kTileK);
  const auto copy = [&](int step) {
    if (step < steps) {
      const int64_t k_begin = int64_t{p.step_at(step, steps)} * kTileK;
      a.copy(a_tile(step % kStages), k_begin, p.k, p.x);
      b.copy(b_tile(step % kStages), k_begin, p.k, p.x);
    }
    commit_async();
  };
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_async<kStages - 2>();
    __syncthreads();  // all have their part of this stage, and are done with the one before it
    copy(step + kStages - 1);
    if (has_rows) multiply_stage(d, a_tile(step % kStages), b_tile(step % kStages), m0, warp_n * kWarpN);
  }

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + m0 + i * 16 + half * 8 + lane / 4;
      if (row >= run.count) continue;
      TOut* out = static_cast<TOut*>(p.out) + p.out_row(run.first + row) * p.out_stride;
#pragma unroll
      for (int j = 0; j < (kSwiglu ? kFragmentsN / 2 : kFragmentsN); ++j) {
        const int64_t column = n0 + warp_n * (kSwiglu ? kWarpN / 2 : kWarpN) + j * 8 + lane % 4 * 2;
        const auto output = [&](int e) {
          const float sum = d[i][j][half * 2 + e];
          if constexpr (kSwiglu)
            return swiglu_of<bf16>(sum, d[i][j + kFragmentsN / 2][half * 2 + e], p.rounding);
          else
            return sum;
        };
        if (p.pairs_aligned && column + 1 < p.n) {
          store_pair(out + column, output(0), output(1));
        } else {
          if (column < p.n) store_float(out + column, output(0));
          if (column + 1 < p.n) store_float(out + column + 1, output(1));
        }
      }
    }
  }
}

// --- ordinary units ---

inline constexpr int kSimtTile = 64;   // rows and columns of a block
inline constexpr int kSimtDepth = 16;  // of k

// Grid (columns / gemm_tile_columns / 2, tiles of kSimtTile rows), 256 threads of 4 x 4 sums. FP32 throughout; bound by
// the FP32 units. With kSwiglu a block's 64 columns are 32 of gate, then 32 of up.
template <typename TX, typename TW, bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(256) grouped_simt_kernel(const GroupedGemm p) {
  __shared__ float a[kSimtDepth][kSimtTile + 4], b[kSimtDepth][kSimtTile + 4];
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  constexpr int kColumns = kSwiglu ? kSimtTile / 2 : kSimtTile;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int thread = static_cast<int>(threadIdx.x);

  // Thread t loads row t / 4, elements 4 * (t % 4) .. + 3 of both tiles.
  const int load_row = thread / 4, load_k = thread % 4 * 4;
  const bool has_x = tile.row + load_row < run.count;
  const TX* x = static_cast<const TX*>(p.x) + (has_x ? p.x_row(run.first + tile.row + load_row) * p.x_stride : 0);
  const int64_t column = n0 + load_row % kColumns;
  const bool has_w = column < p.n;
  const TW* w = static_cast<const TW*>(run.w) + (has_w ? (load_row < kColumns ? column : p.n + column) * p.k : 0);

  // Thread t sums rows 4 * (t / 16) .. + 3; columns 2 * (t % 16) .. + 1 and the same 32 further on, so that a thread
  // has gate and up of the same outputs.
  const int m0 = thread / 16 * 4, c0 = thread % 16 * 2;
  const float x_scale =
      has_x && p.x_exponents != nullptr ? power_of_two(p.x_exponents[p.x_row(run.first + tile.row + load_row)]) : 1;
  const int64_t w_row = load_row < kColumns ? column : p.n + column;
  const float w_scale = has_w && run.w_exponents != nullptr ? power_of_two(run.w_exponents[w_row]) : 1;
  const bool in_half = p.math != Math::native && p.math != Math::reordered;
  const auto operand = [&](float value, float scale) {
    return in_half ? __half2float(__float2half_rn(value * scale)) : value;
  };
  float d[4][4] = {};
  const int steps = static_cast<int>((p.k + kSimtDepth - 1) / kSimtDepth);
  for (int step = 0; step < steps; ++step) {
    const int64_t k0 = int64_t{p.step_at(step, steps)} * kSimtDepth;
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      const int64_t at = k0 + load_k + l;
      a[load_k + l][load_row] = has_x && at < p.k ? operand(load_float(x + at), x_scale) : 0.0f;
      b[load_k + l][load_row] = has_w && at < p.k ? operand(load_float(w + at), w_scale) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kSimtDepth; ++l) {
      const float bl[4] = {b[l][c0], b[l][c0 + 1], b[l][c0 + 32], b[l][c0 + 33]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float al = a[l][m0 + i];
#pragma unroll
        for (int j = 0; j < 4; ++j) d[i][j] = fmaf(al, bl[j], d[i][j]);
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = tile.row + m0 + i;
    if (row >= run.count) continue;
    TOut* out = static_cast<TOut*>(p.out) + p.out_row(run.first + row) * p.out_stride + n0;
    const auto sum = [&](int j, int64_t of_row) {
      if (p.x_exponents == nullptr) return p.finished(d[i][j]);
      return scalbnf(d[i][j], -(p.x_exponents[p.x_row(run.first + row)] + run.w_exponents[of_row]));
    };
#pragma unroll
    for (int j = 0; j < (kSwiglu ? 2 : 4); ++j) {
      const int c = c0 + j % 2 + j / 2 * 32;
      if (n0 + c >= p.n) continue;
      if constexpr (kSwiglu)
        store_float(out + c, swiglu_of<TX>(sum(j, n0 + c), sum(j + 2, p.n + n0 + c), p.rounding));
      else
        store_float(out + c, sum(j, n0 + c));
    }
  }
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GEMM_CUH_
