// argmax: the greedy choice.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxParts = 64;  // of a row, a block each

struct Choice {
  float value = -INFINITY;
  int id = 0x7fffffff;
  int nans = 0;

  __device__ void take(float other, int other_id) {
    nans += other != other;
    if (other > value || (other == value && other_id < id)) value = other, id = other_id;
  }
  __device__ void merge(const Choice& other) {
    take(other.value, other.id);
    nans += other.nans;
  }
};

__device__ Choice warp_choice(Choice mine) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    Choice other;
    other.value = __shfl_xor_sync(kAllLanes, mine.value, lanes);
    other.id = __shfl_xor_sync(kAllLanes, mine.id, lanes);
    other.nans = __shfl_xor_sync(kAllLanes, mine.nans, lanes);
    mine.merge(other);
  }
  return mine;
}

// The choice of a block's threads, on thread 0.
__device__ Choice block_choice(Choice mine) {
  __shared__ Choice choices[kArgmaxThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  mine = warp_choice(mine);
  if (lane == 0) choices[warp] = mine;
  __syncthreads();
  if (warp != 0) return mine;
  return warp_choice(lane < kArgmaxThreads / kWarp ? choices[lane] : Choice{});
}

// parts[r][p] = the choice among part p of x[r]. Grid (kArgmaxParts, rows); bound by reading x.
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_parts_kernel(Rows<const float> x, int n, bool whole, Choice* parts) {
  const float* row = x.at(blockIdx.y);
  const int begin = static_cast<int>(blockIdx.x * kArgmaxThreads + threadIdx.x), step = kArgmaxParts * kArgmaxThreads;
  Choice mine;
  const int fours = whole ? n / 4 : 0;
#pragma unroll 4
  for (int i = begin; i < fours; i += step) {
    const float4 four = reinterpret_cast<const float4*>(row)[i];
    mine.take(four.x, 4 * i), mine.take(four.y, 4 * i + 1), mine.take(four.z, 4 * i + 2), mine.take(four.w, 4 * i + 3);
  }
  for (int i = 4 * fours + begin; i < n; i += step) mine.take(row[i], i);
  mine = block_choice(mine);
  if (threadIdx.x == 0) parts[blockIdx.y * kArgmaxParts + blockIdx.x] = mine;
}

// ids[r] = the first of the largest of x[r]; -1 where it is not finite or a NaN is among them. One warp for each row.
__global__ void __launch_bounds__(kWarp) argmax_kernel(const Choice* parts, int32_t* ids) {
  Choice mine;
  for (int part = static_cast<int>(threadIdx.x); part < kArgmaxParts; part += kWarp)
    mine.merge(parts[blockIdx.x * kArgmaxParts + part]);
  mine = warp_choice(mine);
  if (threadIdx.x == 0) ids[blockIdx.x] = mine.nans > 0 || !isfinite(mine.value) ? -1 : mine.id;
}

// The parts of so many rows.
Tensor take_parts(Arena& arena, int64_t rows) {
  return arena.take(DType::u8, {rows * kArgmaxParts, static_cast<int64_t>(sizeof(Choice))});
}

}  // namespace

int64_t CudaOps::scratch_bytes(const ArgmaxArgs& a) const {
  Arena arena;
  take_parts(arena, a.x.dim(0));
  return arena.peak_bytes();
}

void CudaOps::execute(const ArgmaxArgs& a) {
  const int64_t rows = a.x.dim(0), n = a.x.dim(1);
  if (rows == 0) return;
  OFL_ASSERT(n <= INT32_MAX - 4 * kArgmaxParts * kArgmaxThreads && rows <= 65535);
  Arena arena = scratch_arena();
  auto* parts = static_cast<Choice*>(take_parts(arena, rows).data());
  launch(argmax_parts_kernel, dim3(kArgmaxParts, static_cast<unsigned>(rows)), kArgmaxThreads, 0, stream_,
         rows_of<const float>(a.x), static_cast<int>(n),
         reinterpret_cast<uintptr_t>(a.x.data()) % 16 == 0 && a.x.stride(0) % 4 == 0, parts);
  launch(argmax_kernel, static_cast<unsigned>(rows), kWarp, 0, stream_, static_cast<const Choice*>(parts),
         a.ids.as<int32_t>());
}

}  // namespace offload::cuda
