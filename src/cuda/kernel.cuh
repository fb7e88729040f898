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
#if __CUDA_ARCH__ >= 800
  uint16_t rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return {rounded};
#else
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
// Two in one word, `low` at the lower address.
__device__ inline uint32_t round_to_bf16_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return round_to_bf16(low).bits | static_cast<uint32_t>(round_to_bf16(high).bits) << 16;
#endif
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

// By the special function units: exp errs by up to 2 + 1.2 |x| ulps (as documented), and a small sigmoid by as much,
// relative. A NaN stays one.
__device__ inline float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// canonical_silu(t), with its bits for every t that is no NaN, in straight code: the compiler's own division branches
// for quotients and divisors at the ends of the range, and nothing else of the thread can then be under way. Here a
// quarter of both is divided, so that the divisor's reciprocal is a normal number; the quotient is corrected by its
// exact remainder. Where that would not do, near 0 and at infinity, the divisor is 2 or makes no difference. Compared
// for all 2^32 t on an H200 (2026-11-30).
__device__ inline float silu(float t) {
  const float x = fminf(fmaxf(-t, canonical::kExpMin), canonical::kExpMax);
  const float d = fmaf(canonical_exp_within(x), 0.25f, 0.25f), n = 0.25f * t;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  float q = n * r;
  q = fmaf(fmaf(-d, q, n), r, q);
  q = fmaf(fmaf(-d, q, n), r, q);
  constexpr uint32_t kLeast = 0x30800000u, kInfinity = 0x7f800000u;  // 2^-30
  return (__float_as_uint(t) & 0x7fffffffu) - kLeast < kInfinity - kLeast ? q : 0.5f * t;
}

// --- kernels that start early ---

// Waits for the stream's previous kernel and what it waited for, then lets the next one start. Before it a kernel may
// read what no kernel writes, such as weights, or what was written before the previous one; so that this is under way
// by then. All threads of a kernel that launch_early() launches call it, before they touch anything else.
__device__ inline void after_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
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

// Each value's sum over the block. REQUIRES: kThreads threads in the block, all calling; `shared` of kCount * kThreads
// / 32 floats.
template <int kThreads, int kCount>
__device__ inline void block_sums(float (&values)[kCount], float* shared) {
  constexpr int kWarps = kThreads / kWarp;
#pragma unroll
  for (float& value : values) value = warp_sum(value);
  if constexpr (kThreads == kWarp) return;
  __syncthreads();  // the last user of `shared` is done
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared[i * kWarps + threadIdx.x / kWarp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = 0;
    for (int warp = 0; warp < kWarps; ++warp) values[i] += shared[i * kWarps + warp];
  }
}
template <int kThreads>
__device__ inline float block_sum(float value, float* shared) {
  float values[1] = {value};
  block_sums<kThreads>(values, shared);
  return values[0];
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

// Lets blocks of the kernel have so much shared memory, which takes asking from 48 KiB on.
template <typename... Params>
void allow_shared_bytes(void (*kernel)(Params...), int64_t bytes) {
  if (bytes > (48 << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "asking for shared memory");
}

struct LaunchTraits {
  bool early = false;     // see launch_early()
  bool together = false;  // blocks wait for one another: all are resident at once, or the launch fails
};

// kernel<<<grid, block, shared, stream>>>(args...); an empty grid launches nothing. Throws Error{device}.
template <typename... Params, typename... Args>
void launch_with(LaunchTraits traits, void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes,
                 cudaStream_t stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared_bytes(kernel, shared_bytes);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (traits.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (traits.together) {
    cudaLaunchAttribute& together = attributes[config.numAttrs++];
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "launching a kernel");
}
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t stream,
            Args&&... args) {
  launch_with({}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

// launch() of a kernel that calls after_previous(): where the queue has it, its blocks start while the previous kernel
// still runs.
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes, const Queue& queue,
                  Args&&... args) {
  launch_with({.early = queue.starts_early}, kernel, grid, block, shared_bytes, queue, std::forward<Args>(args)...);
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_KERNEL_CUH_
