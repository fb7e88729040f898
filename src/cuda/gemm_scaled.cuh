// Matrix products of gathered rows (gemm.cuh) on FP16 matrix units, for cards without BF16 ones: weights become FP16 on
// their way to the units, by a power of two per row; x has been made FP16 before (launch_scale_rows), as each block of
// columns reads it.
//
// Rows of w are the rows of the instruction, and a warp owns its own: they go from memory to its registers in the
// fragments' layout and nowhere else. Rows of x are the columns, read from shared memory by all warps, and only those
// there are get multiplied. The order of k within 32 is that of a lane's 16 bytes, the same for both.
//
// The power of two of a row of w is not known before the row's end. A lane takes the one that suits what its row had so
// far; where a larger number comes, those of the warp's rows go down to what suits them, and the sums so far, which the
// same four lanes hold, follow. The largest magnitude then lies in [2^14, 2^16). No bits are lost that the final power
// would have kept: what came before became FP16 with no fewer, and its sums are multiplied by powers of two (0 below
// 2^-126, as the final power would have made them).
#ifndef OFFLOAD_CUDA_GEMM_SCALED_CUH_
#define OFFLOAD_CUDA_GEMM_SCALED_CUH_

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/gemm.cuh"
#include "cuda/half.cuh"

namespace offload::cuda {

// Up to kTileM rows of x by 4 warps of kFragments x 16 rows of w, in steps of depth 32; kBlocks blocks at once on a
// multiprocessor, whose registers that takes up.
template <int kFragments_, int kTileM_, int kBlocks_>
struct ScaledTile {
  static constexpr int kFragments = kFragments_, kTileM = kTileM_, kBlocks = kBlocks_;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp, kWarpN = kFragments * 16, kTileN = kWarps * kWarpN;
  static constexpr int kRowsW = 2 * kFragments;  // of a lane, which holds a quarter of each
  static constexpr int kStageChunks = kTileM * 4, kMineX = kStageChunks / kThreads;
  static_assert(kStageChunks % kThreads == 0);
  // 16 rows of x each; a step takes them in parts, of two turns and the last two alone, and skips parts without rows.
  static constexpr int kTurns = kTileM / 16, kParts = kTurns / 2 + 1;
  static constexpr int part_begin(int part) { return part < kTurns / 2 ? 2 * part : kTurns / 2 - 1 + part; }
  // Behind these parts of a step the next step's x is stored and its w converted.
  static constexpr int kPutPart = kParts / 3 - 1, kConvertPart = std::max(0, kParts - 4);
  // The sums of 16 rows of x and a warp's rows of w, for the way out: rows spread over the banks.
  static constexpr int kSumStride = kWarpN + 4, kSumBytes = kWarps * 16 * kSumStride * 4;
  // Two stages of x, or sums; the exponents of w; the exponents and places of the rows of x.
  static constexpr int kTileBytes = std::max(2 * kStageChunks * 16, kSumBytes);
  static constexpr int kShared = kTileBytes + kTileN * 4 + 2 * kTileM * 4;
};

// function(std::integral_constant) for 0 .. kCount - 1.
template <int kCount, typename Function>
__device__ __forceinline__ void unrolled(const Function& function) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (function(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

__device__ inline bool is_plain(Math math) {
  return math == Math::fp16 || math == Math::fp16_out;
}

// 16 bytes that no one writes meanwhile, or zeros; and those behind them into the L2 cache, for the next steps.
__device__ inline uint4 load_chunk(const uint4* p, bool there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
#if __CUDA_ARCH__ >= 800
      "@there ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
#else
      "@there ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
#endif
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(there)));
  return v;
}

// A lane's share of its warp's rows of w: chunk lane % 4 of a step of rows lane / 4 + 8 i, and their exponents so far.
template <typename T>
struct ScaledWeights {
  const uint4* from;
  uint32_t at[T::kRowsW];  // chunks from `from`
  int e[T::kRowsW];
  uint4 next[T::kRowsW];  // BF16 as fetched, then FP16
  __half2 finite;         // 0, or NaN where a number became infinite

  __device__ void fetch(int chunk, int chunks) {
#pragma unroll
    for (int i = 0; i < T::kRowsW; ++i) next[i] = load_chunk(from + (at[i] + chunk), chunk < chunks);
    finite = __float2half2_rn(0.0f);
  }
  __device__ void convert(int i) {
    next[i] = half_pairs(next[i], power_of_two(e[i]));
    for (const uint32_t pair : {next[i].x, next[i].y, next[i].z, next[i].w})
      finite = __hfma2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(0.0f), finite);
  }
  __device__ bool any_infinite() const {
    return __any_sync(kAllLanes, (*reinterpret_cast<const uint32_t*>(&finite) & 0x7fff7fffu) != 0);
  }
  // Takes the exponent of row i, as fetched, down to what suits it and converts it; returns the factor for its sums.
  __device__ float fit(int i) {
    uint32_t most = largest_bits(next[i], 0);
    most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
    const int change = min(0, half_exponent(most) - e[i]);
    e[i] += change;
    convert(i);
    return change < -126 ? 0.0f : power_of_two(change);
  }
};

// A thread's share of a step of x: chunk threadIdx % 4 of rows threadIdx / 4 + kThreads / 4 i. In shared memory a row
// is 64 bytes, so that both the warps that store chunks and the lanes that read a row's four are spread over the banks.
template <typename T>
struct ScaledRows {
  const uint4* from;
  uint32_t at[T::kMineX];
  uint4 staged[T::kMineX];

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / 4 + i * (T::kThreads / 4); }
  template <int kFirst, int kLast>
  __device__ void fetch(int chunk, int chunks) {
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) staged[i] = load_chunk(from + (at[i] + chunk), chunk < chunks);
  }
  template <int kFirst, int kLast>
  __device__ void put(uint4* stage) const {
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) stage[threadIdx.x + i * T::kThreads] = staged[i];
  }
};

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ inline void store_four(float* out, const float (&v)[4]) {
  *reinterpret_cast<float4*>(out) = {v[0], v[1], v[2], v[3]};
}
__device__ inline void store_four(bf16* out, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(out) = {round_to_bf16_pair(v[0], v[1]), round_to_bf16_pair(v[2], v[3])};
}

// Of a tile's run as many rows as every tile of the run gets: a tile list counts them by kTileM.
struct ScaledSpan {
  int first, rows;
  __device__ ScaledSpan(const GemmTile& tile, int count, int tile_m) {
    const int tiles = (count + tile_m - 1) / tile_m, each = (count + tiles - 1) / tiles;
    first = tile.row / tile_m * each;
    rows = min(count - first, each);
  }
};

// Where a warp finds in a block's shared memory what is not a stage of x.
template <typename T>
struct ScaledShared {
  float* sums;                      // [16][kSumStride], the warp's own, instead of stages
  int* w_exponents;                 // [kWarpN], the warp's own
  int *row_exponents, *row_places;  // [kTileM], of x and in out
  __device__ ScaledShared(uint4* shared, int warp)
      : sums(reinterpret_cast<float*>(shared) + warp * 16 * T::kSumStride),
        w_exponents(reinterpret_cast<int*>(reinterpret_cast<char*>(shared) + T::kTileBytes) + warp * T::kWarpN),
        row_exponents(w_exponents + T::kTileN - warp * T::kWarpN),
        row_places(row_exponents + T::kTileM) {}
};

template <typename T>
using ScaledSums = float[T::kFragments][2 * T::kTurns][4];  // of 8 rows of x each

// 16 rows of x at a time through shared memory: lanes then hold neighbouring columns, and the code is there once. e: of
// the warp's rows of w.
template <typename T, bool kSwiglu, typename TOut>
__device__ __forceinline__ void store_outputs(const GroupedGemm& p, const ScaledSpan& span, int64_t n0,
                                              const int (&e)[T::kRowsW], const ScaledSums<T>& d,
                                              const ScaledShared<T>& place, TOut* out) {
  constexpr int kOutputs = kSwiglu ? T::kWarpN / 2 : T::kWarpN, kRowThreads = kOutputs / 4;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < T::kRowsW; ++i) place.w_exponents[i * 8 + lane / 4] = e[i];
  }
  const int first = lane % kRowThreads * 4;
  const int64_t column = n0 + warp * kOutputs + first;
  for (int turn = 0; turn * 16 < span.rows; ++turn) {
    unrolled<T::kTurns>([&](auto turn_of) {
      constexpr int kTurn = decltype(turn_of)::value;
      if (kTurn != turn) return;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < T::kFragments; ++i) {
#pragma unroll
          for (int v = 0; v < 4; ++v)
            place.sums[(j * 8 + lane % 4 * 2 + v % 2) * T::kSumStride + i * 16 + v / 2 * 8 + lane / 4] =
                d[i][kTurn * 2 + j][v];
        }
      }
    });
    __syncwarp();
    for (int i = lane / kRowThreads; i < min(16, span.rows - turn * 16); i += kWarp / kRowThreads) {
      const int row = turn * 16 + i;
      const auto finish = [&](int at, float(&to)[4]) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int shift = -(place.row_exponents[row] + place.w_exponents[at + v]);
          // In two parts, as all of it may lie beyond an FP32 number's exponents; -127 of one makes 0, as the sum is.
          const int part = shift >> 1;
          to[v] = p.finished(place.sums[i * T::kSumStride + at + v] * power_of_two(part) * power_of_two(shift - part));
        }
      };
      float values[4];
      finish(first, values);
      if constexpr (kSwiglu) {
        float up[4];
        finish(first + kOutputs, up);
#pragma unroll
        for (int v = 0; v < 4; ++v) values[v] = swiglu_of<bf16>(values[v], up[v], p.rounding);
      }
      TOut* to = out + place.row_places[row] * p.out_stride + column;
      if (p.chunks_aligned && column + 4 <= p.n) {
        store_four(to, values);
      } else {
        for (int v = 0; v < 4; ++v)
          if (column + v < p.n) store_float(to + v, values[v]);
      }
    }
    __syncwarp();
  }
}

// Grid (columns / gemm_tile_columns, tiles), T::kThreads threads, T::kShared bytes of shared memory. Bytes: the weights
// once (a second tile of rows reads them from the L2 cache), x once per block of columns. Multiplying, converting and
// fetching take turns in one warp, and the blocks of a multiprocessor fill each other's gaps. An expert's two products
// for 128 runs of 160 rows, hidden 2560, intermediate 640, with making x FP16 before each, reach 208 TFLOP/s on an H200
// where the instruction alone has 476 (2026-12-01, offload-bench ops --case 'prompt/swiglu_experts/*' --force-sm 75).
// Registers keep it from more: 8 warps are all there are.
template <typename T, bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) grouped_scaled_kernel(const GroupedGemm p) {
  static_assert(!kSwiglu || T::kFragments == 2);  // gate and up of the same columns
  extern __shared__ uint4 shared[];
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  const ScaledSpan span(tile, run.count, T::kTileM);
  const int64_t list0 = run.first + span.first;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * gemm_tile_columns<kSwiglu, T::kTileN>();
  const int chunks = static_cast<int>(p.k / 8), steps = max(1, (chunks + 3) / 4), turns = (span.rows + 15) / 16;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const ScaledShared<T> place(shared, warp);
  const bool plain = is_plain(p.math);

  ScaledWeights<T> w{.from = static_cast<const uint4*>(run.w)};
#pragma unroll
  for (int i = 0; i < T::kRowsW; ++i) {
    const int64_t row = weight_row<kSwiglu, T::kWarpN>(p, n0, warp * T::kWarpN + i * 8 + lane / 4);
    w.at[i] = static_cast<uint32_t>((row < 0 ? 0 : row) * chunks);
    w.e[i] = plain ? 0 : 127;
  }
  ScaledRows<T> x{.from = static_cast<const uint4*>(p.x)};
#pragma unroll
  for (int i = 0; i < T::kMineX; ++i)  // behind the last row: that again
    x.at[i] = static_cast<uint32_t>(p.x_row(list0 + min(x.row(i), span.rows - 1)) * (p.x_stride / 8));
  for (int i = static_cast<int>(threadIdx.x); i < span.rows; i += T::kThreads) {
    place.row_exponents[i] = p.x_exponents[p.x_row(list0 + i)];
    place.row_places[i] = static_cast<int>(p.out_row(list0 + i));
  }
  const auto chunk_at = [&](int step) {  // behind the last step: that again
    return p.step_at(min(step, steps - 1), steps) * 4 + lane % 4;
  };

  ScaledSums<T> d = {};
  uint4 a[T::kRowsW];
  const auto take_weights = [&](int chunk) {
    if (w.any_infinite() && !plain) [[unlikely]] {
      w.fetch(chunk, chunks);
#pragma unroll
      for (int i = 0; i < T::kRowsW; ++i) {
        const float factor = w.fit(i);
#pragma unroll
        for (int j = 0; j < 2 * T::kTurns; ++j) {
#pragma unroll
          for (int v = 0; v < 2; ++v) d[i / 2][j][i % 2 * 2 + v] *= factor;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < T::kRowsW; ++i) a[i] = w.next[i];
  };
  constexpr int kHalfX = (T::kMineX + 1) / 2;
  w.fetch(chunk_at(0), chunks);
  x.template fetch<0, T::kMineX>(chunk_at(0), chunks);
  x.template put<0, T::kMineX>(shared);
  unrolled<T::kRowsW>([&](auto i) { w.convert(i); });
  take_weights(chunk_at(0));
  w.fetch(chunk_at(1), chunks);
  x.template fetch<0, kHalfX>(chunk_at(1), chunks);
  for (int step = 0; step < steps; ++step) {
    const uint4* from = shared + step % 2 * T::kStageChunks + lane;
    uint4* to = shared + (1 - step % 2) * T::kStageChunks;
    const int next = chunk_at(step + 1);
    __syncthreads();  // this step's x is there, and the last one's has been read
    uint4 b[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) b[0][j] = from[j * kWarp];
    unrolled<T::kParts>([&](auto part_of) {
      constexpr int kPart = decltype(part_of)::value, kBegin = T::part_begin(kPart), kEnd = T::part_begin(kPart + 1);
      if (kBegin < turns) {
        unrolled<kEnd - kBegin>([&](auto turn_of) {
          constexpr int kTurn = kBegin + decltype(turn_of)::value;
          if constexpr (kTurn + 1 < T::kTurns) {
#pragma unroll
            for (int j = 0; j < 2; ++j) b[(kTurn + 1) % 2][j] = from[((kTurn + 1) * 2 + j) * kWarp];
          }
#pragma unroll
          for (int depth = 0; depth < 4; ++depth) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
              for (int i = 0; i < T::kFragments; ++i)
                mma_f16_1688(d[i][kTurn * 2 + j], {word_of(a[2 * i], depth), word_of(a[2 * i + 1], depth)},
                             word_of(b[kTurn % 2][j], depth));
            }
          }
        });
      }
      if constexpr (kPart == T::kPutPart) {
        x.template put<0, kHalfX>(to);
        x.template fetch<kHalfX, T::kMineX>(next, chunks);
      }
      if constexpr (kPart >= T::kConvertPart) {
        constexpr int kAt = kPart - T::kConvertPart, kOf = T::kParts - T::kConvertPart;
        constexpr int kFirst = kAt * T::kRowsW / kOf, kLast = (kAt + 1) * T::kRowsW / kOf;
        unrolled<kLast - kFirst>([&](auto i) { w.convert(kFirst + decltype(i)::value); });
      }
    });
    x.template put<kHalfX, T::kMineX>(to);
    take_weights(next);
    w.fetch(chunk_at(step + 2), chunks);
    x.template fetch<0, kHalfX>(chunk_at(step + 2), chunks);
  }

  __syncthreads();  // the stages become sums
  store_outputs<T, kSwiglu>(p, span, n0, w.e, d, place, static_cast<TOut*>(p.out));
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GEMM_SCALED_CUH_
