// Matrix products of gathered rows with one of several weights ("runs"): out[out_row] = sum_k x[x_row][k] * w[n][k].
//
// One launch serves all runs. A block owns a tile of rows of one run and of output columns; grid x walks the columns,
// so that the tiles of one run's weights are close in time and a second tile of rows finds them in the L2 cache. With
// kSwiglu, w holds gate rows, then up rows, and what is stored is silu(gate) * up: a warp's columns are half gate, half
// up of the same outputs, so that no product leaves the registers.
//
// Two kernels: on matrix units (BF16, or FP16 from BF16 bits scaled by a power of two per row of x and of w), and on
// the ordinary units in FP32 for every other type and alignment. Sums run over k in ascending blocks of the tile depth.
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
  const int32_t* x_exponents = nullptr;  // e of each row, by list index, where needs_exponents()
  const GemmRun* runs = nullptr;
  const GemmTile* tiles = nullptr;
  const int32_t* tile_count = nullptr;  // in device memory; null: as many as the grid has
  int64_t n = 0, k = 0;                 // output columns
  void* out = nullptr;
  int64_t out_stride = 0;
  const int32_t* out_rows = nullptr;  // by list index; null: the list index itself
  bool pairs_aligned = false;         // two neighbouring outputs may be stored at once
  bool chunks_aligned = false;        // 16 bytes of them
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

struct Bf16Units {
  static constexpr bool kAsync = true;  // tiles are copied as they are
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16816(d, a, b); }
};
struct ScaledUnits {
  static constexpr bool kAsync = false;  // tiles pass through registers and are converted
  __device__ static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16_16816(d, a, b); }
};

inline constexpr int kGemmThreads = 256;  // 2 warps of rows x 4 of columns
inline constexpr int kTileK = 64;
inline constexpr int kChunk = 8;  // elements of 16 bytes
inline constexpr int kChunks = kTileK / kChunk;

template <typename Units>
constexpr int gemm_stages() {
  return Units::kAsync ? 3 : 2;
}
template <typename Units, int kTileM, int kTileN>
constexpr int64_t gemm_shared_bytes() {
  return int64_t{gemm_stages<Units>()} * (kTileM + kTileN) * kTileK * 2;
}

// Where chunk `chunk` of a tile's row lies: rows of 128 bytes, shuffled so that the eight rows of one ldmatrix and the
// chunks that one warp stores fall into different banks.
__device__ inline int tile_offset(int row, int chunk) {
  return row * kChunks + (chunk ^ (row & (kChunks - 1)));
}

// REQUIRES: -126 <= e <= 127.
__device__ inline float power_of_two(int e) {
  return __int_as_float((e + 127) << 23);
}

// Eight BF16 bits x 2^e as FP16: exact while the product is normal, and subnormals below that.
__device__ inline uint4 scaled_to_f16(uint4 bits, float scale) {
  const auto pair = [scale](uint32_t two) {
    const __half2 h = __floats2half2_rn(__uint_as_float(two << 16) * scale, __uint_as_float(two & 0xffff0000u) * scale);
    return *reinterpret_cast<const uint32_t*>(&h);
  };
  return {pair(bits.x), pair(bits.y), pair(bits.z), pair(bits.w)};
}

// One thread's share of a tile [kRows, kTileK]: chunk threadIdx % 8 of rows threadIdx / 8 + 32 i.
template <typename Units, int kRows>
struct TileLoader {
  static constexpr int kMine = kRows * kChunks / kGemmThreads;
  const bf16* source[kMine];  // null: zeros
  float scale[kMine];
  uint4 staged[kMine];

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / kChunks + i * (kGemmThreads / kChunks); }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  __device__ bool valid(int i, int64_t k_begin, int64_t k) const {
    return source[i] != nullptr && k_begin + chunk() * kChunk < k;
  }
  __device__ void copy(uint4* tile, int64_t k_begin, int64_t k, const void* somewhere) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const bool there = valid(i, k_begin, k);
      copy_async_16(tile + tile_offset(row(i), chunk()), there ? source[i] + k_begin + chunk() * kChunk : somewhere,
                    there);
    }
  }
  __device__ void fetch(int64_t k_begin, int64_t k) {
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      staged[i] = valid(i, k_begin, k) ? *reinterpret_cast<const uint4*>(source[i] + k_begin + chunk() * kChunk)
                                       : uint4{0, 0, 0, 0};
  }
  __device__ void put(uint4* tile) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) tile[tile_offset(row(i), chunk())] = scaled_to_f16(staged[i], scale[i]);
  }
};

// d [rows of the warp / 16][columns of the warp / 8] += the products of one stage.
template <typename Units, int kFragmentsM, int kFragmentsN>
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
      for (int j = 0; j < kFragmentsN; ++j) Units::mma(d[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
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
template <typename Units, int kTileM, int kTileN, bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(kGemmThreads, Units::kAsync&& kTileN == 128 ? 2 : 1)
    grouped_mma_kernel(const GroupedGemm p) {
  extern __shared__ uint4 shared[];
  constexpr int kStages = gemm_stages<Units>(), kStageChunks = (kTileM + kTileN) * kChunks, kFragmentsM = kTileM / 32;
  constexpr int kWarpN = kTileN / 4, kFragmentsN = kWarpN / 8;
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * gemm_tile_columns<kSwiglu, kTileN>();
  const auto* x = static_cast<const bf16*>(p.x);
  const auto* w = static_cast<const bf16*>(run.w);

  TileLoader<Units, kTileM> a;
#pragma unroll
  for (int i = 0; i < a.kMine; ++i) {
    const int row = tile.row + a.row(i);
    a.source[i] = nullptr;
    if (row >= run.count) continue;
    const int64_t x_row = p.x_row(run.first + row);
    a.source[i] = x + x_row * p.x_stride;
    if constexpr (!Units::kAsync) a.scale[i] = power_of_two(p.x_exponents[run.first + row]);
  }
  TileLoader<Units, kTileN> b;
#pragma unroll
  for (int i = 0; i < b.kMine; ++i) {
    const int64_t row = weight_row<kSwiglu, kWarpN>(p, n0, b.row(i));
    b.source[i] = row < 0 ? nullptr : w + row * p.k;
    if constexpr (!Units::kAsync) b.scale[i] = row < 0 ? 0.0f : power_of_two(run.w_exponents[row]);
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int m0 = warp / 4 * (kTileM / 2), warp_n = warp % 4;
  const bool has_rows = tile.row + m0 < run.count;  // else this warp has nothing to multiply
  float d[kFragmentsM][kFragmentsN][4] = {};
  const auto a_tile = [&](int stage) { return shared + stage * kStageChunks; };
  const auto b_tile = [&](int stage) { return shared + stage * kStageChunks + kTileM * kChunks; };
  const int steps = static_cast<int>((p.k + kTileK - 1) / kTileK);
  if constexpr (Units::kAsync) {
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
      if (has_rows) multiply_stage<Units>(d, a_tile(step % kStages), b_tile(step % kStages), m0, warp_n * kWarpN);
    }
  } else {
    const auto fetch = [&](int step) {
      const int64_t k_begin = int64_t{p.step_at(step, steps)} * kTileK;
      a.fetch(k_begin, p.k);
      b.fetch(k_begin, p.k);
    };
    fetch(0);
    for (int step = 0; step < steps; ++step) {
      a.put(a_tile(step % 2));
      b.put(b_tile(step % 2));
      __syncthreads();  // the stage is complete; the other one was read before the last barrier
      if (step + 1 < steps) fetch(step + 1);
      if (has_rows) multiply_stage<Units>(d, a_tile(step % 2), b_tile(step % 2), m0, warp_n * kWarpN);
    }
  }

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row + m0 + i * 16 + half * 8 + lane / 4;
      if (row >= run.count) continue;
      TOut* out = static_cast<TOut*>(p.out) + p.out_row(run.first + row) * p.out_stride;
      const int x_exponent = Units::kAsync ? 0 : p.x_exponents[run.first + row];
#pragma unroll
      for (int j = 0; j < (kSwiglu ? kFragmentsN / 2 : kFragmentsN); ++j) {
        const int64_t column = n0 + warp_n * (kSwiglu ? kWarpN / 2 : kWarpN) + j * 8 + lane % 4 * 2;
        const auto sum = [&](int fragment, int e, int64_t w_row) {
          const float value = d[i][fragment][half * 2 + e];
          return p.finished(Units::kAsync ? value : scalbnf(value, -(x_exponent + run.w_exponents[w_row])));
        };
        const auto output = [&](int e) {
          if constexpr (kSwiglu)
            return swiglu_of<bf16>(sum(j, e, column + e), sum(j + kFragmentsN / 2, e, p.n + column + e), p.rounding);
          else
            return sum(j, e, column + e);
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
      has_x && p.x_exponents != nullptr ? power_of_two(p.x_exponents[run.first + tile.row + load_row]) : 1;
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
      return scalbnf(d[i][j], -(p.x_exponents[run.first + row] + run.w_exponents[of_row]));
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
