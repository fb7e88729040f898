// Matrix instructions of one warp, with their fragment layouts: D [16, 8] += A [16, 16] x B [16, 8].
//
// Lane l holds of A: rows l / 4 and l / 4 + 8, of B: column l / 4, of D: rows l / 4 (d[0], d[1]) and l / 4 + 8 (d[2],
// d[3]), columns 2 * (l % 4) and the next. Turing has no instruction of depth 16 for FP16 with FP32 sums; two of depth
// 8 take the same fragments.
#ifndef OFFLOAD_CUDA_MMA_CUH_
#define OFFLOAD_CUDA_MMA_CUH_

#include <cstdint>

namespace offload::cuda {

// BF16, FP32 sums. From sm_80 on; earlier it must not be reached.
__device__ inline void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

// FP16, FP32 sums, depth 8: a holds rows l / 4 and l / 4 + 8.
__device__ inline void mma_f16_1688(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Four 8 x 8 matrices of 16-bit elements; lane l names row l % 8 of matrix l / 8, 16 bytes in shared memory.
__device__ inline void ldmatrix_x4_at(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  ldmatrix_x4_at(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements that a warp holds, two neighbours of row l / 4 in lane l.
__device__ inline uint32_t transpose_8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Starts copying 16 bytes to shared memory, or zeros when !valid. From sm_80 on.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#else
  __trap();
#endif
}
__device__ inline void commit_async() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void wait_async() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_MMA_CUH_
