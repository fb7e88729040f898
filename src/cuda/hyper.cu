// hyper_read: two kernels for one BF16 row, else the ops that it is made of.
#include "core/op_parts.h"
#include "cuda/canonical.cuh"
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kStreams = 4;          // groups of kRowLanes in a warp
constexpr int kBlockOutputs = 3;     // a block for most multiprocessors of an H200
constexpr int kOutputThreads = 128;  // that read the row of one output
constexpr int kProductThreads = kBlockOutputs * kOutputThreads;
constexpr int kBatchLoads = 5;  // of a thread, in each of two batches: a row of 10240 is under way at once
constexpr int kBatchElements = kBatchLoads * kOutputThreads * 8;

struct HyperProducts {
  const bf16* stack;        // [kStreams, n]
  const float* norm;        // [kStreams, n]
  bf16* normed;             // [kStreams, n]
  const bf16* down;         // [lowrank, kStreams * n]
  const bf16* inject;       // [kStreams, kStreams * n], or null
  bf16* low;                // [lowrank]
  AnyRows logits;           // [kStreams]
  int n, lowrank, outputs;  // outputs: lowrank, and kStreams with inject
  float eps;
  Rounding rounding;
};

// The norm of the stack by every block for itself: the sums that rms_norm has of a Team of kRowThreads, whose threads
// are dealt over those of the block. What a thread reads is under way once it is made.
class StackNorm {
 public:
  __device__ explicit StackNorm(const HyperProducts& a) : a_(a) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (!exists(i)) continue;
      x_[i] = *reinterpret_cast<const uint4*>(a.stack + at(i));
      load_whole(a.norm + at(i), weights_[i]);
    }
  }

  // Into shared memory in pairs, and this block's part of all into a.normed. All threads of the block call.
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
      const uint4 rounded = words_of(x);
      normed[at(i) / 8] = in_pairs(rounded);
      if (at(i) / 8 % gridDim.x == blockIdx.x) *reinterpret_cast<uint4*>(a_.normed + at(i)) = rounded;
    }
  }

 private:
  static constexpr int kTeamWarps = kRowThreads / kWarp, kMembers = kStreams * kRowThreads;
  static constexpr int kPieces = (kMembers + kProductThreads - 1) / kProductThreads;

  // The thread of all teams whose part is this thread's i-th.
  __device__ static int member(int i) {
    return static_cast<int>(threadIdx.x) + i * kProductThreads;
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

  const HyperProducts& a_;
  uint4 x_[kPieces];
  Vector<8> weights_[kPieces];
};

// normed = rms_norm(stack), low = scaled_silu(down normed), logits = inject normed. kOutputThreads read the row of an
// output into shared memory, where one warp adds it up. Grid (outputs / kBlockOutputs). Shared memory: normed, then a
// batch of each output's row, all in pairs. Bound by latency: of reading, then of a row's chains of additions.
__global__ void __launch_bounds__(kProductThreads) hyper_products_kernel(const __grid_constant__ HyperProducts a) {
  extern __shared__ uint4 shared[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int width = kStreams * a.n, first = static_cast<int>(blockIdx.x) * kBlockOutputs;
  uint4* rows = shared + staged_row_bytes<bf16>(width) / 16;  // [kBlockOutputs][kBatchElements / 8]
  StackNorm norm(a);
  const int read = min(first + thread / kOutputThreads, a.outputs - 1);
  const bf16* w = read < a.lowrank ? a.down + int64_t{read} * width : a.inject + int64_t{read - a.lowrank} * width;
  using Batch = uint4[kBatchLoads];
  const auto load = [&](Batch& batch, int begin) {
#pragma unroll
    for (int u = 0; u < kBatchLoads; ++u) {
      const int at = begin + (u * kOutputThreads + thread % kOutputThreads) * 8;
      batch[u] = at < width ? *reinterpret_cast<const uint4*>(w + at) : uint4{0, 0, 0, 0};
    }
  };
  Batch batches[2];
  load(batches[0], 0);
  load(batches[1], kBatchElements);
  for (int piece = width / 8 + thread; piece < staged_row_bytes<bf16>(width) / 16; piece += kProductThreads)
    shared[piece] = {0, 0, 0, 0};
  norm.finish(shared);

  float sum = 0;
  const auto add = [&](Batch& batch, int begin) {
#pragma unroll
    for (int u = 0; u < kBatchLoads; ++u)
      rows[thread / kOutputThreads * (kBatchElements / 8) + u * kOutputThreads + thread % kOutputThreads] =
          in_pairs(batch[u]);
    __syncthreads();
    load(batch, begin + 2 * kBatchElements);
    const auto* x = reinterpret_cast<const uint32_t*>(shared) + begin / 2 + lane;
    const auto* row = reinterpret_cast<const uint32_t*>(rows + warp * (kBatchElements / 8)) + lane;
    const int count = warp < kBlockOutputs ? min(width - begin, kBatchElements) : 0;
#pragma unroll 8
    for (int block = 0; block < count; block += static_cast<int>(kCanonicalBlock))
      sum = add_pair(x[block / 2], row[block / 2], sum);
    __syncthreads();
  };
  for (int begin = 0; begin < width; begin += 2 * kBatchElements) {
    add(batches[0], begin);
    if (begin + kBatchElements < width) add(batches[1], begin + kBatchElements);
  }
  const int output = first + warp;
  if (warp >= kBlockOutputs || output >= a.outputs) return;
  sum = warp_sum(sum);
  if (lane != 0) return;
  if (output < a.lowrank) {
    const float low = widen(round_to_bf16(sum));
    store_float(a.low + output, canonical_silu(rnd<bf16>(low * (1.0f / kStreams), a.rounding)));
  } else {
    const int c = output - a.lowrank;
    if (a.logits.is_bf16)
      store_float(const_cast<bf16*>(a.logits.bf16_row(0)) + c, sum);
    else
      store_float(const_cast<float*>(a.logits.float_row(0)) + c, sum);
  }
}

struct HyperMix {
  const bf16* normed;  // [kStreams, n]
  const bf16* low;     // [lowrank]
  const bf16* up;      // [kStreams * n, lowrank]
  bf16* out;           // [n]
  int n, lowrank;
  Rounding rounding;
};

// out[j] = mean over streams c of sigmoid(up[c n + j] low) normed[c n + j]: a warp for each j, eight lanes for each c.
// Grid (n / warps of a block); shared memory: low. Bound by reading up.
__global__ void __launch_bounds__(kCanonicalThreads) hyper_mix_kernel(const HyperMix a) {
  extern __shared__ uint4 shared[];
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  const int c = static_cast<int>(threadIdx.x) % kWarp / kRowLanes;
  const int64_t column = int64_t{c} * a.n + min(j, a.n - 1);
  const int rows = kStreams * a.n;
  RowSums<1, 3, bf16, bf16> row({.w = {a.up}, .rows = rows, .first = static_cast<int>(column), .step = 0, .turns = 1},
                                a.lowrank);
  auto* staged = reinterpret_cast<bf16*>(shared);
  stage_row(a.low, a.lowrank, staged);
  float sum = 0;
  row.finish(staged, [&](int, const float(&sums)[1]) { sum = sums[0]; });
  const float gate = rnd<bf16>(sigmoid(widen(round_to_bf16(sum))), a.rounding);
  const float part = rnd<bf16>(gate * load_float(a.normed + column), a.rounding);
  float total = 0;
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) total += __shfl_sync(kAllLanes, part, stream * kRowLanes);
  if (j < a.n && threadIdx.x % kWarp == 0) store_float(a.out + j, total * (1.0f / kStreams));
}

bool is_one_bf16_row(const HyperReadArgs& a) {
  const int64_t n = a.out.dim(1), lowrank = a.down.dim(0);
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data()) % 16 == 0; };
  // Shorter streams are normed by warps, and of longer ones a thread of the team has several pieces.
  const bool one_piece = n > kWarpColumns && n <= kRowThreads * 8;
  return a.stack.dim(0) == 1 && a.stack.dtype() == DType::bf16 && a.down.dtype() == DType::bf16 &&
         a.streams == kStreams && one_piece && n % 8 == 0 && lowrank % 8 == 0 && aligned(a.stack) && aligned(a.norm) &&
         aligned(a.down) && aligned(a.up) && (!a.inject || aligned(a.inject)) &&
         staged_row_bytes<bf16>(lowrank) <= kStagedBytesMost;
}

void read_one_row(const HyperReadArgs& a, const HyperReadScratch& scratch, cudaStream_t stream) {
  const auto n = static_cast<int>(a.out.dim(1)), lowrank = static_cast<int>(a.down.dim(0));
  const int outputs = lowrank + (a.inject ? kStreams : 0);
  launch(hyper_products_kernel, blocks_for(outputs, kBlockOutputs), kProductThreads,
         staged_row_bytes<bf16>(kStreams * n) + kBlockOutputs * kBatchElements * 2, stream,
         HyperProducts{.stack = data_of<const bf16>(a.stack),
                       .norm = data_of<const float>(a.norm),
                       .normed = data_of<bf16>(scratch.normed),
                       .down = data_of<const bf16>(a.down),
                       .inject = data_of<const bf16>(a.inject),
                       .low = data_of<bf16>(scratch.down),
                       .logits = a.inject ? any_rows_of(a.logits) : AnyRows{},
                       .n = n,
                       .lowrank = lowrank,
                       .outputs = outputs,
                       .eps = a.eps,
                       .rounding = a.rounding});
  launch(hyper_mix_kernel, blocks_for(n, kCanonicalThreads / kWarp), kCanonicalThreads, staged_row_bytes<bf16>(lowrank),
         stream,
         HyperMix{.normed = data_of<const bf16>(scratch.normed),
                  .low = data_of<const bf16>(scratch.down),
                  .up = data_of<const bf16>(a.up),
                  .out = data_of<bf16>(a.out),
                  .n = n,
                  .lowrank = lowrank,
                  .rounding = a.rounding});
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
  read_one_row(a, scratch, stream_);
}

}  // namespace offload::cuda
