#include "cuda/pull_words.h"

#include "cuda/kernel.cuh"

namespace offload::cuda {
namespace {

// One word per thread; bound by the link's latency.
__global__ void pull_words_kernel(const uint32_t* from, uint32_t* to, int64_t words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < words) to[i] = from[i];
}

}  // namespace

void pull_words(const void* from, void* to, int64_t words, cudaStream_t stream) {
  launch(pull_words_kernel, blocks_for(words, 256), 256, 0, stream, static_cast<const uint32_t*>(from),
         static_cast<uint32_t*>(to), words);
}

}  // namespace offload::cuda
