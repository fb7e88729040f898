// hyper_read: one kernel for one BF16 row, else the ops that it is made of.
#include <cooperative_groups.h>

#include "core/op_parts.h"
#include "cuda/canonical.cuh"
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kStreams = 4;          // groups of kRowLanes in a warp
constexpr int kBlockOutputs = 3;     // a block for most multiprocessors of an H200
constexpr int kOutputThreads = 128;  // that read the row of one output
constexpr int kHyperThreads = kBlockOutputs * kOutputThreads, kHyperWarps = kHyperThreads / kWarp;
constexpr int kBatchLoads = 5;  // of a thread, in each of two batches: a row of 10240 is under way at once
constexpr int kBatchElements = kBatchLoads * kOutputThreads * 8;
constexpr int kMixDepth = 5;  // blocks of 64 in a batch of the mix: its usual rows of 320 whole

struct HyperRow {
  const bf16* stack;        // [kStreams, n]
  const float* norm;        // [kStreams, n]
  const bf16* down;         // [lowrank, kStreams * n]
  const bf16* inject;       // [kStreams, kStreams * n], or null
  const bf16* up;           // [kStreams * n, lowrank]
  bf16* low;                // [lowrank]
  AnyRows logits;           // [kStreams]
  bf16* out;                // [n]
  int n, lowrank, outputs;  // outputs: lowrank, and kStreams with inject
  float eps;
  Rounding rounding;
};

// The norm of the stack by every block for itself: the sums that rms_norm has of a Team of kRowThreads, whose threads
// are dealt over those of the block. The weights that a thread reads are under way once it is made.
class StackNorm {
 public:
  __device__ explicit StackNorm(const HyperRow& a) : a_(a) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (exists(i)) load_whole(a.norm + at(i), weights_[i]);
  }

  // Has the stack under way, too.
  __device__ void load_stack() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (exists(i)) x_[i] = *reinterpret_cast<const uint4*>(a_.stack + at(i));
  }

  // Into shared memory, in pairs. All threads of the block call, and wait before they read.
  __device__ void finish(uint4* normed) {
    __shared__ float parts[kStreams * kTeamWarps];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (member(i) >= kMembers) continue;
      float sum = 0;
      if (exists(i)) {
        const Vector<8> x = widened(i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(x[j], x[j], sum);
      }
      sum = warp_sum(sum);
      if (threadIdx.x % kWarp == 0) parts[member(i) / kWarp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!exists(i)) continue;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kTeamWarps; ++w) total += parts[stream(i) * kTeamWarps + w];
      const float scale = 1.0f / sqrtf(total / static_cast<float>(a_.n) + a_.eps);
      Vector<8> x = widened(i);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = x[j] * scale * (1.0f + weights_[i][j]);
      normed[at(i) / 8] = in_pairs(words_of(x));
    }
  }

 private:
  static constexpr int kTeamWarps = kRowThreads / kWarp, kMembers = kStreams * kRowThreads;
  static constexpr int kPieces = (kMembers + kHyperThreads - 1) / kHyperThreads;

  // The thread of all teams whose part is this thread's i-th.
  __device__ static int member(int i) {
    return static_cast<int>(threadIdx.x) + i * kHyperThreads;
  }
  __device__ static int stream(int i) {
    return member(i) / kRowThreads;
  }
  __device__ static int column(int i) {
    return member(i) % kRowThreads * 8;
  }
  __device__ bool exists(int i) const {
    return member(i) < kMembers && column(i) < a_.n;
  }
  __device__ int at(int i) const {
    return stream(i) * a_.n + column(i);
  }
  __device__ Vector<8> widened(int i) const {
    Vector<8> v;
    widen_words(x_[i], v);
    return v;
  }

  const HyperRow& a_;
  uint4 x_[kPieces];
  Vector<8> weights_[kPieces];
};

// The outputs low = scaled_silu(down normed) and logits = inject normed: kOutputThreads read the row of one into shared
// memory, where a warp adds it up. Bound by latency: of reading, then of a row's chains of additions.
class Outputs {
 public:
  __device__ explicit Outputs(const HyperRow& a) : a_(a), width_(kStreams * a.n) { load_first(); }

  // normed: in pairs, with zeros up to the next multiple of 64; rows: shared memory for kBlockOutputs batches. All
  // threads of the block call.
  __device__ void finish(const uint4* normed, uint4* rows) {
    while (first_ < a_.outputs) {
      float sum = 0;
      for (int begin = 0; begin < width_; begin += 2 * kBatchElements) {
        add(batches_[0], begin, normed, rows, sum);
        if (begin + kBatchElements < width_) add(batches_[1], begin + kBatchElements, normed, rows, sum);
      }
      if (warp() < kBlockOutputs && first_ + warp() < a_.outputs) {
        sum = warp_sum(sum);
        if (threadIdx.x % kWarp == 0) store(first_ + warp(), sum);
      }
      first_ += static_cast<int>(gridDim.x) * kBlockOutputs;
      if (first_ < a_.outputs) load_first();
    }
  }

 private:
  using Batch = uint4[kBatchLoads];

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int reader() { return static_cast<int>(threadIdx.x) / kOutputThreads; }

  __device__ void load_first() {
    const int64_t output = min(first_ + reader(), a_.outputs - 1);
    w_ = output < a_.lowrank ? a_.down + output * width_ : a_.inject + (output - a_.lowrank) * width_;
    load(batches_[0], 0);
    load(batches_[1], kBatchElements);
  }
  __device__ void load(Batch& batch, int begin) {
#pragma unroll
    for (int u = 0; u < kBatchLoads; ++u) {
      const int at = begin + piece(u) * 8;
      batch[u] = at < width_ ? *reinterpret_cast<const uint4*>(w_ + at) : uint4{0, 0, 0, 0};
    }
  }
  __device__ static int piece(int u) {
    return u * kOutputThreads + static_cast<int>(threadIdx.x) % kOutputThreads;
  }

  __device__ void add(Batch& batch, int begin, const uint4* normed, uint4* rows, float& sum) {
    __syncthreads();  // what the rows held has been added
#pragma unroll
    for (int u = 0; u < kBatchLoads; ++u) rows[reader() * (kBatchElements / 8) + piece(u)] = in_pairs(batch[u]);
    load(batch, begin + 2 * kBatchElements);
    __syncthreads();
    if (warp() >= kBlockOutputs) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const auto* x = reinterpret_cast<const uint32_t*>(normed) + begin / 2 + lane;
    const auto* row = reinterpret_cast<const uint32_t*>(rows + warp() * (kBatchElements / 8)) + lane;
    const int count = min(width_ - begin, kBatchElements);
#pragma unroll 16
    for (int block = 0; block < count; block += static_cast<int>(kCanonicalBlock))
      sum = add_pair(x[block / 2], row[block / 2], sum);
  }

  __device__ void store(int output, float sum) const {
    if (output < a_.lowrank) {
      const float low = widen(round_to_bf16(sum));
      store_float(a_.low + output, silu(rnd<bf16>(low * (1.0f / kStreams), a_.rounding)));
    } else if (a_.logits.is_bf16) {
      store_float(const_cast<bf16*>(a_.logits.bf16_row(0)) + output - a_.lowrank, sum);
    } else {
      store_float(const_cast<float*>(a_.logits.float_row(0)) + output - a_.lowrank, sum);
    }
  }

  const HyperRow& a_;
  int width_, first_ = static_cast<int>(blockIdx.x) * kBlockOutputs;
  const bf16* w_ = nullptr;
  Batch batches_[2];
};

// Element i of a row that is kept in pairs.
__device__ inline float element_in_pairs(const bf16* x, int i) {
  return widen(x[i / 8 * 8 + i % 4 * 2 + i / 4 % 2]);
}

// normed = rms_norm(stack); the outputs of it; out[j] = mean over streams c of sigmoid(up[c n + j] low) normed[c n +
// j], by a warp for each j, eight lanes for each c, and `turns` j of each warp. All blocks wait for low, and read their
// part of up meanwhile. Grid: at most what is resident at once. Shared memory: normed, then a batch of each output's
// row, in pairs; in the place of those, later, low.
__global__ void __launch_bounds__(kHyperThreads) hyper_row_kernel(const __grid_constant__ HyperRow a, int turns) {
  extern __shared__ uint4 shared[];
  const int width = kStreams * a.n, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int padded = static_cast<int>(staged_row_bytes<bf16>(width) / 16);
  StackNorm norm(a);
  Outputs outputs(a);
  after_previous();
  norm.load_stack();
  for (int i = width / 8 + static_cast<int>(threadIdx.x); i < padded; i += kHyperThreads) shared[i] = {0, 0, 0, 0};
  norm.finish(shared);

  const int stream = lane / kRowLanes;
  const int first = static_cast<int>(blockIdx.x) * kHyperWarps * turns + static_cast<int>(threadIdx.x) / kWarp;
  RowSums<1, kMixDepth, bf16, bf16> gates(
      {.w = {a.up}, .rows = width, .first = stream * a.n + first, .step = kHyperWarps, .turns = turns}, a.lowrank);
  outputs.finish(shared, shared + padded);
  cooperative_groups::this_grid().sync();

  auto* low = reinterpret_cast<bf16*>(shared + padded);
  stage_row(a.low, a.lowrank, low);
  gates.finish(low, [&](int row, const float(&sums)[1]) {
    const float gate = rnd<bf16>(sigmoid(widen(round_to_bf16(sums[0]))), a.rounding);
    const int j = row - stream * a.n, element = min(row, width - 1);
    const float part = rnd<bf16>(gate * element_in_pairs(reinterpret_cast<const bf16*>(shared), element), a.rounding);
    float total = 0;
#pragma unroll
    for (int c = 0; c < kStreams; ++c) total += __shfl_sync(kAllLanes, part, c * kRowLanes);
    if (j < a.n && lane == 0) store_float(a.out + j, total * (1.0f / kStreams));
  });
}

bool is_one_bf16_row(const HyperReadArgs& a) {
  const int64_t n = a.out.dim(1), lowrank = a.down.dim(0);
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data()) % 16 == 0; };
  // Shorter streams are normed by warps, and of longer ones a thread of the team has several pieces.
  const bool one_piece = n > kWarpColumns && n <= kRowThreads * 8;
  return a.stack.dim(0) == 1 && a.stack.dtype() == DType::bf16 && a.down.dtype() == DType::bf16 &&
         a.streams == kStreams && one_piece && n % 8 == 0 && lowrank % 8 == 0 && lowrank <= kBatchElements &&
         aligned(a.stack) && aligned(a.norm) && aligned(a.down) && aligned(a.up) && (!a.inject || aligned(a.inject));
}

void read_one_row(const HyperReadArgs& a, const HyperReadScratch& scratch, int multiprocessors, const Queue& queue) {
  const auto n = static_cast<int>(a.out.dim(1)), lowrank = static_cast<int>(a.down.dim(0));
  const int outputs = lowrank + (a.inject ? kStreams : 0);
  const unsigned grid = std::min(blocks_for(outputs, kBlockOutputs), static_cast<unsigned>(multiprocessors));
  const HyperRow row{.stack = data_of<const bf16>(a.stack),
                     .norm = data_of<const float>(a.norm),
                     .down = data_of<const bf16>(a.down),
                     .inject = data_of<const bf16>(a.inject),
                     .up = data_of<const bf16>(a.up),
                     .low = data_of<bf16>(scratch.down),
                     .logits = a.inject ? any_rows_of(a.logits) : AnyRows{},
                     .out = data_of<bf16>(a.out),
                     .n = n,
                     .lowrank = lowrank,
                     .outputs = outputs,
                     .eps = a.eps,
                     .rounding = a.rounding};
  launch_with({.early = queue.starts_early, .together = true}, hyper_row_kernel, grid, kHyperThreads,
              staged_row_bytes<bf16>(kStreams * n) + int64_t{kBlockOutputs} * kBatchElements * 2, queue, row,
              static_cast<int>(blocks_for(n, int64_t{grid} * kHyperWarps)));
}

}  // namespace

int64_t CudaOps::scratch_bytes(const HyperReadArgs& a) const {
  Arena arena;
  HyperReadScratch(arena, a, nested_scratch_bytes(a, [this](const auto& part) { return scratch_bytes(part); }));
  return arena.peak_bytes();
}

void CudaOps::execute(const HyperReadArgs& a) {
  if (a.stack.dim(0) == 0) return;
  Arena arena = scratch_arena();
  const int64_t nested = nested_scratch_bytes(a, [this](const auto& part) { return scratch_bytes(part); });
  const HyperReadScratch scratch(arena, a, nested);
  if (!is_one_bf16_row(a)) return for_each_part(a, scratch, [this](const auto& part) { execute(part); });
  read_one_row(a, scratch, caps_.multiprocessors, stream_);
}

}  // namespace offload::cuda
