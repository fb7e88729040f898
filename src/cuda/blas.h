// The check of every cuBLAS call.
#ifndef OFFLOAD_CUDA_BLAS_H_
#define OFFLOAD_CUDA_BLAS_H_

#include <cublas_v2.h>

#include "core/base.h"

namespace offload::cuda {

// Throws Error{device} "what: name".
inline void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw_error(ErrorCode::device, "{}: {}", what, cublasGetStatusString(status));
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_BLAS_H_
