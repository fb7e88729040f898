// What the kernels share: element access by dtype, rounding points, sums over a block in a fixed order, launching.
//
// Device code here never reduces by atomics: sums have one order, given by the shapes and the block size alone.
#ifndef OFFLOAD_CUDA_KERNEL_CUH_
#define OFFLOAD_CUDA_KERNEL_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "core/canonical.h"
#include "core/dtype.h"
#include "core/ops.h"
#include "cuda/device.h"

namespace offload::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// --- overlap with the kernel in front (programmatic dependent launch, sm_90 and newer; else nothing) ---

// First statement of a kernel: once all blocks in front have come to theirs, blocks of the next kernel may start.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when all that was enqueued in front is done and its writes can be seen. A kernel started by
// launch_overlapped() touches nothing but weights before it.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void begin_overlapped() {
  let_next_start();
  wait_for_previous();
}

// --- elements ---

__device__ inline float load_float(const float* p) {
  return *p;
}
__device__ inline float widen(bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float load_float(const bf16* p) {
  return widen(*p);
}
// Nearest even; a NaN stays NaN.
__device__ inline bf16 round_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
__device__ inline void store_float(float* p, float value) {
  *p = value;
}
__device__ inline void store_float(bf16* p, float value) {
  *p = round_to_bf16(value);
}

// rnd of the op contracts: to A = T where the rounding is `reference`, nothing where it is fused or A is F32.
template <typename T>
__device__ inline float rnd(float value, Rounding rounding) {
  if constexpr (sizeof(T) == sizeof(bf16)) {
    if (rounding == Rounding::reference) return widen(round_to_bf16(value));
  }
  return value;
}

// A NaN stays NaN, which canonical_exp() does not see to.
__device__ inline float sigmoid(float x) {
  return x == x ? 1.0f / (1.0f + canonical_exp(-x)) : x;
}

// --- sums over a warp or a block; every thread gets the result ---

__device__ inline float warp_sum(float value) {
  for (int width = kWarp / 2; width > 0; width /= 2) value += __shfl_xor_sync(kAllLanes, value, width);
  return value;
}
__device__ inline float warp_max(float value) {
  for (int width = kWarp / 2; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, width));
  return value;
}

// REQUIRES: kThreads threads in the block, all calling; `shared` of kThreads / 32 floats.
template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if constexpr (kThreads == kWarp) return value;
  __syncthreads();  // the last user of `shared` is done
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) total += shared[i];
  return total;
}

// --- host side ---

// Calls function(T{}) with the C++ type of a float dtype.
template <typename Function>
void with_float_type(DType dtype, const Function& function) {
  if (dtype == DType::bf16)
    function(bf16{});
  else
    function(float{});
}

template <typename T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.data());
}

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  OFL_ASSERT(blocks >= 0 && blocks <= 0x7fffffff);
  return static_cast<unsigned>(blocks);
}

// kernel<<<grid, block, shared, stream>>>(args...); an empty grid launches nothing. Throws Error{device}.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t stream,
            Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > (48 << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "asking for shared memory");
  kernel<<<grid, block, static_cast<size_t>(shared_bytes), stream>>>(std::forward<Args>(args)...);
  check(cudaGetLastError(), "launching a kernel");
}

// The same for a kernel that calls wait_for_previous(), in every thread: where the stream allows it, it starts while
// the kernel in front still runs.
template <typename... Params, typename... Args>
void launch_overlapped(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes,
                       const LaunchStream& stream, Args&&... args) {
  if (!stream.overlaps) return launch(kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > (48 << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "asking for shared memory");
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "launching a kernel");
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_KERNEL_CUH_
