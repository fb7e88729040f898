#include "cuda/cuda_ops.h"

#include "cuda/blas.h"

namespace offload::cuda {
namespace {

// cuBLAS sums in parts that depend on the workspace it has; a fixed one keeps the bits the same on every run.
constexpr size_t kBlasWorkspaceBytes = size_t{32} << 20;

}  // namespace

CudaOps::CudaOps(const DeviceCaps& caps, cudaStream_t stream, StagingRing& staging)
    : caps_(caps), stream_(stream), staging_(staging) {
  check_blas(cublasCreate(&blas_), "opening cuBLAS");
  check_blas(cublasSetStream(blas_, stream_), "setting cuBLAS's stream");
  check(cudaMalloc(&blas_workspace_, kBlasWorkspaceBytes), "taking device memory for cuBLAS");
  check_blas(cublasSetWorkspace(blas_, blas_workspace_, kBlasWorkspaceBytes), "setting cuBLAS's workspace");
}

CudaOps::~CudaOps() {
  static_cast<void>(cublasDestroy(blas_));
  static_cast<void>(cudaFree(blas_workspace_));
}

}  // namespace offload::cuda
