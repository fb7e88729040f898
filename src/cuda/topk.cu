// topk: the k largest of each row with their ids, largest first.
//
// A number and its id are one key of 64 bits, and all keys of a row differ. A pass leaves of each tile of kTile keys
// the k largest; passes follow until one tile is left, two of them for a vocabulary of 248,320 and k up to 67. Bound by
// the latency of the launches and of the bits that tell the k-th key from the next: H200, 2026-11-30, a vocabulary
// takes 9.4 us at k = 1, 21.6 at 32 and 42.9 at 256 (`offload-bench ops --op topk`), 0.23 us to read.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"
#include "cuda/selection.cuh"

namespace offload::cuda {
namespace {

constexpr int kTopkThreads = 1024;
constexpr int kKeysEach = 4;
constexpr int kTile = kTopkThreads * kKeysEach;
constexpr int64_t kTilesMost = 65535;  // what a grid has along y
static_assert(kTopkMax < kTile / 2);   // passes shrink a row

struct TopkPass {
  Rows<const float> x;             // [rows, count]: what the first pass reads
  const uint64_t* keys = nullptr;  // [rows, count]: what a later one reads; 0: none
  uint64_t* kept = nullptr;        // [rows, tiles, k], largest first, then zeros; null in the last pass
  Rows<float> values;              // what the last pass writes
  Rows<int32_t> ids;
  int count = 0, k = 0;
};

// A NaN is above all.
__device__ uint64_t topk_key(float value, int id) {
  return selection_key(value != value ? 0xffffffffu : in_order(value), id);
}

// The largest key of the block, on every thread.
__device__ uint64_t block_largest(const uint64_t (&keys)[kKeysEach]) {
  __shared__ uint64_t of_warps[kTopkThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint64_t mine = keys[0];
#pragma unroll
  for (int j = 1; j < kKeysEach; ++j) mine = larger(mine, keys[j]);
  mine = warp_largest(mine);
  if (lane == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  return warp_largest(of_warps[lane]);
}

// A bound above 0 that the k largest keys of the block reach and no others: found bit by bit, until it parts them.
__device__ uint64_t bound_of(const uint64_t (&keys)[kKeysEach], int used, int k, uint64_t largest) {
  if (k == 1) return larger(largest, 1);
  const auto reach = [&](uint64_t bound) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kKeysEach; ++j)
      if (j < used) count += __syncthreads_count(keys[j] >= bound);
    return count;
  };
  uint64_t bound = 0;
  int reached = reach(1);
  for (int bit = 63; reached > k; --bit) {
    const uint64_t higher = bound | uint64_t{1} << bit;
    const int count = higher > largest ? 0 : reach(higher);
    if (count >= k) bound = higher, reached = count;
  }
  return larger(bound, 1);
}

// Grid (rows, tiles). Keys of a tile come to threads in turn; `used` rounds of them hold any.
__global__ void __launch_bounds__(kTopkThreads) topk_kernel(const TopkPass a) {
  __shared__ uint64_t kept[kTopkMax];
  __shared__ int kept_count;
  const int thread = static_cast<int>(threadIdx.x), begin = static_cast<int>(blockIdx.y) * kTile;
  const int64_t row = blockIdx.x;
  uint64_t keys[kKeysEach];
#pragma unroll
  for (int j = 0; j < kKeysEach; ++j) {
    const int i = begin + j * kTopkThreads + thread;
    keys[j] = i >= a.count ? 0 : a.keys != nullptr ? a.keys[row * a.count + i] : topk_key(a.x.at(row)[i], i);
  }
  if (thread == 0) kept_count = 0;
  const uint64_t largest = block_largest(keys);
  const int used = (min(a.count - begin, kTile) + kTopkThreads - 1) / kTopkThreads;
  const uint64_t bound = bound_of(keys, used, a.k, largest);
  // They arrive in any order; each finds its place by the number of larger ones.
#pragma unroll
  for (int j = 0; j < kKeysEach; ++j)
    if (keys[j] >= bound) kept[atomicAdd(&kept_count, 1)] = keys[j];
  __syncthreads();
  const bool has_order = ordered_of(largest) < in_order(INFINITY);
  for (int i = thread; i < a.k; i += kTopkThreads) {
    const uint64_t key = i < kept_count ? kept[i] : 0;
    int place = key == 0 ? i : 0;
    for (int other = 0; other < kept_count && key != 0; ++other) place += kept[other] > key;
    if (a.kept != nullptr) {
      a.kept[(row * gridDim.y + blockIdx.y) * a.k + place] = key;
    } else {
      a.ids.at(row)[place] = has_order ? id_of(key) : -1;
      if (has_order) a.values.at(row)[place] = score_of(ordered_of(key));
    }
  }
}

int64_t tiles_of(int64_t count) {
  return (count + kTile - 1) / kTile;
}

// What passes leave to each other, in turn; the first pass leaves most to one and the second to the other.
struct TopkScratch {
  TopkScratch(Arena& arena, const TopkArgs& a) {
    int64_t count = a.x.dim(1);
    for (Tensor& each : kept) {
      count = tiles_of(count) * a.ids.dim(1);
      each = arena.take(DType::u64, {a.x.dim(0), count});
    }
  }
  Tensor kept[2];
};

}  // namespace

int64_t CudaOps::scratch_bytes(const TopkArgs& a) const {
  Arena arena;
  TopkScratch(arena, a);
  return arena.peak_bytes();
}

void CudaOps::execute(const TopkArgs& a) {
  const int64_t rows = a.x.dim(0), k = a.ids.dim(1);
  if (rows == 0) return;
  OFL_ASSERT(tiles_of(a.x.dim(1)) <= kTilesMost && rows <= INT32_MAX);
  Arena arena = scratch_arena();
  const TopkScratch scratch(arena, a);
  TopkPass pass{.x = rows_of<const float>(a.x), .values = rows_of<float>(a.values), .ids = rows_of<int32_t>(a.ids)};
  pass.count = static_cast<int>(a.x.dim(1)), pass.k = static_cast<int>(k);
  for (int i = 0;; i ^= 1) {
    const int64_t tiles = tiles_of(pass.count);
    pass.kept = tiles > 1 ? scratch.kept[i].as<uint64_t>() : nullptr;
    launch(topk_kernel, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(tiles)), kTopkThreads, 0, stream_,
           pass);
    if (tiles == 1) return;
    pass.keys = pass.kept;
    pass.count = static_cast<int>(tiles * k);
  }
}

}  // namespace offload::cuda
