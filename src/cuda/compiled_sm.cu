#include "cuda/compiled_sm.h"
#include "cuda/device.h"

namespace offload::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kProbeThreads = 64;
#else
constexpr int kProbeThreads = 32;
#endif

// Its bound on threads tells what it was compiled for.
__global__ void __launch_bounds__(kProbeThreads) probe_kernel() {}

cudaFuncAttributes probe_attributes() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe_kernel), "finding kernels that this device can run");
  return attributes;
}

}  // namespace

int compiled_sm() {
  return probe_attributes().ptxVersion;
}

bool compiled_for_90a() {
  return probe_attributes().maxThreadsPerBlock == 64;
}

}  // namespace offload::cuda
