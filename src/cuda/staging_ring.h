// StagingRing: page-locked memory through which host bytes of any size reach a stream without waiting for it.
//
// Owns the memory and one event per place. copy_in() returns when the host bytes may be reused; it waits only when all
// places are still in flight. Confined to one thread.
#ifndef OFFLOAD_CUDA_STAGING_RING_H_
#define OFFLOAD_CUDA_STAGING_RING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/device.h"

namespace offload::cuda {

class StagingRing {
 public:
  static constexpr int kPlaces = 32;
  static constexpr int64_t kPlaceBytes = int64_t{1} << 20;

  // On the current device. Throws Error{resource}.
  StagingRing();
  ~StagingRing();
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Enqueues device[0, host.size()) = host on `stream`.
  void copy_in(std::span<const std::byte> host, void* device, cudaStream_t stream);
  // The same by a kernel that reads the host's memory, for arrays of a step: it does not queue up behind the large
  // copies of another stream. REQUIRES: device and host.size() multiples of 4.
  void pull_in(std::span<const std::byte> host, void* device, cudaStream_t stream);
  // host = device bytes after all work on `stream`; waits for it.
  void copy_out(const void* device, std::span<std::byte> host, cudaStream_t stream);

 private:
  // Waits until the next place is free and fills it; returns its bytes, at most kPlaceBytes of `host`.
  std::span<std::byte> fill_place(std::span<const std::byte> host);
  void place_used(cudaStream_t stream);
  std::byte* place(int i) const { return memory_ + i * kPlaceBytes; }

  std::byte* memory_ = nullptr;
  std::array<cudaEvent_t, kPlaces> done_{};
  int next_ = 0;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_STAGING_RING_H_
