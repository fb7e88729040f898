// Pieces of rows: a few consecutive elements as FP32, by 16-byte loads where pointers and strides allow.
//
// Whether they allow is decided on the host by in_vectors(); the scalar path reads the same elements in the same places
// and stops at the row's end.
#ifndef OFFLOAD_CUDA_PIECES_CUH_
#define OFFLOAD_CUDA_PIECES_CUH_

#include "cuda/kernel.cuh"

namespace offload::cuda {

// Two BF16 numbers of one word, the lower address first.
__device__ inline void widen_pair(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

__device__ inline void load_vector(const float* p, float (&out)[4]) {
  const float4 x = __ldg(reinterpret_cast<const float4*>(p));
  out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
}
__device__ inline void load_vector(const bf16* p, float (&out)[4]) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(p));
  widen_pair(x.x, out[0], out[1]);
  widen_pair(x.y, out[2], out[3]);
}
__device__ inline void load_vector(const float* p, float (&out)[8]) {
  float low[4], high[4];
  load_vector(p, low);
  load_vector(p + 4, high);
  for (int i = 0; i < 4; ++i) out[i] = low[i], out[4 + i] = high[i];
}
__device__ inline void load_vector(const bf16* p, float (&out)[8]) {
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(p));
  widen_pair(x.x, out[0], out[1]);
  widen_pair(x.y, out[2], out[3]);
  widen_pair(x.z, out[4], out[5]);
  widen_pair(x.w, out[6], out[7]);
}

// kCount (4 or 8) consecutive elements; those from `valid` on are not read and give zeros. kVector REQUIRES
// in_vectors() of the tensor and p at a multiple of kCount elements of its row.
template <bool kVector, typename T, int kCount>
__device__ inline void load_piece(const T* p, int valid, float (&out)[kCount]) {
  if constexpr (kVector) {
    if (valid > 0) {
      load_vector(p, out);
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = 0;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = i < valid ? load_float(p + i) : 0.0f;
  }
}

// Whether every row of the tensor begins at 16 bytes and is a whole number of pieces of eight.
inline bool in_vectors(const Tensor& t) {
  const int64_t step = 16 / dtype_bytes(t.dtype());
  if (reinterpret_cast<uintptr_t>(t.data()) % 16 != 0 || t.dim(t.rank() - 1) % 8 != 0) return false;
  for (int i = 0; i + 1 < t.rank(); ++i)
    if (t.stride(i) % step != 0) return false;
  return true;
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_PIECES_CUH_
