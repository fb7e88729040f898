// The canonical product of core/canonical.h on a GPU: the same bits as on the CPU at every ISA level.
//
// Eight lanes own one row of w: lane j reads elements 8j .. 8j + 7 of each block of 64, 16 bytes of BF16, and keeps the
// accumulators 4j .. 4j + 3. A warp reads four rows at once, 128 contiguous bytes of each. Bound by reading w, so what
// counts is bytes under way. One row of x, which is what decode has, goes through shared memory (RowSums): out of the
// caches it would hold every block of w up, as each multiprocessor has to fetch it first. Where there are few rows of w
// a whole warp reads one (narrow_sum()), so that every multiprocessor has some.
#ifndef OFFLOAD_CUDA_CANONICAL_CUH_
#define OFFLOAD_CUDA_CANONICAL_CUH_

#include <algorithm>

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

// The sum of the 32 accumulators of eight lanes, on all of them.
__device__ inline float fold_lanes(float (&a)[4]) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] += __shfl_xor_sync(kAllLanes, a[i], lanes);
  }
  return (a[0] + a[2]) + (a[1] + a[3]);
}

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
    for (int s = 0; s < kStreams; ++s) sums[m][s] = fold_lanes(acc[m][s]);
  }
}

// --- one row of x ---

// Copies x [k] into shared memory and waits for it. REQUIRES: as for Eight's kVector; all threads of the block call.
template <typename T>
__device__ inline void stage_row(const T* x, int k, T* staged) {
  const auto* from = reinterpret_cast<const uint4*>(x);
  auto* to = reinterpret_cast<uint4*>(staged);
  const int pieces = k * static_cast<int>(sizeof(T)) / 16;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) to[i] = from[i];
  __syncthreads();
}

// Which rows of kStreams matrices [rows, k] a group of eight lanes sums one after another: `first`, then every step-th.
// Those behind the last are the last again.
template <int kStreams, typename TW>
struct RowTurns {
  const TW* w[kStreams];
  int rows, first, step, turns;
};

// The canonical sums of rows of w [k] and one row of x, by the eight lanes of a group. Two batches of kDepth blocks
// take turns, across the ends of rows too: one is under way while the other is added. REQUIRES: as for Eight's kVector.
template <int kStreams, int kDepth, typename TX, typename TW>
class RowSums {
 public:
  // Starts reading w.
  __device__ RowSums(const RowTurns<kStreams, TW>& rows, int k)
      : rows_(rows), k_(k), lane_(static_cast<int>(threadIdx.x) % kRowLanes) {
    point_at(0);
    load(first_);
    load(second_);
  }

  // Calls function(row, sums) for every turn, on all eight lanes; row may lie behind the last. x lies in shared memory.
  template <typename Function>
  __device__ void finish(const TX* x, const Function& function) {
    int begin = 0, turn = 0;
    const auto go_on = [&](Batch& batch) {
      add(batch, x, begin);
      load(batch);
      if ((begin += kStep) < k_) return true;
      begin = 0;
      float sums[kStreams];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        sums[s] = fold_lanes(acc_[s]);
#pragma unroll
        for (float& acc : acc_[s]) acc = 0;
      }
      function(rows_.first + turn * rows_.step, sums);
      return ++turn < rows_.turns;
    };
    while (go_on(first_) && go_on(second_)) {
    }
  }

 private:
  static constexpr int kBlock = static_cast<int>(kCanonicalBlock), kStep = kDepth * kBlock;
  using Batch = Eight<true, TW>[kDepth][kStreams];

  __device__ void point_at(int turn) {
    const int row = min(rows_.first + turn * rows_.step, rows_.rows - 1);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) from_[s] = rows_.w[s] + int64_t{row} * k_ + 8 * lane_;
  }
  // The next batch of all.
  __device__ void load(Batch& batch) {
    if (load_turn_ >= rows_.turns) return;
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      if (load_begin_ + u * kBlock >= k_) break;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) batch[u][s].load(from_[s], load_begin_ + u * kBlock, k_ - 8 * lane_);
    }
    if ((load_begin_ += kStep) < k_) return;
    load_begin_ = 0;
    point_at(++load_turn_);
  }
  __device__ void add(const Batch& batch, const TX* x, int begin) {
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      if (begin + u * kBlock >= k_) break;
      Eight<true, TX> xs;
      xs.load(x, begin + u * kBlock + 8 * lane_, k_);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc_[s][i % 4] = fmaf(xs[i], batch[u][s][i], acc_[s][i % 4]);
      }
    }
  }

  RowTurns<kStreams, TW> rows_;
  int k_, lane_, load_begin_ = 0, load_turn_ = 0;
  const TW* from_[kStreams];
  Batch first_, second_;
  float acc_[kStreams][4] = {};
};

// Bytes of shared memory for a row of x behind which a warp's own memory may start.
template <typename T>
constexpr int64_t staged_row_bytes(int64_t k) {
  return (k + kCanonicalBlock - 1) / kCanonicalBlock * kCanonicalBlock * static_cast<int64_t>(sizeof(T));
}
// What a row of x may take: beside it a block of Turing has room for two warps of narrow_sum().
inline constexpr int64_t kStagedBytesMost = 40 << 10;

// Elements of w that a warp of narrow_sum() has under way, and its shared memory, with kLoads loads of 16 bytes a lane.
template <int kLoads>
inline constexpr int kNarrowRound = kLoads* kWarp * 8;
template <int kLoads>
inline constexpr int64_t kNarrowWarpBytes = int64_t{kNarrowRound<kLoads>} * 2;

// In shared memory rows are kept as words of two elements that go to one accumulator: of each eight elements i and i +
// 4 share a word. Accumulator i of block b then finds its two in word 32 b + i.
__device__ inline uint4 in_pairs(const uint4& eight) {
  constexpr unsigned kLows = 0x5410, kHighs = 0x7632;
  return {__byte_perm(eight.x, eight.z, kLows), __byte_perm(eight.x, eight.z, kHighs),
          __byte_perm(eight.y, eight.w, kLows), __byte_perm(eight.y, eight.w, kHighs)};
}

// acc + the two products of a block's pair of x and of w, in order.
__device__ inline float add_pair(uint32_t x, uint32_t w, float acc) {
  acc = fmaf(__uint_as_float(x << 16), __uint_as_float(w << 16), acc);
  return fmaf(__uint_as_float(x & 0xffff0000u), __uint_as_float(w & 0xffff0000u), acc);
}

// The canonical sum of one row of w [k] and x [k] by a whole warp: every lane reads w, and through shared memory lane i
// gets what goes to accumulator i. `prepare` makes x, in pairs and zeros up to the next multiple of 64, ready in shared
// memory; it is called once, when the first round is under way. `own`: kNarrowRound elements of shared memory of this
// warp. REQUIRES: as for Eight's kVector.
template <int kLoads, typename Prepare>
__device__ inline float narrow_sum(const bf16* w, int k, const bf16* x, bf16* own, const Prepare& prepare) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kRound = kNarrowRound<kLoads>;
  uint4 under_way[kLoads];
  const auto fetch = [&](int begin) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int at = begin + (u * kWarp + lane) * 8;
      under_way[u] = at < k ? *reinterpret_cast<const uint4*>(w + at) : uint4{0, 0, 0, 0};
    }
  };
  fetch(0);
  prepare();
  float acc = 0;
  for (int begin = 0; begin < k; begin += kRound) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) reinterpret_cast<uint4*>(own)[u * kWarp + lane] = in_pairs(under_way[u]);
    __syncwarp();
    fetch(begin + kRound);
    const int count = min(k - begin, kRound);
    const auto* xs = reinterpret_cast<const uint32_t*>(x + begin) + lane;
    const auto* ws = reinterpret_cast<const uint32_t*>(own) + lane;
#pragma unroll 8
    for (int block = 0; block < count; block += static_cast<int>(kCanonicalBlock))
      acc = add_pair(xs[block / 2], ws[block / 2], acc);
    __syncwarp();
  }
  return warp_sum(acc);  // the canonical order of 32 accumulators, too
}

// For narrow_sum(): copies x [k] into shared memory in pairs, zeros behind it, and waits. All threads of the block
// call.
__device__ inline void stage_narrow_row(const bf16* x, int k, bf16* staged) {
  const int padded = (k + static_cast<int>(kCanonicalBlock) - 1) / static_cast<int>(kCanonicalBlock) * 8;
  for (int i = static_cast<int>(threadIdx.x); i < padded; i += static_cast<int>(blockDim.x))
    reinterpret_cast<uint4*>(staged)[i] =
        8 * i < k ? in_pairs(reinterpret_cast<const uint4*>(x)[i]) : uint4{0, 0, 0, 0};
  __syncthreads();
}

// Threads of a block for so many columns of all runs together: whole blocks only where they still reach every
// multiprocessor of a large card.
inline int canonical_threads(int64_t columns) {
  return columns < 8192 ? kCanonicalThreads / 2 : kCanonicalThreads;
}

// Turns for RowSums, so that `warps` on a multiprocessor are all that `count` runs over `rows` rows of w need; but not
// so many that, where there is work for many waves of blocks, the last wave is a long one.
inline int row_turns(int64_t rows, int64_t count, int warps, int multiprocessors) {
  constexpr int64_t kTurnsMost = 4;
  const int64_t all = rows * count * kRowLanes / kWarp, resident = int64_t{warps} * multiprocessors;
  return static_cast<int>(std::clamp<int64_t>((all + resident - 1) / resident, 1, kTurnsMost));
}

// Calls function(vector, rows) for several rows, or what RowSums does not take: whether rows are read in 16-byte
// pieces, and the least of the compiled row counts that holds `rows`. What BF16 models run has them all; the rest, for
// oracles and odd alignments, only what it needs.
template <bool kAllCounts, typename Function>
void with_canonical_shape(bool aligned, int64_t rows, const Function& function) {
  if (!aligned) return function(std::false_type{}, std::integral_constant<int, 8>{});
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
