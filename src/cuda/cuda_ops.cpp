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
    : caps_(caps), stream_(stream), staging_(staging) {
  check(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t* event : {&fork_, &join_})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
  check_blas(cublasCreate(&blas_), "opening cuBLAS");
  check_blas(cublasSetStream(blas_, stream_), "setting cuBLAS's stream");
  check(cudaMalloc(&blas_workspace_, kBlasWorkspaceBytes), "taking device memory for cuBLAS");
  check_blas(cublasSetWorkspace(blas_, blas_workspace_, kBlasWorkspaceBytes), "setting cuBLAS's workspace");
}

CudaOps::~CudaOps() {
  static_cast<void>(cublasDestroy(blas_));
  static_cast<void>(cudaFree(blas_workspace_));
  for (const cudaEvent_t event : {fork_, join_}) static_cast<void>(cudaEventDestroy(event));
  static_cast<void>(cudaStreamDestroy(side_));
}

void CudaOps::mark() {
  marked_ = planning() ? std::nullopt : capture_of(stream_);
  if (marked_) check(cudaEventRecord(fork_, stream_), "recording an event");
}

void CudaOps::run_aside(const std::function<void()>& body) {
  if (!marked_ || scratch_aside_bytes() > 0 || capture_of(stream_) != marked_) return body();
  marked_.reset();
  check(cudaStreamWaitEvent(side_, fork_, 0), "making a stream wait");
  struct OnSide {
    explicit OnSide(CudaOps& ops) : ops_(ops) { std::swap(ops_.stream_, ops_.side_); }
    ~OnSide() { std::swap(ops_.stream_, ops_.side_); }
    CudaOps& ops_;
  };
  {
    const OnSide on_side(*this);
    body();
    check(cudaEventRecord(join_, stream_), "recording an event");
  }
  check(cudaStreamWaitEvent(stream_, join_, 0), "making a stream wait");
}

}  // namespace offload::cuda
