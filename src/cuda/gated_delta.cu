// The gated delta rule, per value head with key head kappa, all in FP32:
//   M <- exp(g) M;  delta = beta (v - M^T k);  M <- M + k delta^T;  out = rnd!(M^T q)
//
// Two forms. The recurrence, for few rows: one kernel that reads and writes the state once (bound by that) and keeps it
// in registers over the rows. The chunked form, for prompts, see gated_delta_chunks.cuh: on matrix units where they
// take BF16, else on the FP32 units.
#include <algorithm>

#include "cuda/cuda_ops.h"
#include "cuda/gated_delta_fma.cuh"
#include "cuda/gated_delta_mma.cuh"

namespace offload::cuda {
namespace {

constexpr int kStepWarps = 8;
constexpr int kStepRows = 4 * kStepWarps;  // rows of the state that one thread's turn of a block covers

// Four columns of kRows rows, kStepRows apart, of a state with `stride` columns. Of the rows and columns the first
// `rows` and `columns` exist. Loads are plain: within the kernel the state is no constant.
template <int kRows, bool kVector>
__device__ void load_state(const float* state, int stride, int rows, int columns, float (&m)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float* from = state + int64_t{i} * kStepRows * stride;
    const int valid = i * kStepRows < rows ? columns : 0;
    if constexpr (kVector) {
      const float4 x = valid > 0 ? load4(from) : make_float4(0, 0, 0, 0);
      m[i][0] = x.x, m[i][1] = x.y, m[i][2] = x.z, m[i][3] = x.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) m[i][c] = c < valid ? from[c] : 0.0f;
    }
  }
}
template <int kRows, bool kVector>
__device__ void store_state(float* state, int stride, int rows, int columns, const float (&m)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float* to = state + int64_t{i} * kStepRows * stride;
    const int valid = i * kStepRows < rows ? columns : 0;
    if constexpr (kVector) {
      if (valid > 0) *reinterpret_cast<float4*>(to) = make_float4(m[i][0], m[i][1], m[i][2], m[i][3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (c < valid) to[c] = m[i][c];
    }
  }
}

// grid (slices of 32 value columns, heads). A thread has 4 columns of kRows rows of the state, those of number
// 4 warp + lane / 8 + 32 i. Two barriers a row: when q and k are there, and the sums over the state's rows. The output
// reads the updated state: M^T q + (k . q) delta.
template <typename T, int kRows, bool kVector>
__global__ void __launch_bounds__(kStepWarps* kWarp) delta_recurrence_kernel(const DeltaCall a) {
  after_previous();
  __shared__ float q[kRows * kStepRows], k[kRows * kStepRows], gates[2];
  __shared__ float4 sums[kStepWarps][2][8];
  const int head = static_cast<int>(blockIdx.y), key_head = head / (a.heads / a.key_heads);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int column = static_cast<int>(blockIdx.x) * kDeltaColumns + lane % 8 * 4, first = 4 * warp + lane / 8;
  const int columns = a.value_dim - column;  // from this thread's first on
  float* state = a.state + (int64_t{head} * a.key_dim + first) * a.value_dim + column;
  float m[kRows][4];
  load_state<kRows, kVector>(state, a.value_dim, a.key_dim - first, columns, m);
  for (int t = 0; t < a.rows; ++t) {
    const T* row = static_cast<const T*>(a.qkv) + t * a.qkv_row;
    if (warp == 0) normalise<kRows>(row + key_head * a.key_dim, a.key_dim, a.query_scale(), q);
    if (warp == 1) normalise<kRows>(row + (a.key_heads + key_head) * a.key_dim, a.key_dim, 1.0f, k);
    if (warp == 2 && lane == 0) {
      gates[0] = expf(log_decay<T>(a, t, head));
      gates[1] = write_strength<T>(a, t, head);
    }
    float v[4];
    load_piece<kVector>(row + 2 * a.key_heads * a.key_dim + head * a.value_dim + column, columns, v);
    __syncthreads();
    const float decay = gates[0], beta = gates[1];
    float keys[kRows], recalled[4] = {}, out[4] = {}, overlap = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      keys[i] = k[first + i * kStepRows];
      const float query = q[first + i * kStepRows];
      overlap = fmaf(k[lane + i * kStepRows], q[lane + i * kStepRows], overlap);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        m[i][c] *= decay;
        recalled[c] = fmaf(m[i][c], keys[i], recalled[c]);
        out[c] = fmaf(m[i][c], query, out[c]);
      }
    }
    overlap = warp_sum(overlap);
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int width = 8; width < kWarp; width *= 2) {
        recalled[c] += __shfl_xor_sync(kAllLanes, recalled[c], width);
        out[c] += __shfl_xor_sync(kAllLanes, out[c], width);
      }
    if (lane < 8) {
      sums[warp][0][lane] = make_float4(recalled[0], recalled[1], recalled[2], recalled[3]);
      sums[warp][1][lane] = make_float4(out[0], out[1], out[2], out[3]);
    }
    __syncthreads();
    float4 recall = make_float4(0, 0, 0, 0), read = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
      const float4 x = sums[w][0][lane % 8], y = sums[w][1][lane % 8];
      recall.x += x.x, recall.y += x.y, recall.z += x.z, recall.w += x.w;
      read.x += y.x, read.y += y.y, read.z += y.z, read.w += y.w;
    }
    const float delta[4] = {beta * (v[0] - recall.x), beta * (v[1] - recall.y), beta * (v[2] - recall.z),
                            beta * (v[3] - recall.w)};
    const float before[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) m[i][c] = fmaf(keys[i], delta[c], m[i][c]);
    if (threadIdx.x >= 8) continue;
    T* to = static_cast<T*>(a.out) + t * a.out_row + head * a.value_dim + column;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (c < columns) store_float(to + c, fmaf(overlap, delta[c], before[c]));
  }
  store_state<kRows, kVector>(state, a.value_dim, a.key_dim - first, columns, m);
}

DeltaCall call_of(const GatedDeltaArgs& a) {
  DeltaCall call;
  call.qkv = a.qkv.data(), call.a = a.a.data(), call.b = a.b.data(), call.out = a.out.data();
  call.a_log = data_of<const float>(a.a_log), call.dt_bias = data_of<const float>(a.dt_bias);
  call.state = data_of<float>(a.state);
  call.qkv_row = a.qkv.stride(0), call.a_row = a.a.stride(0), call.b_row = a.b.stride(0);
  call.out_row = a.out.stride(0);
  call.rows = static_cast<int32_t>(a.qkv.dim(0)), call.key_heads = static_cast<int32_t>(a.key_heads);
  call.heads = static_cast<int32_t>(a.state.dim(0)), call.key_dim = static_cast<int32_t>(a.state.dim(1));
  call.value_dim = static_cast<int32_t>(a.state.dim(2));
  call.rounding = a.rounding;
  return call;
}

template <typename T, bool kVector>
void run_recurrence(const DeltaCall& call, const Queue& queue) {
  OFL_ASSERT(call.key_dim <= 16 * kStepRows);  // the state of 32 columns lies in the registers of one block
  const auto kernel =
      call.key_dim <= 4 * kStepRows ? delta_recurrence_kernel<T, 4, kVector> : delta_recurrence_kernel<T, 16, kVector>;
  const dim3 grid(blocks_for(call.value_dim, kDeltaColumns), static_cast<unsigned>(call.heads));
  launch_early(kernel, grid, dim3(kStepWarps * kWarp), 0, queue, call);
}

// Whether the chunked form runs. The forms are equal; for a few rows the recurrence takes less time.
bool in_chunks(const GatedDeltaArgs& a) {
  return a.chunk_rows > 0 && a.qkv.dim(0) > kCanonicalRowsMax && a.state.dim(1) <= kKeyDims;
}

// The two kernels of the chunked form, each with its threads and shared memory.
struct ChunkKernels {
  struct Kernel {
    void (*function)(DeltaCall, DeltaSegment);
    int threads;
    int64_t shared_bytes;
  };
  Kernel prepare, pass;
  int64_t columns;  // of a block of `pass`
  int64_t product_bytes;
  int64_t segment_chunks;  // at most
};

// Chunks of one launch: the longer the segment the fewer launches, for more scratch. 8,192 rows of 16 key heads and 48
// heads take 1,426 / 1,118 / 1,048 / 1,008 us in segments of 8 / 16 / 32 / 64 chunks on BF16 matrix units, of which the
// second kernel is three quarters, and 3,328 / 3,196 / 3,103 us of 8 / 16 / 32 in FMAs (one H200, medians of 9,
// 2026-11-30). 32 chunks and 48 heads are 40 MiB of scratch. To prepare a segment on another stream beside the one in
// front gained nothing: it takes the other's room.
template <typename T, bool kVector>
ChunkKernels fma_kernels() {
  return {{delta_prepare_kernel<T, kVector>, kPrepareThreads, 0},
          {delta_chunks_kernel<T, kVector>, kChunkThreads, sizeof(DeltaChunksShared)},
          kDeltaColumns,
          kFmaProductBytes,
          16};
}
template <bool kVector>
ChunkKernels mma_kernels() {
  return {{delta_mma_prepare_kernel<kVector>, kMmaPrepareThreads, sizeof(DeltaMmaPrepareShared)},
          {delta_mma_kernel<kVector>, kDeltaMmaThreads, sizeof(DeltaMmaShared)},
          kMmaColumns,
          kMmaProductBytes,
          32};
}
ChunkKernels kernels_of(const GatedDeltaArgs& a, const DeviceCaps& caps, bool vectors) {
  if (a.qkv.dtype() == DType::f32) return vectors ? fma_kernels<float, true>() : fma_kernels<float, false>();
  if (!caps.has_bf16_mma()) return vectors ? fma_kernels<bf16, true>() : fma_kernels<bf16, false>();
  return vectors && in_vectors(a.out) ? mma_kernels<true>() : mma_kernels<false>();
}
bool keys_in_vectors(const GatedDeltaArgs& a) {
  return in_vectors(a.qkv) && in_vectors(a.state) && a.state.dim(1) % 8 == 0;
}

struct DeltaScratch {
  int64_t chunk, segment;    // rows
  Tensor products, factors;  // of a segment

  DeltaScratch(Arena& arena, const GatedDeltaArgs& a, const ChunkKernels& kernels) {
    const int64_t heads = a.state.dim(0);
    chunk = std::min<int64_t>(a.chunk_rows, kDeltaChunk);
    const int64_t chunks = std::min(kernels.segment_chunks, (a.qkv.dim(0) + chunk - 1) / chunk);
    segment = chunks * chunk;
    products = arena.take(DType::u8, {chunks * heads * kernels.product_bytes});
    factors = arena.take(DType::f32, {chunks * heads * kDeltaFactors * kDeltaChunk});
  }
};

void run_chunks(const DeltaCall& call, const ChunkKernels& kernels, const DeltaScratch& scratch, cudaStream_t stream) {
  DeltaSegment segment;
  segment.chunk = static_cast<int32_t>(scratch.chunk);
  segment.product_bytes = static_cast<int32_t>(kernels.product_bytes);
  segment.products = scratch.products.as<char>(), segment.factors = scratch.factors.as<float>();
  const auto run = [&](const ChunkKernels::Kernel& kernel, int64_t columns, int heads) {
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(heads));
    launch(kernel.function, grid, dim3(static_cast<unsigned>(kernel.threads)), kernel.shared_bytes, stream, call,
           segment);
  };
  for (int64_t first = 0; first < call.rows; first += scratch.segment) {
    segment.first = static_cast<int32_t>(first);
    segment.end = static_cast<int32_t>(std::min<int64_t>(first + scratch.segment, call.rows));
    run(kernels.prepare, blocks_for(segment.end - segment.first, scratch.chunk), call.key_heads);
    run(kernels.pass, blocks_for(call.value_dim, kernels.columns), call.heads);
  }
}

}  // namespace

int64_t CudaOps::scratch_bytes(const GatedDeltaArgs& a) const {
  if (!in_chunks(a)) return 0;
  Arena arena;
  DeltaScratch(arena, a, kernels_of(a, caps_, keys_in_vectors(a)));
  return arena.peak_bytes();
}

void CudaOps::execute(const GatedDeltaArgs& a) {
  if (a.qkv.dim(0) == 0 || a.state.elements() == 0) return;
  OFL_ASSERT(a.a.dtype() == a.qkv.dtype() && a.b.dtype() == a.qkv.dtype());
  const bool vectors = keys_in_vectors(a);
  const DeltaCall call = call_of(a);
  if (in_chunks(a)) {
    const ChunkKernels kernels = kernels_of(a, caps_, vectors);
    Arena arena = scratch_arena();
    run_chunks(call, kernels, DeltaScratch(arena, a, kernels), stream_);
    return;
  }
  with_float_type(a.qkv.dtype(), [&](auto element) {
    using T = decltype(element);
    vectors ? run_recurrence<T, true>(call, stream_) : run_recurrence<T, false>(call, stream_);
  });
}

}  // namespace offload::cuda
