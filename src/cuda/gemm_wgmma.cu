// Grouped products on Hopper's warpgroup matrix units. The weights' rows are the instruction's 64 rows and the gathered
// rows of x its columns, so that a run pays for 64, 128, 160 or 192 rows and the tile of weights is always full.
#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.h"
#include "cuda/wgmma.cuh"

namespace offload::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kWeightRows = 256;  // of a block: 64 for each of two sums of two warpgroups
constexpr int kHalfRows = kWeightRows / 2;
constexpr int kStages = 4;
constexpr int kStageChunks = (kWeightRows + kWgmmaRows) * kChunks;

// Columns of the output that a block makes.
template <bool kSwiglu>
constexpr int block_columns() {
  return kSwiglu ? kHalfRows : kWeightRows;
}

// One thread's part of filling a stage: chunk t % 8 of rows t / 8 + 32 i, of the weights and of x.
template <bool kSwiglu, int kRows>
struct StageLoader {
  static constexpr int kStep = kGemmThreads / kChunks;  // rows between two of a thread's
  const bf16* w;                                        // row t / 8 of the block's first
  const bf16* x;
  int64_t k, up_offset;         // elements from a gate row to its up row, for a plain product to the row kHalfRows on
  int w_rows[2];                // rows that exist from t / 8 on, in either half
  uint32_t x_rows[kRows / 32];  // of x; kNone: zeros
  int64_t x_stride;

  static constexpr uint32_t kNone = 0xffffffffu;

  __device__ StageLoader(const GroupedGemm& p, const GemmRun& run, int first_row, int rows, int64_t n0)
      : x(static_cast<const bf16*>(p.x)), k(p.k), up_offset((kSwiglu ? p.n : kHalfRows) * p.k), x_stride(p.x_stride) {
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    w = static_cast<const bf16*>(run.w) + (n0 + row) * p.k + chunk() * kChunk;
    w_rows[0] = static_cast<int>(min(p.n - n0, int64_t{kHalfRows})) - row;
    w_rows[1] = kSwiglu ? w_rows[0] : static_cast<int>(min(p.n - n0 - kHalfRows, int64_t{kHalfRows})) - row;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const int at = row + i * kStep;
      x_rows[i] = at < rows ? static_cast<uint32_t>(p.x_row(run.first + first_row + at)) : kNone;
    }
  }

  __device__ static int chunk() {
    return static_cast<int>(threadIdx.x) % kChunks;
  }

  __device__ void copy(uint4* stage, int64_t k_begin) const {
    const bool in_k = k_begin + chunk() * kChunk < k;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    uint4* to = stage + tile_offset(row, chunk());  // kStep rows on, the shuffle is the same
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kHalfRows / kStep; ++i) {
        const bool there = in_k && i * kStep < w_rows[half];
        const bf16* from = w + half * up_offset + i * kStep * k + k_begin;
        copy_async_16(to + (half * kHalfRows + i * kStep) * kChunks, there ? from : x, there);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const bool there = in_k && x_rows[i] != kNone;
      const bf16* from = x + x_rows[i] * x_stride + k_begin + chunk() * kChunk;
      copy_async_16(to + (kWeightRows + i * kStep) * kChunks, there ? from : x, there);
    }
  }
};

// The block's outputs, [rows of x][columns] in shared memory, go out row by row.
template <int kColumns, typename TOut>
__device__ void store_rows(const GroupedGemm& p, const TOut* tile, int pitch, int first, int rows, int64_t n0) {
  constexpr int kEach = 16 / sizeof(TOut), kThreadsPerRow = kColumns / kEach;
  const int column = static_cast<int>(threadIdx.x) % kThreadsPerRow * kEach;
  for (int row = static_cast<int>(threadIdx.x) / kThreadsPerRow; row < rows; row += kGemmThreads / kThreadsPerRow) {
    TOut* out = static_cast<TOut*>(p.out) + p.out_row(first + row) * p.out_stride + n0 + column;
    const TOut* from = tile + row * pitch + column;
    if (p.chunks_aligned && n0 + column + kEach <= p.n) {
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < kEach && n0 + column + i < p.n; ++i) out[i] = from[i];
    }
  }
}

// A block's product for up to kN rows of x.
template <bool kSwiglu, typename TOut, int kN>
__device__ void multiply(const GroupedGemm& p, const GemmRun& run, int first_row, int rows, int64_t n0, uint4* shared) {
  const StageLoader<kSwiglu, kN> loader(p, run, first_row, rows, n0);
  const int steps = static_cast<int>((p.k + kTileK - 1) / kTileK);
  const auto stage_of = [&](int step) { return shared + step % kStages * kStageChunks; };
  const auto copy = [&](int step) {
    if (step < steps) loader.copy(stage_of(step), int64_t{step} * kTileK);
    commit_async();
  };

  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  float d[2][kN / 2] = {};
  const auto hold_all = [&] {
    hold(d[0]);
    hold(d[1]);
  };
  for (int step = 0; step < kStages - 2; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_async<kStages - 3>();
    fence_for_wgmma();
    __syncthreads();  // the stage is complete, and both warpgroups are done with the step before the last
    const uint4* stage = stage_of(step);
    const uint64_t a[2] = {tile_descriptor(stage + group * 64 * kChunks),
                           tile_descriptor(stage + (kHalfRows + group * 64) * kChunks)};
    const uint64_t b = tile_descriptor(stage + kWeightRows * kChunks);
    hold_all();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      wgmma(d[0], a[0] + i * kDescriptorStep, b + i * kDescriptorStep);
      wgmma(d[1], a[1] + i * kDescriptorStep, b + i * kDescriptorStep);
    }
    wgmma_commit();
    copy(step + kStages - 2);
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  hold_all();
  __syncthreads();  // the stages become the tile of outputs

  constexpr int kColumns = block_columns<kSwiglu>(), kPitch = kColumns + 16 / sizeof(TOut);
  auto* tile = reinterpret_cast<TOut*>(shared);
  const int t = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int column = group * 64 + t / kWarp * 16 + t % kWarp / 4, row = t % 4 * 2;
  // ptxas makes all the products wait for each other where a conversion reads their sums (C7514), so a multiplication
  // does.
  float one;
  asm volatile("mov.f32 %0, 0f3F800000;" : "=f"(one));
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    TOut* to = tile + (row + i / 4 * 8 + i % 2) * kPitch + column + i / 2 % 2 * 8;
    if constexpr (kSwiglu) {
      store_float(to, swiglu_of<bf16>(d[0][i], d[1][i], p.rounding));
    } else {
      store_float(to, d[0][i] * one);
      store_float(to + kHalfRows, d[1][i] * one);
    }
  }
  __syncthreads();
  store_rows<kColumns>(p, tile, kPitch, run.first + first_row, rows, n0);
}

// Grid (columns / block_columns, tiles of kWgmmaRows rows), kGemmThreads threads, one block to a multiprocessor. Bytes:
// as grouped_mma_kernel; per product 0.6 of what 128 x 128 reads from the caches.
template <bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(kGemmThreads, 1) grouped_wgmma_kernel(const GroupedGemm p) {
  extern __shared__ __align__(1024) uint4 stages[];
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * block_columns<kSwiglu>();
  const int rows = min(run.count - tile.row, kWgmmaRows);
  if (rows <= 64)
    multiply<kSwiglu, TOut, 64>(p, run, tile.row, rows, n0, stages);
  else if (rows <= 128)
    multiply<kSwiglu, TOut, 128>(p, run, tile.row, rows, n0, stages);
  else if (rows <= 160)
    multiply<kSwiglu, TOut, 160>(p, run, tile.row, rows, n0, stages);
  else
    multiply<kSwiglu, TOut, kWgmmaRows>(p, run, tile.row, rows, n0, stages);
}

}  // namespace

void launch_grouped_wgmma(GroupedGemm p, const GemmTypes& types, int64_t tiles, cudaStream_t stream) {
  constexpr int64_t kShared = int64_t{kStages} * kStageChunks * kChunk * 2;
  p.chunks_aligned = p.out_stride * dtype_bytes(types.out) % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  const auto go = [&](auto swiglu, auto out) {
    constexpr bool kSwiglu = decltype(swiglu)::value;
    using TOut = decltype(out);
    const dim3 grid(blocks_for(p.n, block_columns<kSwiglu>()), static_cast<unsigned>(tiles));
    launch(grouped_wgmma_kernel<kSwiglu, TOut>, grid, kGemmThreads, kShared, stream, p);
  };
  if (types.swiglu) return go(std::true_type{}, bf16{});
  with_float_type(types.out, [&](auto out) { go(std::false_type{}, out); });
}

}  // namespace offload::cuda
