// What both forms of the gated delta rule share: the call, the gates of a row, normalised keys and queries.
#ifndef OFFLOAD_CUDA_GATED_DELTA_CUH_
#define OFFLOAD_CUDA_GATED_DELTA_CUH_

#include "cuda/pieces.cuh"

namespace offload::cuda {

inline constexpr int kDeltaColumns = 32;  // value columns of one block of threads

struct DeltaCall {
  const void *qkv = nullptr, *a = nullptr, *b = nullptr;
  const float *a_log = nullptr, *dt_bias = nullptr;
  float* state = nullptr;  // [heads][key_dim][value_dim]
  void* out = nullptr;
  int64_t qkv_row = 0, a_row = 0, b_row = 0, out_row = 0;  // strides, in elements
  int32_t rows = 0, key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;
  Rounding rounding = Rounding::fused;

  __device__ float query_scale() const { return 1.0f / sqrtf(static_cast<float>(key_dim)); }
};

__device__ inline float4 load4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

// g = -exp(a_log) softplus(a + dt_bias)
template <typename T>
__device__ inline float log_decay(const DeltaCall& c, int row, int head) {
  const float t = load_float(static_cast<const T*>(c.a) + row * c.a_row + head) + c.dt_bias[head];
  const float softplus = t > 20.0f ? t : log1pf(expf(t));
  return -expf(c.a_log[head]) * softplus;
}

// beta = rnd(sigmoid(b))
template <typename T>
__device__ inline float write_strength(const DeltaCall& c, int row, int head) {
  const float b = load_float(static_cast<const T*>(c.b) + row * c.b_row + head);
  return rnd<T>(1.0f / (1.0f + expf(-b)), c.rounding);
}

// scale / sqrt(sum x^2 + 1e-6) of `count` elements, to every lane. A warp calls it.
template <typename T>
__device__ inline float norm_scale(const T* x, int count, float scale) {
  float squares = 0;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < count; i += kWarp) {
    const float value = load_float(x + i);
    squares = fmaf(value, value, squares);
  }
  return scale / sqrtf(warp_sum(squares) + 1e-6f);
}

// out[0, 32 kPieces) = x * norm_scale, zeros from `count` on. A warp calls it.
template <int kPieces, typename T>
__device__ inline void normalise(const T* x, int count, float scale, float* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float values[kPieces], squares = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    values[i] = lane + i * kWarp < count ? load_float(x + lane + i * kWarp) : 0.0f;
    squares = fmaf(values[i], values[i], squares);
  }
  const float factor = scale / sqrtf(warp_sum(squares) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) out[lane + i * kWarp] = values[i] * factor;
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GATED_DELTA_CUH_
