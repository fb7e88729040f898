// Matrix instructions of one warp, d += a b with FP32 sums.
//
// Lane l holds, with g = l / 4 and t = l % 4, of a row g (even words) and row g + 8 (odd words), of b column g; k = 2 t
// and the next in one word, k + 8 and k + 9 in the second word of b and the third and fourth of a. Of d it holds rows g
// (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2 t and the next.
#ifndef OFFLOAD_CUDA_MMA_CUH_
#define OFFLOAD_CUDA_MMA_CUH_

#include <cstdint>

namespace offload::cuda {

// BF16, depth 16. From sm_80 on; earlier it must not be reached.
__device__ inline void mma_bf16_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  __trap();
#endif
}

// FP16, depth 8.
__device__ inline void mma_f16_1688(float (&d)[4], const uint32_t (&a)[2], const uint32_t& b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_MMA_CUH_
