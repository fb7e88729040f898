// What the attention kernels share: how the work is cut, which positions a row sees, and the softmax of a tile.
//
// A block of threads takes some (row, query head) pairs of one key/value head and one split of their positions. It runs
// over tiles of positions: scores of the tile, softmax() of it, weighted values. The pairs of one unit lie together: a
// unit is one row where rows choose their blocks, else all rows. Positions of a row form a list in ascending order,
// given by an index: the chosen blocks, then the incomplete block. Where rows share a block of threads (dense attention
// alone), a later row's values meet an earlier row's weight of zero: an infinite value there would reach that row.
#ifndef OFFLOAD_CUDA_ATTENTION_CUH_
#define OFFLOAD_CUDA_ATTENTION_CUH_

#include "cuda/pieces.cuh"

namespace offload::cuda {

// What one launch computes. Fused rounding takes one pass. Reference rounding rounds probabilities, so it first needs
// their final maximum and sum (statistics), then weighs the values with them.
enum class AttentionPass : uint8_t { fused, statistics, weigh };

struct AttentionCall {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
  const int32_t *blocks = nullptr, *counts = nullptr;  // null: every position up to the row's own
  int64_t q_row = 0, q_head = 0, k_position = 0, k_head = 0, v_position = 0, v_head = 0, out_row = 0, out_head = 0;
  int64_t blocks_row = 0;  // strides, in elements
  int32_t first = 0, rows = 0, heads = 0, kv_heads = 0, n = 0, ratio = 1;
  int32_t parts = 1;  // that the pairs of a unit are cut into
  int32_t splits = 1, split_positions = 0;
  float scale = 1;
  Rounding rounding = Rounding::fused;
  AttentionPass pass = AttentionPass::fused;
  float* partials = nullptr;    // [rows * heads][splits][n]: weighted values, in fused rounding not yet divided
  float* statistics = nullptr;  // [rows * heads][splits][2]: maximum and sum of exponentials
};

// The share of one block of threads. grid.x = units * parts * kv_heads, late rows first as they see the most;
// grid.y = splits.
template <int kPairs>
struct AttentionShare {
  int kv_head, group, row0, pair0;
  int pairs;       // of the unit
  int begin, end;  // of the position list
  int listed;      // entries that come from blocks
  int tail;        // first position behind the blocks

  __device__ explicit AttentionShare(const AttentionCall& a) {
    const int item = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    kv_head = item % a.kv_heads;
    group = a.heads / a.kv_heads;
    pair0 = item / a.kv_heads % a.parts * kPairs;
    row0 = item / a.kv_heads / a.parts;
    int total;
    if (a.blocks == nullptr) {
      pairs = a.rows * group;
      listed = 0;
      tail = 0;
      total = a.first + min(pair0 + kPairs - 1, pairs - 1) / group + 1;
    } else {
      pairs = group;
      const int visible = a.first + row0 + 1;
      listed = a.counts[row0] * a.ratio;
      tail = visible - visible % a.ratio;
      total = listed + visible % a.ratio;
    }
    begin = static_cast<int>(blockIdx.y) * a.split_positions;
    end = min(begin + a.split_positions, total);
  }
  __device__ bool has(int m) const { return pair0 + m < pairs; }
  __device__ int row(int m) const { return row0 + (pair0 + m) / group; }
  __device__ int head(int m) const { return kv_head * group + (pair0 + m) % group; }
  __device__ int64_t pair_id(const AttentionCall& a, int m) const { return int64_t{row(m)} * a.heads + head(m); }
  // Entries of the list that pair m sees.
  __device__ int visible(const AttentionCall& a, int m) const {
    if (!has(m)) return 0;
    return a.blocks == nullptr ? a.first + row(m) + 1 : listed + a.first + row0 + 1 - tail;
  }
  // The position at `index` of the list, -1 behind its end.
  __device__ int position(const AttentionCall& a, int index) const {
    if (index >= end) return -1;
    if (index >= listed) return tail + index - listed;
    return a.blocks[row0 * a.blocks_row + index / a.ratio] * a.ratio + index % a.ratio;
  }
};

// The softmax of kPairs rows as it stands after some tiles; in shared memory.
template <int kPairs>
struct AttentionState {
  int visible[kPairs];
  float largest[kPairs];
  float sum[kPairs];
  float rescale[kPairs];  // of what was summed before this tile

  // To be called by all threads, before a barrier.
  __device__ void start(const AttentionCall& a, const AttentionShare<kPairs>& share) {
    for (int m = static_cast<int>(threadIdx.x); m < kPairs; m += static_cast<int>(blockDim.x)) {
      visible[m] = share.visible(a, m);
      float most = -INFINITY, total = 0;
      if (a.pass == AttentionPass::weigh && share.has(m)) {
        const float* parts = a.statistics + share.pair_id(a, m) * a.splits * 2;
        for (int s = 0; s < a.splits; ++s) most = fmaxf(most, parts[2 * s]);
        for (int s = 0; s < a.splits; ++s)
          if (parts[2 * s] != -INFINITY) total = fmaf(expf(parts[2 * s] - most), parts[2 * s + 1], total);
      }
      largest[m] = most;
      sum[m] = total;
      rescale[m] = 1;
    }
  }

  // Turns q . k of the list entries [first, end) of a tile, load(m, i) of entry first + i, into weights, store(m, i,
  // weight), zero where pair m does not see the entry. A warp takes every warps-th row, a lane kPerLane entries of it.
  // REQUIRES: end - first <= 32 * kPerLane.
  template <typename T, int kPerLane, typename Load, typename Store>
  __device__ void softmax(const AttentionCall& a, int first, int end, const Load& load, const Store& store) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
    for (int m = static_cast<int>(threadIdx.x) / kWarp; m < kPairs; m += warps) {
      const int shown = min(visible[m], end) - first;
      float x[kPerLane];
      float most = -INFINITY;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int i = kPerLane * lane + j;
        x[j] = i < shown ? rnd<T>(rnd<T>(load(m, i), a.rounding) * a.scale, a.rounding) : -INFINITY;
        most = fmaxf(most, x[j]);
      }
      if (a.pass == AttentionPass::weigh) {
        const float peak = largest[m], total = sum[m];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const int i = kPerLane * lane + j;
          store(m, i, i < shown ? rnd<T>(expf(x[j] - peak) / total, a.rounding) : 0.0f);
        }
        continue;
      }
      const float before = largest[m], now = fmaxf(before, warp_max(most));
      const float peak = now == -INFINITY ? 0.0f : now;  // -inf - -inf would be NaN
      float total = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int i = kPerLane * lane + j;
        const float weight = i < shown ? expf(x[j] - peak) : 0.0f;
        total += weight;
        store(m, i, weight);
      }
      total = warp_sum(total);
      __syncwarp();  // every lane has read largest[m]
      if (lane == 0) {
        const float scale = before == now ? 1.0f : expf(before - now);
        rescale[m] = scale;
        sum[m] = fmaf(sum[m], scale, total);
        largest[m] = now;
      }
    }
  }
};

// Writes kCount consecutive results of pair m from dimension d on: to out, or to the split's partial sums.
template <typename T, int kPairs, int kCount>
__device__ inline void store_attention(const AttentionCall& a, const AttentionShare<kPairs>& share,
                                       const AttentionState<kPairs>& state, int m, int d, const float (&x)[kCount]) {
  if (!share.has(m) || a.pass == AttentionPass::statistics) return;
  if (a.splits > 1) {
    float* to = a.partials + (share.pair_id(a, m) * a.splits + blockIdx.y) * a.n + d;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (d + i < a.n) to[i] = x[i];
    return;
  }
  T* to = static_cast<T*>(a.out) + share.row(m) * a.out_row + share.head(m) * a.out_head + d;
  const bool divides = a.pass == AttentionPass::fused && state.visible[m] > 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (d + i < a.n) store_float(to + i, divides ? x[i] / state.sum[m] : x[i]);
}

// Of the split, where they are wanted. To be called by all threads, after a barrier.
template <int kPairs>
__device__ inline void store_statistics(const AttentionCall& a, const AttentionShare<kPairs>& share,
                                        const AttentionState<kPairs>& state) {
  if (a.statistics == nullptr || a.pass == AttentionPass::weigh) return;
  for (int m = static_cast<int>(threadIdx.x); m < kPairs; m += static_cast<int>(blockDim.x)) {
    if (!share.has(m)) continue;
    float* to = a.statistics + (share.pair_id(a, m) * a.splits + blockIdx.y) * 2;
    to[0] = state.largest[m];
    to[1] = state.sum[m];
  }
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_ATTENTION_CUH_
