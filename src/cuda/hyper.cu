// hyper_read: three kernels for one BF16 row, else the ops that it is made of.
#include "core/op_parts.h"
#include "cuda/canonical.cuh"
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kProductWarps = 2;   // of a block; an output each
constexpr int kProductLoads = 20;  // of a lane under way: there are few warps

struct HyperProducts {
  const bf16* normed;           // [width]
  const bf16* down;             // [lowrank, width]
  const bf16* inject;           // [streams, width], or null
  bf16* low;                    // [lowrank]
  AnyRows logits;               // [streams]
  int width, lowrank, outputs;  // outputs: lowrank, and streams with inject
  float scale;                  // 1 / streams
  Rounding rounding;
};

// low = scaled_silu(down normed), logits = inject normed. A warp for each; grid (outputs / kProductWarps). Shared
// memory: normed, then kNarrowWarpBytes each warp. Bound by reading down.
__global__ void __launch_bounds__(kProductWarps* kWarp) hyper_products_kernel(const HyperProducts a) {
  extern __shared__ uint4 shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int output = min(static_cast<int>(blockIdx.x) * kProductWarps + warp, a.outputs - 1);
  const bool is_low = output < a.lowrank;
  const bf16* w = is_low ? a.down + int64_t{output} * a.width : a.inject + int64_t{output - a.lowrank} * a.width;
  auto* staged = reinterpret_cast<bf16*>(shared);
  bf16* own = staged + staged_row_bytes<bf16>(a.width) / 2 + warp * kNarrowRound<kProductLoads>;
  const float sum =
      narrow_sum<kProductLoads>(w, a.width, staged, own, [&] { stage_narrow_row(a.normed, a.width, staged); });
  if (threadIdx.x % kWarp != 0) return;
  if (is_low) {
    const float low = widen(round_to_bf16(sum));
    store_float(a.low + output, canonical_silu(rnd<bf16>(low * a.scale, a.rounding)));
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

constexpr int kMixStreams = 4;  // groups of kRowLanes in a warp

// out[j] = mean over streams c of sigmoid(up[c n + j] low) normed[c n + j]: a warp for each j, eight lanes for each c.
// Grid (n / warps of a block); shared memory: low. Bound by reading up.
__global__ void __launch_bounds__(kCanonicalThreads) hyper_mix_kernel(const HyperMix a) {
  extern __shared__ uint4 shared[];
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  const int c = static_cast<int>(threadIdx.x) % kWarp / kRowLanes;
  const int64_t column = int64_t{c} * a.n + min(j, a.n - 1);
  const bf16* ws[1] = {a.up + column * a.lowrank};
  RowSums<1, 3, bf16, bf16> row(ws, a.lowrank);
  auto* staged = reinterpret_cast<bf16*>(shared);
  stage_row(a.low, a.lowrank, staged);
  float sums[1];
  row.finish(staged, sums);
  const float gate = rnd<bf16>(sigmoid(widen(round_to_bf16(sums[0]))), a.rounding);
  const float part = rnd<bf16>(gate * load_float(a.normed + column), a.rounding);
  float total = 0;
#pragma unroll
  for (int stream = 0; stream < kMixStreams; ++stream) total += __shfl_sync(kAllLanes, part, stream * kRowLanes);
  if (j < a.n && threadIdx.x % kWarp == 0) store_float(a.out + j, total * (1.0f / kMixStreams));
}

bool is_one_bf16_row(const HyperReadArgs& a) {
  const int64_t width = a.stack.dim(1), lowrank = a.down.dim(0);
  const auto aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data()) % 16 == 0; };
  return a.stack.dim(0) == 1 && a.stack.dtype() == DType::bf16 && a.down.dtype() == DType::bf16 &&
         a.streams == kMixStreams && width % 8 == 0 && lowrank % 8 == 0 && aligned(a.down) && aligned(a.up) &&
         (!a.inject || aligned(a.inject)) && staged_row_bytes<bf16>(width) <= kStagedBytesMost &&
         staged_row_bytes<bf16>(lowrank) <= kStagedBytesMost;
}

void read_one_row(const HyperReadArgs& a, const HyperReadScratch& scratch, cudaStream_t stream) {
  const auto width = static_cast<int>(a.stack.dim(1)), lowrank = static_cast<int>(a.down.dim(0));
  const auto n = static_cast<int>(a.out.dim(1)), outputs = lowrank + (a.inject ? kMixStreams : 0);
  launch(hyper_products_kernel, blocks_for(outputs, kProductWarps), kProductWarps * kWarp,
         staged_row_bytes<bf16>(width) + kProductWarps * kNarrowWarpBytes<kProductLoads>, stream,
         HyperProducts{.normed = data_of<const bf16>(scratch.normed),
                       .down = data_of<const bf16>(a.down),
                       .inject = data_of<const bf16>(a.inject),
                       .low = data_of<bf16>(scratch.down),
                       .logits = a.inject ? any_rows_of(a.logits) : AnyRows{},
                       .width = width,
                       .lowrank = lowrank,
                       .outputs = outputs,
                       .scale = 1.0f / kMixStreams,
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
  execute(norm_part(a, scratch));
  read_one_row(a, scratch, stream_);
}

}  // namespace offload::cuda
