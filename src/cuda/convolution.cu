// Causal depthwise convolution with SiLU and a history that carries over from call to call.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kLanes = 32;                     // threads along the channels, 8 channels each
constexpr int kChannels = kLanes * kMapWidth;  // of a block: 512 contiguous bytes of BF16
constexpr int kThreadRows = 8;                 // threads along the rows
constexpr int kRowsEach = 4;                   // rows of a thread, which share one read of the weights
constexpr int kRows = kThreadRows * kRowsEach;
constexpr int kThreads = kLanes * kThreadRows;
constexpr int64_t kTapsMost = 64;  // 64 KiB of weights

template <typename T>
struct CausalConv {
  Rows<const T> x;
  Rows<T> out;
  T* history;  // [history_rows, channels]
  AnyRows w;
  int64_t rows, dilation, history_rows;
  int channels, taps;

  // Row t of (history ++ x), t >= -history_rows.
  __device__ const T* source(int64_t t) const { return t >= 0 ? x.at(t) : history + (history_rows + t) * channels; }
};

// This thread's channels of the block's.
template <bool kWhole, typename T>
__device__ Piece<kMapWidth, kWhole> channels_of_thread(const CausalConv<T>& a) {
  return {.column = static_cast<int>(blockIdx.x * kChannels + threadIdx.x * (kWhole ? kMapWidth : 1)),
          .end = a.channels,
          .step = kWhole ? 1 : kLanes};
}

// weights[j][c] = w[channel c of the block][j]: what the block needs is contiguous in w.
template <typename T>
__device__ void load_weights(const CausalConv<T>& a, float* weights) {
  const int first = static_cast<int>(blockIdx.x) * kChannels;
  const int count = min(a.channels - first, kChannels) * a.taps;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.y * kLanes + threadIdx.x); i < count; i += kThreads)
    weights[i % a.taps * kChannels + i / a.taps] = a.w.load(first, i);
}

// history <- the last history_rows rows of (history ++ x) in the block's channels, kThreadRows at a time in ascending
// order: a round writes after all of its threads have read, and later rounds read rows above what was written.
// REQUIRES: all threads of the block call.
template <bool kWhole, typename T>
__device__ void advance_history(const CausalConv<T>& a) {
  const Piece<kMapWidth, kWhole> piece = channels_of_thread<kWhole>(a);
  for (int64_t begin = 0; begin < a.history_rows; begin += kThreadRows) {
    const int64_t i = begin + threadIdx.y;
    const bool mine = i < a.history_rows && piece.column < a.channels;
    Vector<kMapWidth> v;
    if (mine) v = piece.load(a.source(a.rows - a.history_rows + i));
    __syncthreads();
    if (mine) piece.store(a.history + i * a.channels, v);
  }
}

// The usual number of taps: a thread then goes along the rows with the last inputs in registers.
constexpr int kUsualTaps = 4;
constexpr int kChain = 4;  // rows of a thread, a dilation apart

// As below for kUsualTaps taps, whole vectors and more rows than one block's: each thread makes kChain rows and reads
// each input of them once. Grid [channels / kChannels, chains / kThreadRows]; chain c has the rows c % dilation +
// dilation * (kChain * (c / dilation) + 0, 1, ...).
template <typename T, Rounding kRounding>
__global__ void __launch_bounds__(kThreads) causal_conv_silu_chain_kernel(CausalConv<T> a) {
  const Piece<kMapWidth, true> piece = channels_of_thread<true>(a);
  if (piece.column >= a.channels) return;
  const int64_t chain = int64_t{blockIdx.y} * kThreadRows + threadIdx.y;
  const int64_t first = chain / a.dilation * a.dilation * kChain + chain % a.dilation;
  Vector<kMapWidth> x[kChain + kUsualTaps - 1];
#pragma unroll
  for (int i = 0; i < kChain + kUsualTaps - 1; ++i) {
    const int64_t t = first + (i - (kUsualTaps - 1)) * a.dilation;
    if (t < a.rows) x[i] = piece.load(a.source(t));
  }
  // The weights of this thread's channels are contiguous: of two channels in each vector.
  constexpr int kEach = kMapWidth / kUsualTaps;
  Vector<kMapWidth> w[kMapWidth / kEach];
#pragma unroll
  for (int i = 0; i < kMapWidth / kEach; ++i)
    w[i] = Piece<kMapWidth, true>{.column = piece.column * kUsualTaps + i * kMapWidth}.load(a.w, 0);
#pragma unroll
  for (int r = 0; r < kChain; ++r) {
    const int64_t t = first + r * a.dilation;
    if (t >= a.rows) break;
    Vector<kMapWidth> sums;
#pragma unroll
    for (int j = 0; j < kUsualTaps; ++j) {
#pragma unroll
      for (int i = 0; i < kMapWidth; ++i)
        sums[i] = fmaf(w[i / kEach][i % kEach * kUsualTaps + j], x[r + j][i], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) sums[i] = silu(rnd<T>(sums[i], kRounding));
    piece.store(a.out.at(t), sums);
  }
}

// s[t][ch] = rnd(sum_j w[ch][j] * X[t - dilation * (taps - 1 - j)][ch]), j ascending, out = rnd!(silu(s)). A block
// makes kRows rows of kChannels channels; grid [channels / kChannels, rows / kRows]. Reads x once and, out of the
// caches, taps times; writes out. When the grid has one block of rows, so that no other block reads the block's
// channels of the history, it advances them too. Shared memory: taps * kChannels floats.
template <typename T, Rounding kRounding, bool kWhole>
__global__ void __launch_bounds__(kThreads) causal_conv_silu_kernel(CausalConv<T> a) {
  extern __shared__ float4 shared[];
  float* weights = reinterpret_cast<float*>(shared);
  load_weights(a, weights);
  after_previous();
  __syncthreads();
  const Piece<kMapWidth, kWhole> piece = channels_of_thread<kWhole>(a);
  const int64_t first = int64_t{blockIdx.y} * kRows + threadIdx.y;
  // Where this thread's weights lie: its piece relative to the block's channels.
  const Piece<kMapWidth, kWhole> lane{.column = piece.column % kChannels, .end = kChannels, .step = piece.step};
  if (piece.column < a.channels) {
    Vector<kMapWidth> sums[kRowsEach];
#pragma unroll 2
    for (int j = 0; j < a.taps; ++j) {
      const auto w = lane.load(weights + j * kChannels);
#pragma unroll
      for (int r = 0; r < kRowsEach; ++r) {
        const int64_t t = first + r * kThreadRows;
        if (t >= a.rows) continue;
        const auto x = piece.load(a.source(t - a.dilation * (a.taps - 1 - j)));
#pragma unroll
        for (int i = 0; i < kMapWidth; ++i) sums[r][i] = fmaf(w[i], x[i], sums[r][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsEach; ++r) {
      const int64_t t = first + r * kThreadRows;
      if (t >= a.rows) continue;
#pragma unroll
      for (int i = 0; i < kMapWidth; ++i) sums[r][i] = silu(rnd<T>(sums[r][i], kRounding));
      piece.store(a.out.at(t), sums[r]);
    }
  }
  if (gridDim.y == 1) advance_history<kWhole>(a);
}

// For several blocks of rows: after all of them. Grid [channels / kChannels].
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) advance_history_kernel(CausalConv<T> a) {
  advance_history<kWhole>(a);
}

}  // namespace

void CudaOps::execute(const CausalConvSiluArgs& a) {
  const int64_t rows = a.x.dim(0), channels = a.x.dim(1), taps = a.w.dim(1);
  if (rows == 0 || channels == 0) return;
  OFL_ASSERT(taps <= kTapsMost && channels <= kColumnsMost);
  const dim3 grid(blocks_for(channels, kChannels), blocks_for(rows, kRows)), block(kLanes, kThreadRows);
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    const CausalConv<T> args{.x = rows_of<const T>(a.x),
                             .out = rows_of<T>(a.out),
                             .history = data_of<T>(a.history),
                             .w = any_rows_of(a.w),
                             .rows = rows,
                             .dilation = a.dilation,
                             .history_rows = a.history.dim(0),
                             .channels = static_cast<int>(channels),
                             .taps = static_cast<int>(taps)};
    with_bool(whole_vectors(kMapWidth, channels, {&a.x, &a.history, &a.out}), [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      if (kWhole && taps == kUsualTaps && grid.y > 1 && reinterpret_cast<uintptr_t>(a.w.data()) % 16 == 0) {
        const int64_t turns = (rows + a.dilation * kChain - 1) / (a.dilation * kChain);
        launch(causal_conv_silu_chain_kernel<T, decltype(rounding)::value>,
               dim3(grid.x, blocks_for(turns * a.dilation, kThreadRows)), block, 0, stream_, args);
        return launch(advance_history_kernel<T, kWhole>, dim3(grid.x), block, 0, stream_, args);
      }
      launch_early(causal_conv_silu_kernel<T, decltype(rounding)::value, kWhole>, grid, block,
                   taps * kChannels * static_cast<int64_t>(sizeof(float)), stream_, args);
      if (grid.y > 1) launch(advance_history_kernel<T, kWhole>, dim3(grid.x), block, 0, stream_, args);
    });
  });
}

}  // namespace offload::cuda
