// Keys of a selection: unsigned numbers that order as scores do and, among equal ones, by id. How the largest are found
// is the kernels' own affair.
#ifndef OFFLOAD_CUDA_SELECTION_CUH_
#define OFFLOAD_CUDA_SELECTION_CUH_

#include "cuda/kernel.cuh"

namespace offload::cuda {

// Unsigned numbers in the order of the scores; -0 equals +0, a NaN whose sign is clear is above all. Never 0.
__device__ inline uint32_t in_order(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float score_of(uint32_t ordered) {
  return __uint_as_float((ordered & 0x80000000u) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

// Larger for a larger score, and for the lower id of equal scores.
__device__ inline uint64_t selection_key(uint32_t ordered, int id) {
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline uint32_t ordered_of(uint64_t key) {
  return static_cast<uint32_t>(key >> 32);
}
__device__ inline int id_of(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

__device__ inline uint64_t larger(uint64_t x, uint64_t y) {
  return x > y ? x : y;
}
__device__ inline uint64_t warp_largest(uint64_t key) {
#if __CUDA_ARCH__ >= 800
  const uint32_t largest = __reduce_max_sync(kAllLanes, ordered_of(key));
  const uint32_t low = __reduce_max_sync(kAllLanes, ordered_of(key) == largest ? static_cast<uint32_t>(key) : 0);
  return static_cast<uint64_t>(largest) << 32 | low;
#else
  for (int width = kWarp / 2; width > 0; width /= 2) key = larger(key, __shfl_xor_sync(kAllLanes, key, width));
  return key;
#endif
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_SELECTION_CUH_
