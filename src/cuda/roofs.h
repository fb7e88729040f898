// Measurement of what one device can do at most, as the yardstick of benchmarks. Each takes well under a second and
// some GiB of device memory; the device should be idle.
#ifndef OFFLOAD_CUDA_ROOFS_H_
#define OFFLOAD_CUDA_ROOFS_H_

#include <atomic>
#include <thread>

#include "cuda/device.h"

namespace offload::cuda {

// Reading 2 GiB of device memory once. Throws Error{resource, device}, as all of these.
double measure_device_read_bytes_per_s(const DeviceCaps& caps);

enum class GemmType { bf16, f16 };
// cuBLAS, [m, k] x [n, k]^T with FP32 sums, random values: zeros run faster than real data.
double measure_gemm_seconds(const DeviceCaps& caps, GemmType type, int64_t m, int64_t n, int64_t k);
// The largest rate that products get: 8192 x 4096 x 4096.
double measure_gemm_flops_per_s(const DeviceCaps& caps, GemmType type);

// Matrix instructions m16n8k8 of FP16 with FP32 sums, out of registers: the deepest that Turing has, so what the own
// products of its plan are made of. Later cards have deeper, faster ones.
double measure_m16n8k8_flops_per_s(const DeviceCaps& caps);

// Copying page-locked host memory to the device in pieces of 64 MiB.
double measure_link_bytes_per_s(const DeviceCaps& caps);
// One copy of `bytes` out of page-locked host memory, in a row of copies of 256 MiB in all, at most 1000.
double measure_copy_seconds(const DeviceCaps& caps, int64_t bytes);

// Keeps the link busy with copies to the device, from a thread of its own, while it lives.
class LinkLoad {
 public:
  explicit LinkLoad(const DeviceCaps& caps);
  ~LinkLoad();
  LinkLoad(const LinkLoad&) = delete;
  LinkLoad& operator=(const LinkLoad&) = delete;

 private:
  std::atomic<bool> ends_{false};
  std::thread copier_;
};

// From the start of one empty kernel to that of the next on a busy stream.
double measure_launch_seconds(const DeviceCaps& caps);
// Starting one empty kernel and waiting until the host knows that it is done.
double measure_wait_seconds(const DeviceCaps& caps);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_ROOFS_H_
