// CudaOps: every op as kernels on one stream of one device.
//
// Owns its cuBLAS handle and the ring through which small host arrays travel; memory belongs to the caller, temporary
// device memory to set_scratch(). Calls enqueue and return; a failure of the device's work is thrown by a later call.
// What an op takes as weights no other op may write: kernels of SM90 and newer read them before their turn. Kernels are
// chosen by pure functions of the arguments and of DeviceCaps. Confined to one thread, on which the device is current.
// It allocates no device memory while executing; its host lists grow to the size of the largest step.
#ifndef OFFLOAD_CUDA_CUDA_OPS_H_
#define OFFLOAD_CUDA_CUDA_OPS_H_

#include <cublas_v2.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "core/ops.h"
#include "cuda/device.h"
#include "cuda/side_stream.h"
#include "cuda/staging_ring.h"

namespace offload::cuda {

class CudaOps final : public Ops {
 public:
  // The stream and the ring outlive the ops.
  CudaOps(const DeviceCaps& caps, cudaStream_t stream, StagingRing& staging);
  ~CudaOps() override;
  CudaOps(const CudaOps&) = delete;
  CudaOps& operator=(const CudaOps&) = delete;

  const DeviceCaps& caps() const { return caps_; }

  void mark() override;

 protected:
#define OFL_OVERRIDE_EXECUTE(Args, name) void execute(const Args& args) override;
  OFL_FOR_EACH_OP(OFL_OVERRIDE_EXECUTE)
#undef OFL_OVERRIDE_EXECUTE
  using Ops::scratch_bytes;  // 0 for the ops not named here
  int64_t scratch_bytes(const LinearArgs& args) const override;
  int64_t scratch_bytes(const GatedDeltaArgs& args) const override;
  int64_t scratch_bytes(const BlockScoresArgs& args) const override;
  int64_t scratch_bytes(const BlockTopkArgs& args) const override;
  int64_t scratch_bytes(const AttentionArgs& args) const override;
  int64_t scratch_bytes(const HyperReadArgs& args) const override;
  int64_t scratch_bytes(const SwigluExpertsArgs& args) const override;
  int64_t scratch_bytes(const SwigluRoutedArgs& args) const override;
  int64_t scratch_bytes(const TopkArgs& args) const override;
  // On a stream of its own within a graph that is captured; a launch by the host costs more than what it would save.
  void run_aside(const std::function<void()>& body) override;

 private:
  Arena scratch_arena() const {
    return Arena(scratch().data(), scratch().bytes());
  }

  DeviceCaps caps_;
  Queue stream_;
  SideStream side_;
  std::optional<unsigned long long> marked_;  // the capture that the latest mark() was made in
  StagingRing& staging_;
  std::vector<std::byte> lists_;  // of swiglu_experts, on their way to the device
  cublasHandle_t blas_ = nullptr;
  void* blas_workspace_ = nullptr;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_CUDA_OPS_H_
