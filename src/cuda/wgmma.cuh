// Matrix instructions of a warpgroup (four warps, 128 threads) and what they need: Hopper's own, from sm_90a code
// alone. D [64, N] += A [64, 16] x B [16, N] of BF16 with FP32 sums, both operands in shared memory, each row of 64
// elements along k in 128 bytes that are shuffled as tile_offset() (gemm.cuh) does.
//
// Thread t of the warpgroup holds of D: d[4 j], d[4 j + 1]: row 16 (t / 32) + t % 32 / 4, columns 8 j + 2 (t % 4) and
// the next; d[4 j + 2], d[4 j + 3]: the row 8 further on. Everywhere else the functions trap.
#ifndef OFFLOAD_CUDA_WGMMA_CUH_
#define OFFLOAD_CUDA_WGMMA_CUH_

#include <cstdint>

namespace offload::cuda {

// How an instruction finds a tile: its address, groups of eight rows 1024 bytes apart, the shuffle of 128 bytes.
// REQUIRES: aligned to 1024 bytes.
__device__ inline uint64_t tile_descriptor(const void* tile) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
// The same 16 elements further along k.
inline constexpr uint64_t kDescriptorStep = 32 >> 4;

// Before the first instruction, and wherever the sums were touched otherwise.
__device__ inline void wgmma_fence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void wgmma_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most kPending committed groups are under way.
template <int kPending>
__device__ inline void wgmma_wait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
// Keeps the compiler from moving reads of the sums, or copies of them, across this point.
template <int kCount>
__device__ inline void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// What this thread stored to shared memory is seen by matrix instructions behind the next barrier.
__device__ inline void fence_for_wgmma() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Sixteen of the sums, as operands and by their places in the instruction's text.
#define OFL_SUMS(at)                                                                                                 \
  "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3]), "+f"(d[at + 4]), "+f"(d[at + 5]), "+f"(d[at + 6]), \
      "+f"(d[at + 7]), "+f"(d[at + 8]), "+f"(d[at + 9]), "+f"(d[at + 10]), "+f"(d[at + 11]), "+f"(d[at + 12]),       \
      "+f"(d[at + 13]), "+f"(d[at + 14]), "+f"(d[at + 15])
#define OFL_PLACES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define OFL_PLACES_16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OFL_PLACES_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define OFL_PLACES_48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OFL_PLACES_64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define OFL_PLACES_80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
__device__ inline void wgmma(float (&d)[32], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" OFL_PLACES_0 ", " OFL_PLACES_16
               "}, %32, %33, 1, 1, 1, 0, 0;"
               : OFL_SUMS(0), OFL_SUMS(16)
               : "l"(a), "l"(b));
#else
  __trap();
#endif
}
__device__ inline void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" OFL_PLACES_0 ", " OFL_PLACES_16
               ", " OFL_PLACES_32 ", " OFL_PLACES_48 "}, %64, %65, 1, 1, 1, 0, 0;"
               : OFL_SUMS(0), OFL_SUMS(16), OFL_SUMS(32), OFL_SUMS(48)
               : "l"(a), "l"(b));
#else
  __trap();
#endif
}
__device__ inline void wgmma(float (&d)[80], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {" OFL_PLACES_0 ", " OFL_PLACES_16
               ", " OFL_PLACES_32 ", " OFL_PLACES_48 ", " OFL_PLACES_64 "}, %80, %81, 1, 1, 1, 0, 0;"
               : OFL_SUMS(0), OFL_SUMS(16), OFL_SUMS(32), OFL_SUMS(48), OFL_SUMS(64)
               : "l"(a), "l"(b));
#else
  __trap();
#endif
}
__device__ inline void wgmma(float (&d)[96], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" OFL_PLACES_0 ", " OFL_PLACES_16
               ", " OFL_PLACES_32 ", " OFL_PLACES_48 ", " OFL_PLACES_64 ", " OFL_PLACES_80 "}, %96, %97, 1, 1, 1, 0, 0;"
               : OFL_SUMS(0), OFL_SUMS(16), OFL_SUMS(32), OFL_SUMS(48), OFL_SUMS(64), OFL_SUMS(80)
               : "l"(a), "l"(b));
#else
  __trap();
#endif
}
#undef OFL_PLACES_0
#undef OFL_PLACES_16
#undef OFL_PLACES_32
#undef OFL_PLACES_48
#undef OFL_PLACES_64
#undef OFL_PLACES_80
#undef OFL_SUMS

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_WGMMA_CUH_
