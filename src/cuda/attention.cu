// Softmax attention, dense and over chosen blocks:
//   out[r][h] = rnd!(sum_p rnd(softmax_p(rnd(rnd(q . k_p) * scale))) v_p).
//
// Here: the kernel in FP32 FMAs, for every dtype, size and alignment; the combination of splits; the choice. Sums run
// over positions in ascending order within a lane, then over lanes and splits in a fixed order.
//
// One position of one key/value head is read once per block of threads, straight into registers, for up to 12 pairs
// (the query heads that share it): no tile of keys or values is staged. Work of 1 to 8 rows is cut into splits of the
// positions so that it fills the device.
#include <algorithm>

#include "cuda/attention_mma.cuh"
#include "cuda/cuda_ops.h"

namespace offload::cuda {
namespace {

constexpr int kPositionsPerWarp = 16;  // of a tile of the FMA kernel: two per quad of lanes
constexpr int kWarpsMost = 8;

// Shared memory of the FMA kernel, in floats.
struct FmaTile {
  int warps, tile, width;
  __host__ __device__ FmaTile(int warps_of_block, int n)
      : warps(warps_of_block), tile(kPositionsPerWarp * warps_of_block), width((n + kWarp - 1) / kWarp * kWarp) {}
  __host__ __device__ int score_stride() const { return tile + 4; }
  __host__ __device__ int floats(int pairs) const {
    return pairs * width + pairs * score_stride() + tile * pairs + 2 * tile;
  }
};

// A quad of lanes has two positions of the tile, each lane 8 of 32 dimensions of them; a warp has 16 positions. Values:
// a warp has 32 dimensions, a lane 4 of them for every fourth position. grid.z: slices of the values' dimensions.
template <typename T, int kPairs, bool kVector>
class AttentionFma {
 public:
  __device__ AttentionFma(const AttentionCall& a, float* memory, AttentionState<kPairs>& state)
      : a_(a), share_(a), state_(state), size_(static_cast<int>(blockDim.x) / kWarp, a.n), q_(memory) {
    scores_ = q_ + kPairs * size_.width;
    weights_ = scores_ + kPairs * size_.score_stride();
    positions_ = reinterpret_cast<int*>(weights_ + size_.tile * kPairs);
    warp_ = static_cast<int>(threadIdx.x) / kWarp;
    column_ = static_cast<int>(threadIdx.x) % kWarp / 4;
    quad_ = static_cast<int>(threadIdx.x) % 4;
    dimension_ = (static_cast<int>(blockIdx.z) * size_.warps + warp_) * kWarp + 4 * column_;
  }

  __device__ void run() {
    load_queries();
    state_.start(a_, share_);
    list_positions(share_.begin, 0);
    __syncthreads();
    float sums[kPairs][4] = {};
    int buffer = 0;
    for (int first = share_.begin; first < share_.end; first += size_.tile, buffer ^= 1) {
      const int* positions = positions_ + buffer * size_.tile;
      score(positions);
      __syncthreads();
      list_positions(first + size_.tile, buffer ^ 1);
      state_.template softmax<T, kPositionsPerWarp * kWarpsMost / kWarp>(
          a_, first, min(first + size_.tile, share_.end),
          [&](int m, int i) { return scores_[m * size_.score_stride() + i]; },
          [&](int m, int i, float weight) {
            if (i < size_.tile) weights_[i * kPairs + m] = weight;
          });
      __syncthreads();
      if (a_.pass != AttentionPass::statistics) weigh(positions, sums);
    }
    store_statistics(a_, share_, state_);
    finish(sums);
  }

 private:
  __device__ void load_queries() const {
    const T* q = static_cast<const T*>(a_.q);
    for (int i = static_cast<int>(threadIdx.x); i < kPairs * size_.width; i += static_cast<int>(blockDim.x)) {
      const int m = i / size_.width, d = i % size_.width;
      q_[i] =
          share_.has(m) && d < a_.n ? load_float(q + share_.row(m) * a_.q_row + share_.head(m) * a_.q_head + d) : 0.0f;
    }
  }

  __device__ void list_positions(int first, int buffer) const {
    for (int i = static_cast<int>(threadIdx.x); i < size_.tile; i += static_cast<int>(blockDim.x))
      positions_[buffer * size_.tile + i] = share_.position(a_, first + i);
  }

  // q . k of the tile.
  __device__ void score(const int* positions) const {
    const int i = kPositionsPerWarp * warp_ + column_;
    const int low = positions[i], high = positions[i + 8];
    const T* k = static_cast<const T*>(a_.k) + share_.kv_head * a_.k_head;
    const T *k_low = k + low * a_.k_position, *k_high = k + high * a_.k_position;
    float sums[kPairs][2] = {};
    for (int d = 8 * quad_; d < size_.width; d += kWarp) {
      float x[8], y[8];
      load_piece<kVector>(k_low + d, low < 0 ? 0 : a_.n - d, x);
      load_piece<kVector>(k_high + d, high < 0 ? 0 : a_.n - d, y);
#pragma unroll
      for (int m = 0; m < kPairs; ++m) {
        const float* q = q_ + m * size_.width + d;
        const float4 q0 = *reinterpret_cast<const float4*>(q), q1 = *reinterpret_cast<const float4*>(q + 4);
        const float w[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums[m][0] = fmaf(w[j], x[j], sums[m][0]);
          sums[m][1] = fmaf(w[j], y[j], sums[m][1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float total = sums[m][p];
        total += __shfl_xor_sync(kAllLanes, total, 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        if (quad_ == m % 4) scores_[m * size_.score_stride() + i + 8 * p] = total;
      }
    }
  }

  // sums = sums * rescale + weights . v
  __device__ void weigh(const int* positions, float (&sums)[kPairs][4]) const {
    const T* v = static_cast<const T*>(a_.v) + share_.kv_head * a_.v_head + dimension_;
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
      const float scale = state_.rescale[m];
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[m][j] *= scale;
    }
#pragma unroll 4
    for (int i = quad_; i < size_.tile; i += 4) {
      const int position = positions[i];
      float x[4];
      load_piece<kVector>(v + position * a_.v_position, position < 0 ? 0 : a_.n - dimension_, x);
      const float4* row = reinterpret_cast<const float4*>(weights_ + i * kPairs);
#pragma unroll
      for (int m = 0; m < kPairs; m += 4) {
        const float4 four = row[m / 4];
        const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int l = 0; l < 4; ++l)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[m + l][j] = fmaf(w[l], x[j], sums[m + l][j]);
      }
    }
  }

  __device__ void finish(float (&sums)[kPairs][4]) const {
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[m][j] += __shfl_xor_sync(kAllLanes, sums[m][j], 1);
        sums[m][j] += __shfl_xor_sync(kAllLanes, sums[m][j], 2);
      }
      if (quad_ == m % 4) store_attention<T>(a_, share_, state_, m, dimension_, sums[m]);
    }
  }

  const AttentionCall& a_;
  const AttentionShare<kPairs> share_;
  AttentionState<kPairs>& state_;
  const FmaTile size_;
  float* q_;        // [kPairs][width]
  float* scores_;   // [kPairs][score_stride]
  float* weights_;  // [tile][kPairs]
  int* positions_;  // [2][tile]: of this tile and the next, -1 behind the end
  int warp_, column_, quad_, dimension_;
};

template <typename T, int kPairs, bool kVector>
__global__ void __launch_bounds__(kWarpsMost* kWarp, 2) attention_fma_kernel(const AttentionCall a) {
  extern __shared__ float4 memory[];
  __shared__ AttentionState<kPairs> state;
  after_previous();
  AttentionFma<T, kPairs, kVector>(a, reinterpret_cast<float*>(memory), state).run();
}

// --- splits ---

constexpr int kSplitsMost = 512;
constexpr int kCombineGroups = 8;  // a warp each, which take every 8th split

// out[pair] = sum over splits of exp(largest_s - largest) partial_s / sum of the same over the sums, or in the weigh
// pass the sum of the partials. One block of threads per pair, in slices of 256 dimensions.
template <typename T>
__global__ void __launch_bounds__(kCombineGroups* kWarp) attention_combine_kernel(const AttentionCall a) {
  after_previous();
  constexpr int kPerLane = 8;
  __shared__ float factors[kSplitsMost];
  __shared__ float sums[kCombineGroups][kPerLane * kWarp];
  const int64_t pair = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, group = static_cast<int>(threadIdx.x) / kWarp;
  const float* statistics = a.statistics + pair * a.splits * 2;
  float most = -INFINITY, total = 0;
  for (int s = lane; s < a.splits; s += kWarp) most = fmaxf(most, statistics[2 * s]);
  most = warp_max(most);
  for (int s = lane; s < a.splits; s += kWarp) {
    const float factor = statistics[2 * s] == -INFINITY ? 0.0f : expf(statistics[2 * s] - most);
    if (group == 0) factors[s] = a.pass == AttentionPass::weigh ? 1.0f : factor;
    total = fmaf(factor, statistics[2 * s + 1], total);
  }
  total = warp_sum(total);
  __syncthreads();
  const int slice = static_cast<int>(blockIdx.y) * kPerLane * kWarp;
  float x[kPerLane] = {};
  for (int s = group; s < a.splits; s += kCombineGroups) {
    const float factor = factors[s];
    const float* partial = a.partials + (pair * a.splits + s) * a.n + slice + lane;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      if (slice + lane + j * kWarp < a.n) x[j] = fmaf(factor, partial[j * kWarp], x[j]);
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) sums[group][lane + j * kWarp] = x[j];
  __syncthreads();
  const int d = slice + static_cast<int>(threadIdx.x);
  if (d >= a.n) return;
  float result = 0;
  for (int g = 0; g < kCombineGroups; ++g) result += sums[g][threadIdx.x];
  const int64_t row = pair / a.heads, head = pair % a.heads;
  bool sees = true;  // a row without positions gives zeros
  if (a.blocks != nullptr) sees = a.counts[row] > 0 || (a.first + row + 1) % a.ratio > 0;
  if (a.pass == AttentionPass::fused && sees) result /= total;
  store_float(static_cast<T*>(a.out) + row * a.out_row + head * a.out_head + d, result);
}

// --- choice ---

int64_t ceil_divide(int64_t x, int64_t y) {
  return (x + y - 1) / y;
}

// How a call is cut. `pairs` and `tile` are those of the kernel that runs it, which should have `wanted` blocks.
struct AttentionCut {
  int64_t units, parts, splits, split_positions;

  AttentionCut(const AttentionArgs& a, int64_t pairs, int64_t tile, int64_t wanted) {
    const int64_t rows = a.q.dim(0), kv_heads = a.k.dim(1), group = a.q.dim(1) / kv_heads;
    units = a.blocks ? rows : 1;
    parts = ceil_divide(a.blocks ? group : rows * group, pairs);
    const int64_t items = units * parts * kv_heads;
    const int64_t tiles = std::max<int64_t>(1, ceil_divide(positions_most(a), tile));
    const int64_t most = items >= wanted ? 1 : std::min<int64_t>({tiles, ceil_divide(wanted, items), kSplitsMost});
    split_positions = ceil_divide(tiles, most) * tile;
    splits = ceil_divide(tiles * tile, split_positions);
  }
  static int64_t wanted_blocks(const DeviceCaps& caps) { return 2 * int64_t{caps.multiprocessors}; }
  // That one row may see.
  static int64_t positions_most(const AttentionArgs& a) {
    const int64_t visible = a.first + a.q.dim(0);
    return a.blocks ? std::min(visible, (a.blocks.dim(1) + 1) * a.ratio) : visible;
  }
};

constexpr int64_t kPairsMost = 16;  // of kernels whose work is split
constexpr int64_t kTileLeast = 16;

struct AttentionScratch {
  Tensor partials, statistics;

  // Grows with rows and positions, so that a plan at the largest covers all: (pairs * splits) is at most all tiles of
  // all pairs, and at most twice the wanted blocks.
  AttentionScratch(Arena& arena, const AttentionArgs& a, const DeviceCaps& caps) {
    const int64_t pairs = a.q.dim(0) * a.q.dim(1);
    const int64_t tiles = std::max<int64_t>(1, ceil_divide(AttentionCut::positions_most(a), kTileLeast));
    const int64_t parts = std::min(pairs * tiles, 2 * AttentionCut::wanted_blocks(caps) * kPairsMost);
    partials = arena.take(DType::f32, {parts, a.q.dim(2)});
    statistics = arena.take(DType::f32, {std::max(parts, pairs), 2});
  }
};

AttentionCall call_of(const AttentionArgs& a, const AttentionCut& cut) {
  AttentionCall call;
  call.q = a.q.data(), call.k = a.k.data(), call.v = a.v.data(), call.out = a.out.data();
  call.q_row = a.q.stride(0), call.q_head = a.q.stride(1);
  call.k_position = a.k.stride(0), call.k_head = a.k.stride(1);
  call.v_position = a.v.stride(0), call.v_head = a.v.stride(1);
  call.out_row = a.out.stride(0), call.out_head = a.out.stride(1);
  if (a.blocks) {
    call.blocks = data_of<const int32_t>(a.blocks), call.counts = data_of<const int32_t>(a.counts);
    call.blocks_row = a.blocks.stride(0);
    call.ratio = static_cast<int32_t>(a.ratio);
  }
  call.first = static_cast<int32_t>(a.first), call.rows = static_cast<int32_t>(a.q.dim(0));
  call.heads = static_cast<int32_t>(a.q.dim(1)), call.kv_heads = static_cast<int32_t>(a.k.dim(1));
  call.n = static_cast<int32_t>(a.q.dim(2));
  call.parts = static_cast<int32_t>(cut.parts), call.splits = static_cast<int32_t>(cut.splits);
  call.split_positions = static_cast<int32_t>(cut.split_positions);
  call.scale = a.scale;
  call.rounding = a.q.dtype() == DType::f32 ? Rounding::fused : a.rounding;
  return call;
}

dim3 grid_of(const AttentionArgs& a, const AttentionCut& cut, int64_t slices) {
  return dim3(static_cast<unsigned>(cut.units * cut.parts * a.k.dim(1)), static_cast<unsigned>(cut.splits),
              static_cast<unsigned>(slices));
}

// Calls launch_pass(call) for each pass that the rounding needs, then combines the splits.
template <typename T, typename LaunchPass>
void run_passes(AttentionCall call, const AttentionScratch& scratch, const Queue& queue,
                const LaunchPass& launch_pass) {
  if (call.splits > 1) call.partials = data_of<float>(scratch.partials);
  if (call.splits > 1 || call.rounding == Rounding::reference) call.statistics = data_of<float>(scratch.statistics);
  if (call.rounding == Rounding::reference) {
    call.pass = AttentionPass::statistics;
    launch_pass(call);
    call.pass = AttentionPass::weigh;
  }
  launch_pass(call);
  if (call.splits == 1) return;
  const dim3 grid(static_cast<unsigned>(call.rows * call.heads), blocks_for(call.n, kCombineGroups * kWarp));
  launch_early(attention_combine_kernel<T>, grid, dim3(kCombineGroups * kWarp), 0, queue, call);
}

template <typename T, int kPairs, bool kVector>
void run_fma(const AttentionArgs& a, const DeviceCaps& caps, const AttentionScratch& scratch, const Queue& queue) {
  const int64_t n = a.q.dim(2);
  const int warps = static_cast<int>(std::min<int64_t>(kWarpsMost, ceil_divide(n, kWarp)));
  const FmaTile tile(warps, static_cast<int>(n));
  const AttentionCut cut(a, kPairs, tile.tile, AttentionCut::wanted_blocks(caps));
  const dim3 grid = grid_of(a, cut, ceil_divide(n, warps * kWarp));
  run_passes<T>(call_of(a, cut), scratch, queue, [&](const AttentionCall& call) {
    launch_early(attention_fma_kernel<T, kPairs, kVector>, grid, dim3(static_cast<unsigned>(warps * kWarp)),
                 tile.floats(kPairs) * int64_t{sizeof(float)}, queue, call);
  });
}

template <typename T, bool kVector>
void run_fma_of_pairs(const AttentionArgs& a, const DeviceCaps& caps, const AttentionScratch& scratch,
                      const Queue& queue) {
  // Shared memory holds the queries of all pairs in FP32.
  constexpr int64_t kFloatsMost = 15 << 10;
  const int64_t group = a.q.dim(1) / a.k.dim(1), n = a.q.dim(2), pairs_most = a.blocks ? group : group * a.q.dim(0);
  const auto fits = [&](int pairs) { return FmaTile(kWarpsMost, static_cast<int>(n)).floats(pairs) <= kFloatsMost; };
  OFL_ASSERT(fits(4));  // n up to 3,400
  if (pairs_most > 8 && fits(12))
    run_fma<T, 12, kVector>(a, caps, scratch, queue);
  else if (pairs_most > 4 && fits(8))
    run_fma<T, 8, kVector>(a, caps, scratch, queue);
  else
    run_fma<T, 4, kVector>(a, caps, scratch, queue);
}

template <int kN, int kMTiles>
void run_mma(const AttentionArgs& a, const AttentionScratch& scratch, int64_t wanted, const Queue& queue) {
  using Tile = AttentionMmaTile<kN, kMTiles>;
  const AttentionCut cut(a, Tile::kPairs, Tile::kPositions, wanted);
  const dim3 grid = grid_of(a, cut, 1);
  run_passes<bf16>(call_of(a, cut), scratch, queue, [&](const AttentionCall& call) {
    launch_early(attention_mma_kernel<kN, kMTiles>, grid, dim3(Tile::kThreads), sizeof(AttentionMmaShared<kN, kMTiles>),
                 queue, call);
  });
}

// Four tiles of pairs share a position where that many belong together and the blocks still fill the device, else one.
template <int kN>
void run_mma_of_pairs(const AttentionArgs& a, const DeviceCaps& caps, const AttentionScratch& scratch,
                      const Queue& queue) {
  constexpr int64_t kUnsplit = 1;
  const AttentionCut wide(a, AttentionMmaTile<kN, 4>::kPairs, AttentionMmaTile<kN, 4>::kPositions, kUnsplit);
  const int64_t group = a.q.dim(1) / a.k.dim(1), pairs = a.blocks ? group : group * a.q.dim(0);
  if (pairs > 32 && 2 * wide.units * wide.parts * a.k.dim(1) >= caps.multiprocessors)
    run_mma<kN, 4>(a, scratch, kUnsplit, queue);
  else
    run_mma<kN, 1>(a, scratch, AttentionCut::wanted_blocks(caps), queue);
}

}  // namespace

int64_t CudaOps::scratch_bytes(const AttentionArgs& a) const {
  Arena arena;
  AttentionScratch(arena, a, caps_);
  return arena.peak_bytes();
}

void CudaOps::execute(const AttentionArgs& a) {
  if (a.q.elements() == 0) return;
  OFL_ASSERT(a.first + a.q.dim(0) <= INT32_MAX);
  Arena arena = scratch_arena();
  const AttentionScratch scratch(arena, a, caps_);
  const bool vectors = in_vectors(a.k) && in_vectors(a.v);
  if (vectors && a.q.dtype() == DType::bf16 && caps_.has_bf16_mma()) {
    const int64_t n = a.q.dim(2);
    if (n == 64) return run_mma_of_pairs<64>(a, caps_, scratch, stream_);
    if (n == 128) return run_mma_of_pairs<128>(a, caps_, scratch, stream_);
    if (n == 256) return run_mma_of_pairs<256>(a, caps_, scratch, stream_);
  }
  with_float_type(a.q.dtype(), [&](auto element) {
    using T = decltype(element);
    if (vectors)
      run_fma_of_pairs<T, true>(a, caps_, scratch, stream_);
    else
      run_fma_of_pairs<T, false>(a, caps_, scratch, stream_);
  });
}

}  // namespace offload::cuda
