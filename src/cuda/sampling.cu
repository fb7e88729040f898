// argmax: the greedy choice.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

constexpr int kArgmaxThreads = 1024;

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

// ids[r] = the first of the largest of x[r]; -1 where it is not finite or a NaN is among them. One block for each row;
// bound by what one multiprocessor reads.
__global__ void __launch_bounds__(kArgmaxThreads) argmax_kernel(Rows<const float> x, int n, bool whole, int32_t* ids) {
  __shared__ Choice choices[kArgmaxThreads / kWarp];
  const float* row = x.at(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  Choice mine;
  const int fours = whole ? n / 4 : 0;
#pragma unroll 4
  for (int i = thread; i < fours; i += kArgmaxThreads) {
    const float4 four = reinterpret_cast<const float4*>(row)[i];
    mine.take(four.x, 4 * i), mine.take(four.y, 4 * i + 1), mine.take(four.z, 4 * i + 2), mine.take(four.w, 4 * i + 3);
  }
  for (int i = 4 * fours + thread; i < n; i += kArgmaxThreads) mine.take(row[i], i);
  mine = warp_choice(mine);
  if (lane == 0) choices[warp] = mine;
  __syncthreads();
  if (warp != 0) return;
  mine = warp_choice(choices[lane]);
  if (lane == 0) ids[blockIdx.x] = mine.nans > 0 || !isfinite(mine.value) ? -1 : mine.id;
}
static_assert(kArgmaxThreads / kWarp == kWarp);

}  // namespace

void CudaOps::execute(const ArgmaxArgs& a) {
  const int64_t n = a.x.dim(1);
  OFL_ASSERT(n <= INT32_MAX);
  launch(argmax_kernel, dim3(static_cast<unsigned>(a.x.dim(0))), kArgmaxThreads, 0, stream_, rows_of<const float>(a.x),
         static_cast<int>(n), reinterpret_cast<uintptr_t>(a.x.data()) % 16 == 0 && a.x.stride(0) % 4 == 0,
         a.ids.as<int32_t>());
}

}  // namespace offload::cuda
