// The attention kernel on BF16 tensor cores (m16n8k16), for heads of 64, 128 or 256 dimensions in 16-byte rows.
//
// Keys and values go from global memory straight into the registers that the products read, each element once per block
// of threads: within a product the order of the summed index is free, so that a lane's operand is 16 (keys) or 8
// (values) consecutive bytes of its positions' rows. 16 * kMTiles pairs share them. Fused rounding keeps the weights in
// FP32 as the sum of two BF16 numbers (2^-18 of each weight is lost), reference rounding makes them one.
#ifndef OFFLOAD_CUDA_ATTENTION_MMA_CUH_
#define OFFLOAD_CUDA_ATTENTION_MMA_CUH_

#include "cuda/attention.cuh"
#include "cuda/mma.cuh"

namespace offload::cuda {

template <int kN, int kMTiles>
struct AttentionMmaTile {
  static constexpr int kPairs = 16 * kMTiles;
  static constexpr int kWarps = kN / 32;                     // 32 dimensions of the values each
  static constexpr int kPositions = 64;                      // of a tile
  static constexpr int kKeyTiles = kPositions / 8 / kWarps;  // of 8 positions, per warp
  static constexpr int kPieces = kN / 32;                    // of 32 dimensions of a key
  static constexpr int kSteps = kPositions / 16;             // of 16 positions, of the values
  static constexpr int kQueryStride = kN + 32;               // BF16; rows 64 bytes apart in the banks
  static constexpr int kScoreStride = kPositions + 8;        // FP32
  static constexpr int kWeightStride = kPositions + 16;      // BF16; rows 32 bytes apart in the banks
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kBlocks = kMTiles == 1 ? 512 / kN : 1;  // per multiprocessor
  static_assert(kThreads >= kPositions);
};

template <int kN, int kMTiles>
struct AttentionMmaShared {
  using Tile = AttentionMmaTile<kN, kMTiles>;
  alignas(16) bf16 q[Tile::kPairs][Tile::kQueryStride];
  alignas(16) float scores[Tile::kPairs][Tile::kScoreStride];
  alignas(16) bf16 high[Tile::kPairs][Tile::kWeightStride];  // the weights, and what rounding to BF16 left of them
  alignas(16) bf16 low[Tile::kPairs][Tile::kWeightStride];
  int positions[2][Tile::kPositions];  // of this tile, then of the one after the next, and of the next; -1: none
  AttentionState<Tile::kPairs> state;
};

// Lane l of a warp: g = l / 4 is the row or column that its fragments belong to, t = l % 4 their place in the sum.
template <int kN, int kMTiles>
class AttentionMma {
  using Tile = AttentionMmaTile<kN, kMTiles>;

 public:
  __device__ AttentionMma(const AttentionCall& a, AttentionMmaShared<kN, kMTiles>& shared)
      : a_(a),
        share_(a),
        s_(shared),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  // The chain of loads of a tile, positions and then keys and values, starts two tiles ahead: positions of the third
  // tile are under way in a register while the second's keys are loaded and the first is worked on.
  __device__ void run() {
    load_queries();
    s_.state.start(a_, share_);
    list(position_at(share_.begin), 0);
    list(position_at(share_.begin + Tile::kPositions), 1);
    int ahead = position_at(share_.begin + 2 * Tile::kPositions);
    __syncthreads();
    uint4 keys[Tile::kKeyTiles][Tile::kPieces];
    uint2 values[Tile::kSteps][4];
    float sums[kMTiles][4][4] = {};
    const bool weighs = a_.pass != AttentionPass::statistics;
    int buffer = 0;
    load_keys(s_.positions[0], keys);
    for (int first = share_.begin; first < share_.end; first += Tile::kPositions, buffer ^= 1) {
      if (weighs) load_values(s_.positions[buffer], values);
      score(keys);
      load_keys(s_.positions[buffer ^ 1], keys);
      __syncthreads();  // the scores are complete, and this tile's positions are no longer needed
      list(ahead, buffer);
      ahead = position_at(first + 3 * Tile::kPositions);
      s_.state.template softmax<bf16, Tile::kPositions / kWarp>(
          a_, first, min(first + Tile::kPositions, share_.end), [&](int m, int i) { return s_.scores[m][i]; },
          [&](int m, int i, float weight) {
            const bf16 high = round_to_bf16(weight);
            s_.high[m][i] = high;
            s_.low[m][i] = round_to_bf16(weight - widen(high));
          });
      __syncthreads();
      if (weighs) weigh(values, sums);
    }
    store_statistics(a_, share_, s_.state);
    finish(sums);
  }

 private:
  __device__ void load_queries() const {
    const bf16* q = static_cast<const bf16*>(a_.q);
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kPairs * kN; i += Tile::kThreads) {
      const int m = i / kN, d = i % kN;
      s_.q[m][d] = share_.has(m) ? q[share_.row(m) * a_.q_row + share_.head(m) * a_.q_head + d] : bf16{0};
    }
  }

  // This thread's entry of the tile that starts at `first`, -1 behind the end and for threads that have none.
  __device__ int position_at(int first) const {
    const int i = static_cast<int>(threadIdx.x);
    return i < Tile::kPositions ? share_.position(a_, first + i) : -1;
  }
  __device__ void list(int position, int buffer) const {
    if (threadIdx.x < Tile::kPositions) s_.positions[buffer][threadIdx.x] = position;
  }

  // Lane (g, t): dimensions 32 j + 8 t .. + 7 of position g of each key tile, which are its words of two steps of 16.
  __device__ void load_keys(const int* positions, uint4 (&keys)[Tile::kKeyTiles][Tile::kPieces]) const {
    const bf16* k = static_cast<const bf16*>(a_.k) + share_.kv_head * a_.k_head + 8 * t_;
#pragma unroll
    for (int tile = 0; tile < Tile::kKeyTiles; ++tile) {
      const int position = positions[8 * (warp_ * Tile::kKeyTiles + tile) + g_];
      const uint4* row = reinterpret_cast<const uint4*>(k + position * a_.k_position);
#pragma unroll
      for (int j = 0; j < Tile::kPieces; ++j)
        keys[tile][j] = position < 0 ? make_uint4(0, 0, 0, 0) : __ldg(row + 4 * j);
    }
  }

  // Lane (g, t): dimensions 4 g .. + 3 of the warp's 32, of positions 16 step + 4 t .. + 3.
  __device__ void load_values(const int* positions, uint2 (&values)[Tile::kSteps][4]) const {
    const bf16* v = static_cast<const bf16*>(a_.v) + share_.kv_head * a_.v_head + kWarp * warp_ + 4 * g_;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = positions[16 * step + 4 * t_ + i];
        values[step][i] =
            position < 0 ? make_uint2(0, 0) : __ldg(reinterpret_cast<const uint2*>(v + position * a_.v_position));
      }
  }

  __device__ void score(const uint4 (&keys)[Tile::kKeyTiles][Tile::kPieces]) const {
    float sums[kMTiles][Tile::kKeyTiles][4] = {};
#pragma unroll
    for (int j = 0; j < Tile::kPieces; ++j) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const uint4 x = *reinterpret_cast<const uint4*>(&s_.q[16 * m + g_][32 * j + 8 * t_]);
        const uint4 y = *reinterpret_cast<const uint4*>(&s_.q[16 * m + g_ + 8][32 * j + 8 * t_]);
#pragma unroll
        for (int tile = 0; tile < Tile::kKeyTiles; ++tile) {
          const uint4& key = keys[tile][j];
          mma_bf16_16816(sums[m][tile], {x.x, y.x, x.y, y.y}, {key.x, key.y});
          mma_bf16_16816(sums[m][tile], {x.z, y.z, x.w, y.w}, {key.z, key.w});
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int tile = 0; tile < Tile::kKeyTiles; ++tile) {
        const float(&sum)[4] = sums[m][tile];
        const int i = 8 * (warp_ * Tile::kKeyTiles + tile) + 2 * t_;
        *reinterpret_cast<float2*>(&s_.scores[16 * m + g_][i]) = make_float2(sum[0], sum[1]);
        *reinterpret_cast<float2*>(&s_.scores[16 * m + g_ + 8][i]) = make_float2(sum[2], sum[3]);
      }
  }

  // Column g of value tile c is dimension 4 g + c of the warp's 32.
  __device__ void weigh(const uint2 (&values)[Tile::kSteps][4], float (&sums)[kMTiles][4][4]) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float x = s_.state.rescale[16 * m + g_], y = s_.state.rescale[16 * m + g_ + 8];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[m][c][0] *= x, sums[m][c][1] *= x;
        sums[m][c][2] *= y, sums[m][c][3] *= y;
      }
    }
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      const uint2(&v)[4] = values[step];
      constexpr unsigned kLow = 0x5410, kHigh = 0x7632;  // the low or the high halves of two words
      const uint32_t columns[4][2] = {{__byte_perm(v[0].x, v[1].x, kLow), __byte_perm(v[2].x, v[3].x, kLow)},
                                      {__byte_perm(v[0].x, v[1].x, kHigh), __byte_perm(v[2].x, v[3].x, kHigh)},
                                      {__byte_perm(v[0].y, v[1].y, kLow), __byte_perm(v[2].y, v[3].y, kLow)},
                                      {__byte_perm(v[0].y, v[1].y, kHigh), __byte_perm(v[2].y, v[3].y, kHigh)}};
      multiply(s_.high, step, columns, sums);
      if (a_.pass == AttentionPass::fused) multiply(s_.low, step, columns, sums);
    }
  }

  __device__ void multiply(const bf16 (&weights)[Tile::kPairs][Tile::kWeightStride], int step,
                           const uint32_t (&columns)[4][2], float (&sums)[kMTiles][4][4]) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const uint2 x = *reinterpret_cast<const uint2*>(&weights[16 * m + g_][16 * step + 4 * t_]);
      const uint2 y = *reinterpret_cast<const uint2*>(&weights[16 * m + g_ + 8][16 * step + 4 * t_]);
#pragma unroll
      for (int c = 0; c < 4; ++c) mma_bf16_16816(sums[m][c], {x.x, y.x, x.y, y.y}, columns[c]);
    }
  }

  // Columns 2 t and 2 t + 1 of the four value tiles are eight consecutive dimensions.
  __device__ void finish(const float (&sums)[kMTiles][4][4]) const {
    const int d = kWarp * warp_ + 8 * t_;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float(&s)[4][4] = sums[m];
      const float x[8] = {s[0][0], s[1][0], s[2][0], s[3][0], s[0][1], s[1][1], s[2][1], s[3][1]};
      const float y[8] = {s[0][2], s[1][2], s[2][2], s[3][2], s[0][3], s[1][3], s[2][3], s[3][3]};
      store_attention<bf16>(a_, share_, s_.state, 16 * m + g_, d, x);
      store_attention<bf16>(a_, share_, s_.state, 16 * m + g_ + 8, d, y);
    }
  }

  const AttentionCall& a_;
  const AttentionShare<Tile::kPairs> share_;
  AttentionMmaShared<kN, kMTiles>& s_;
  const int warp_, g_, t_;
};

template <int kN, int kMTiles>
__global__ void __launch_bounds__(AttentionMmaTile<kN, kMTiles>::kThreads, AttentionMmaTile<kN, kMTiles>::kBlocks)
    attention_mma_kernel(const AttentionCall a) {
  extern __shared__ float4 memory[];
  after_previous();
  AttentionMma<kN, kMTiles>(a, *reinterpret_cast<AttentionMmaShared<kN, kMTiles>*>(memory)).run();
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_ATTENTION_MMA_CUH_
