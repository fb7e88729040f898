#include "cuda/cuda_ops.h"

#include "cuda/blas.h"

namespace offload::cuda {
namespace {

// cuBLAS sums in parts that depend on the workspace it has; a fixed one keeps the bits the same on every run.
constexpr size_t kBlasWorkspaceBytes = size_t{32} << 20;

// Which capture of a graph `stream` is in.
std::optional<unsigned long long> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "asking for the state of a stream");
  if (status != cudaStreamCaptureStatusActive) return {};
  return id;
}

}  // namespace

CudaOps::CudaOps(const DeviceCaps& caps, cudaStream_t stream, StagingRing& staging)
    : caps_(caps), stream_{stream, caps.starts_early()}, staging_(staging) {
  check_blas(cublasCreate(&blas_), "opening cuBLAS");
  check_blas(cublasSetStream(blas_, stream_), "setting cuBLAS's stream");
  check(cudaMalloc(&blas_workspace_, kBlasWorkspaceBytes), "taking device memory for cuBLAS");
  check_blas(cublasSetWorkspace(blas_, blas_workspace_, kBlasWorkspaceBytes), "setting cuBLAS's workspace");
}

CudaOps::~CudaOps() {
  static_cast<void>(cublasDestroy(blas_));
  static_cast<void>(cudaFree(blas_workspace_));
}

void CudaOps::mark() {
  marked_ = planning() ? std::nullopt : capture_of(stream_);
  if (marked_) side_.mark(stream_);
}

void CudaOps::run_aside(const std::function<void()>& body) {
  if (!marked_ || scratch_aside_bytes() > 0 || capture_of(stream_) != marked_) return body();
  marked_.reset();
  side_.start();
  struct OnSide {
    explicit OnSide(CudaOps& ops_) : ops(ops_), main(ops_.stream_) { ops.stream_.stream = ops.side_.stream(); }
    ~OnSide() { ops.stream_.stream = main; }
    CudaOps& ops;
    cudaStream_t main;
  };
  {
    const OnSide on_side(*this);
    body();
  }
  side_.join(stream_);
}

}  // namespace offload::cuda
