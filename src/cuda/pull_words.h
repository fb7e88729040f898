// Copying by a kernel instead of a copy engine.
#ifndef OFFLOAD_CUDA_PULL_WORDS_H_
#define OFFLOAD_CUDA_PULL_WORDS_H_

#include "cuda/device.h"

namespace offload::cuda {

// Enqueues to[i] = from[i] for `words` words of 4 bytes; `from` is page-locked host memory. Throws Error{device}.
void pull_words(const void* from, void* to, int64_t words, cudaStream_t stream);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_PULL_WORDS_H_
