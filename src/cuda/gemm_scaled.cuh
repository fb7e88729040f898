// Matrix products of gathered rows (gemm.cuh) on FP16 matrix units, for cards without BF16 ones: weights become FP16 in
// the tile, by a power of two per row; x has been made FP16 before (launch_scale_rows), as each block of columns reads
// it.
//
// The power of two of a row of w is not known before the row's end. Each block takes the one that suits what it has
// read so far; where a larger number comes, it goes down, and the row's sums so far follow it. That is exact (a factor
// below 2^-126 makes them 0, as the final power would have), and what came before has become FP16 with no fewer bits
// than that power would have left it.
#ifndef OFFLOAD_CUDA_GEMM_SCALED_CUH_
#define OFFLOAD_CUDA_GEMM_SCALED_CUH_

#include "cuda/gemm.cuh"

namespace offload::cuda {

// kTileM rows of x by kTileN rows of w, in steps of depth 32; 2 warps of rows x 4 of columns.
template <int kM, int kN>
struct ScaledTile {
  static constexpr int kTileM = kM, kTileN = kN, kWarpsM = 2, kWarpsN = 4;
  static constexpr int kWarps = kWarpsM * kWarpsN, kThreads = kWarps * kWarp;
  // Of a multiprocessor, as registers go; Turing's 64 KiB of shared memory hold two of 64 rows, one of 128.
  static constexpr int kBlocks = 2;
  static constexpr int kWarpN = kTileN / kWarpsN;
  static constexpr int kFragmentsM = kTileM / kWarpsM / 16, kFragmentsN = kWarpN / 8;
  static constexpr int kRowChunks = 4;  // of 16 bytes
  static constexpr int kXChunks = kTileM * kRowChunks, kStageChunks = (kTileM + kTileN) * kRowChunks;
  static constexpr int kLoadRows = kTileN / kWarps;  // rows of w that a warp loads
  static constexpr int kParts = kWarpN / kLoadRows;  // warps that load one warp's columns
  static constexpr int kMineW = kLoadRows / 8, kMineX = kXChunks / kThreads;
  // Two stages with the factors and marks that belong to them; the exponents and places of the tile's rows.
  static constexpr int kShared = 2 * (kStageChunks * 16 + kTileN * 4 + kWarps * 4) + 2 * kTileM * 4;
};

// Eight BF16 bits x 2^e as FP16: exact while the product is normal, and subnormals below that.
__device__ inline uint4 scaled_to_f16(uint4 bits, float scale) {
  const auto pair = [scale](uint32_t two) {
    const __half2 h = __floats2half2_rn(__uint_as_float(two << 16) * scale, __uint_as_float(two & 0xffff0000u) * scale);
    return *reinterpret_cast<const uint32_t*>(&h);
  };
  return {pair(bits.x), pair(bits.y), pair(bits.z), pair(bits.w)};
}

__device__ inline bool is_plain(Math math) {
  return math == Math::fp16 || math == Math::fp16_out;
}

// The larger of `most` and the eight BF16 magnitudes, as bits.
__device__ inline uint32_t larger_magnitude(uint32_t most, uint4 bits) {
  for (const uint32_t two : {bits.x, bits.y, bits.z, bits.w})
    most = max(most, max(two & 0x7fffu, (two >> 16) & 0x7fffu));
  return most;
}

// Where chunk `chunk` of a tile's row lies: rows of 64 bytes, shuffled so that the eight rows of one ldmatrix and the
// chunks that one warp stores fall into different banks. 8 rows further on it is 32 chunks further on.
__device__ inline int scaled_offset(int row, int chunk) {
  return row * 4 + (chunk ^ (row >> 1 & 3));
}

// What no one writes meanwhile, and its 128 bytes into the L2 cache: the next step wants the other half of them.
__device__ inline uint4 load_chunk(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// One thread's share of the tile of w: chunk lane % 4 of rows row() + 8 i, and the exponents of those rows so far.
template <typename T>
struct ScaledWeights {
  const uint4* from;
  uint32_t at[T::kMineW];  // chunks from `from`
  int e[T::kMineW];
  uint4 staged[T::kMineW];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int row() { return warp() * T::kLoadRows + lane() / 4; }

  __device__ void fetch(int chunk, int chunks) {
#pragma unroll
    for (int i = 0; i < T::kMineW; ++i) {
      staged[i] = {0, 0, 0, 0};
      if (chunk < chunks) staged[i] = load_chunk(from + (at[i] + chunk));
    }
  }
  // Where what was fetched would reach 2^16: takes the exponents of the warp's rows down to what suits them, and leaves
  // the factors that their sums so far need in factors [2][kTileN] and `step` in marks [2][kWarps].
  __device__ void fit(int step, bool plain, float* factors, int* marks) {
    uint32_t over = 0;
#pragma unroll
    for (int i = 0; i < T::kMineW; ++i) {
      const uint32_t add = static_cast<uint32_t>(max(e[i] + 113, 0)) * 0x00800080u;
      for (const uint32_t two : {staged[i].x, staged[i].y, staged[i].z, staged[i].w}) over |= (two & 0x7fff7fffu) + add;
    }
    if (!__any_sync(kAllLanes, (over & 0x80008000u) != 0) || plain) return;
#pragma unroll
    for (int i = 0; i < T::kMineW; ++i) {
      uint32_t most = larger_magnitude(0, staged[i]);
      most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const int now = min(e[i], half_exponent(most));
      if (lane() % 4 == 0)
        factors[step % 2 * T::kTileN + row() + i * 8] = now - e[i] < -126 ? 0.0f : power_of_two(now - e[i]);
      e[i] = now;
    }
    marks[step % 2 * T::kWarps + warp()] = step;
  }
  // `to`: where the thread's first chunk of the stage belongs.
  __device__ void put(uint4* to) const {
#pragma unroll
    for (int i = 0; i < T::kMineW; ++i) to[i * 32] = scaled_to_f16(staged[i], power_of_two(e[i]));
  }
};

// The same of the tile of x: chunk threadIdx % 4 of rows threadIdx / 4 + kThreads / 4 i, the first `rows` of the tile.
template <typename T>
struct ScaledRows {
  const uint4* from;
  uint32_t at[T::kMineX];
  uint4 staged[T::kMineX];
  int rows;

  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / 4 + i * (T::kThreads / 4); }
  __device__ void fetch(int chunk, int chunks) {
#pragma unroll
    for (int i = 0; i < T::kMineX; ++i) {
      staged[i] = {0, 0, 0, 0};
      if (chunk < chunks && row(i) < rows) staged[i] = load_chunk(from + (at[i] + chunk));
    }
  }
  __device__ void put(uint4* to) const {
#pragma unroll
    for (int i = 0; i < T::kMineX; ++i)
      if (row(i) < rows) to[i * T::kThreads] = staged[i];
  }
};

// Reading fragments, multiplying and bringing the next step in take turns: hence one long function.
//
// Grid (columns / gemm_tile_columns, tiles), T::kThreads threads, T::kShared bytes of shared memory. Bytes: the weights
// once (a second tile of rows reads them from the L2 cache), x once per block of columns. Both pass through registers,
// as Turing has no asynchronous copies. Full tiles of 128 x 128 reach 213 TFLOP/s with kSwiglu and 181 without on an
// H200 (2026-11-30, 128 runs of 640 rows, hidden 2560, intermediate 640), where the instruction alone has 483, fed from
// shared memory 433.
template <typename T, bool kSwiglu, typename TOut>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) grouped_scaled_kernel(const GroupedGemm p) {
  extern __shared__ uint4 shared[];
  if (!p.has_tile(blockIdx.y)) return;
  const GemmTile tile = p.tiles[blockIdx.y];
  const GemmRun run = p.runs[tile.run];
  const int rows = min(run.count - tile.row, T::kTileM);
  const int64_t list0 = run.first + tile.row;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * gemm_tile_columns<kSwiglu, T::kTileN>();
  const int chunks = static_cast<int>(p.k / 8), steps = max(1, (chunks + T::kRowChunks - 1) / T::kRowChunks);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  auto* factors = reinterpret_cast<float*>(shared + 2 * T::kStageChunks);  // [2][kTileN]
  auto* marks = reinterpret_cast<int*>(factors + 2 * T::kTileN);           // [2][kWarps]: a step that has factors
  int* row_exponents = marks + 2 * T::kWarps;                              // [kTileM], of x
  int* row_places = row_exponents + T::kTileM;                             // [kTileM], in out
  const bool plain = is_plain(p.math);

  ScaledWeights<T> w{.from = static_cast<const uint4*>(run.w)};
#pragma unroll
  for (int i = 0; i < T::kMineW; ++i) {
    const int64_t row = weight_row<kSwiglu, T::kWarpN>(p, n0, w.row() + i * 8);
    w.at[i] = static_cast<uint32_t>((row < 0 ? 0 : row) * chunks);
    w.e[i] = plain ? 0 : 127;
  }
  ScaledRows<T> x{.from = static_cast<const uint4*>(p.x), .rows = rows};
#pragma unroll
  for (int i = 0; i < T::kMineX; ++i)
    x.at[i] = x.row(i) < rows ? static_cast<uint32_t>(p.x_row(list0 + x.row(i)) * (p.x_stride / 8)) : 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows; i += T::kThreads) {
    row_exponents[i] = p.x_exponents[p.x_row(list0 + i)];
    row_places[i] = static_cast<int>(p.out_row(list0 + i));
  }
  const auto chunk_at = [&](int step) {  // behind the last step: that again
    return p.step_at(min(step, steps - 1), steps) * T::kRowChunks + lane % 4;
  };
  uint4* w_to = shared + T::kXChunks + scaled_offset(w.row(), lane % 4);
  uint4* x_to = shared + scaled_offset(x.row(0), lane % 4);

  // The tile's 16 rows at a time are dealt evenly to the rows of warps.
  const int warp_n = warp % T::kWarpsN;
  const int fragments_all = (rows + 15) / 16, each = (fragments_all + T::kWarpsM - 1) / T::kWarpsM;
  const int first_fragment = warp / T::kWarpsN * each;
  const int fragments = max(0, min(each, fragments_all - first_fragment));
  const auto tile_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t x_address = tile_address + scaled_offset(first_fragment * 16 + lane % 16, lane / 16) * 16;
  const uint32_t w_address =
      tile_address + T::kXChunks * 16 + scaled_offset(warp_n * T::kWarpN + lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16;

  float d[T::kFragmentsM][T::kFragmentsN][4] = {};
  uint32_t a[2][4], b[T::kFragmentsN / 2][4];
  // A step has two halves of depth 16, each with kFragmentsM groups of instructions; `half` is 0 or 1.
  const auto load_a = [&](int stage, int half, int i, uint32_t(&to)[4]) {
    ldmatrix_x4_at(to, ((x_address + stage * (T::kStageChunks * 16)) ^ half * 32) + i * 1024);
  };
  const auto load_b = [&](int stage, int half, int j) {
    ldmatrix_x4_at(b[j], ((w_address + stage * (T::kStageChunks * 16)) ^ half * 32) + j * 1024);
  };
  const auto is_marked = [&](int step, int part) {
    return marks[step % 2 * T::kWarps + warp_n * T::kParts + part] == step;
  };
  const auto any_marked = [&](int step) {
    bool any = false;
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) any |= is_marked(step, part);
    return any;
  };

  if (lane < 2) marks[lane * T::kWarps + warp] = -1;
  __syncwarp();
  x.fetch(chunk_at(0), chunks);
  w.fetch(chunk_at(0), chunks);
  w.fit(0, plain, factors, marks);
  x.put(x_to);
  w.put(w_to);
  w.fetch(chunk_at(1), chunks);
  __syncthreads();
  bool rescales = false;  // there are no sums yet
  load_a(0, 0, 0, a[0]);
#pragma unroll
  for (int j = 0; j < T::kFragmentsN / 2; ++j) load_b(0, 0, j);
  for (int step = 0; step < steps; ++step) {
    const int stage = step % 2;
    if (rescales) {
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
        if (!is_marked(step, part)) continue;
        constexpr int kOfPart = T::kFragmentsN / T::kParts;
#pragma unroll
        for (int j = part * kOfPart; j < (part + 1) * kOfPart; ++j) {
          const float* f = factors + stage * T::kTileN + warp_n * T::kWarpN + j * 8 + lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < T::kFragmentsM; ++i) {
#pragma unroll
            for (int v = 0; v < 4; ++v) d[i][j][v] *= f[v % 2];
          }
        }
      }
    }
#pragma unroll
    for (int group = 0; group < 2 * T::kFragmentsM; ++group) {
      const int half = group / T::kFragmentsM, i = group % T::kFragmentsM;
      const bool is_last = group + 1 == 2 * T::kFragmentsM, ends_half = i + 1 == T::kFragmentsM;
      const int next_stage = is_last ? 1 - stage : stage, next_half = (half + ends_half) % 2;
      if (is_last) {
        __syncthreads();  // the next stage is complete, and this one has been read
        rescales = any_marked(step + 1);
      }
      load_a(next_stage, next_half, (i + 1) % T::kFragmentsM, a[(group + 1) % 2]);
      const uint32_t(&of_x)[4] = a[group % 2];
      const auto multiply = [&](int first, int count) {
        if (i >= fragments) return;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (int j = first; j < first + count; ++j)
            mma_f16_1688(d[i][j], {of_x[t * 2], of_x[t * 2 + 1]}, b[j / 2][j % 2 * 2 + t]);
        }
      };
      if (ends_half) {
#pragma unroll
        for (int j = 0; j < T::kFragmentsN / 2; ++j) {
          multiply(j * 2, 2);
          load_b(next_stage, next_half, j);
        }
      } else {
        multiply(0, T::kFragmentsN);
      }
      // Between the groups, what the next step needs: weights were fetched a step ago, x two groups before it is
      // stored.
      constexpr int kFit = T::kFragmentsM - 2, kPutX = 2 * T::kFragmentsM - 3;
      if (group == kFit) w.fit(step + 1, plain, factors, marks);
      if (group == kFit + 1) w.put(w_to + (1 - stage) * T::kStageChunks);
      if (group == max(kPutX - 2, 0)) x.fetch(chunk_at(step + 1), chunks);
      if (group == kPutX) {
        x.put(x_to + (1 - stage) * T::kStageChunks);
        w.fetch(chunk_at(step + 2), chunks);
      }
    }
  }

  __syncthreads();
  int* w_exponents = reinterpret_cast<int*>(shared);
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < T::kMineW; ++i) w_exponents[w.row() + i * 8] = w.e[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kFragmentsM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (first_fragment + i) * 16 + half * 8 + lane / 4;
      if (i >= fragments || row >= rows) continue;
      TOut* out = static_cast<TOut*>(p.out) + row_places[row] * p.out_stride;
      const int x_exponent = row_exponents[row];
#pragma unroll
      for (int j = 0; j < (kSwiglu ? T::kFragmentsN / 2 : T::kFragmentsN); ++j) {
        const int64_t column = n0 + warp_n * (kSwiglu ? T::kWarpN / 2 : T::kWarpN) + j * 8 + lane % 4 * 2;
        const auto sum = [&](int fragment, int v) {
          const int shift = -(x_exponent + w_exponents[warp_n * T::kWarpN + fragment * 8 + lane % 4 * 2 + v]);
          // In two parts, as all of it may lie beyond an FP32 number's exponents; -127 of one makes 0, as the sum is.
          const int part = shift >> 1;
          return p.finished(d[i][fragment][half * 2 + v] * power_of_two(part) * power_of_two(shift - part));
        };
        const auto output = [&](int v) {
          if constexpr (kSwiglu)
            return swiglu_of<bf16>(sum(j, v), sum(j + T::kFragmentsN / 2, v), p.rounding);
          else
            return sum(j, v);
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

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GEMM_SCALED_CUH_
