#include "cuda/compiled_sm.h"
#include "cuda/device.h"

namespace offload::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

int compiled_sm() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, probe_kernel), "finding kernels that this device can run");
  return attributes.ptxVersion;
}

}  // namespace offload::cuda
