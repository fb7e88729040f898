#include "cuda/staging_ring.h"

#include <algorithm>
#include <cstring>

namespace offload::cuda {

StagingRing::StagingRing() {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, static_cast<size_t>(kPlaces * kPlaceBytes), cudaHostAllocDefault),
        "taking page-locked memory for staging");
  memory_ = static_cast<std::byte*>(memory);
  for (cudaEvent_t& event : done_)
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "creating an event");
}

StagingRing::~StagingRing() {
  for (cudaEvent_t event : done_) {
    static_cast<void>(cudaEventSynchronize(event));
    static_cast<void>(cudaEventDestroy(event));
  }
  static_cast<void>(cudaFreeHost(memory_));
}

void StagingRing::copy_in(std::span<const std::byte> host, void* device, cudaStream_t stream) {
  auto* to = static_cast<std::byte*>(device);
  while (!host.empty()) {
    const size_t bytes = std::min(host.size(), static_cast<size_t>(kPlaceBytes));
    cudaEvent_t& done = done_[static_cast<size_t>(next_)];
    check(cudaEventSynchronize(done), "waiting for a place to stage");
    std::memcpy(place(next_), host.data(), bytes);
    check(cudaMemcpyAsync(to, place(next_), bytes, cudaMemcpyHostToDevice, stream), "copying to the device");
    check(cudaEventRecord(done, stream), "recording an event");
    next_ = (next_ + 1) % kPlaces;
    host = host.subspan(bytes);
    to += bytes;
  }
}

void StagingRing::copy_out(const void* device, std::span<std::byte> host, cudaStream_t stream) {
  const auto* from = static_cast<const std::byte*>(device);
  while (!host.empty()) {
    const size_t bytes = std::min(host.size(), static_cast<size_t>(kPlaceBytes));
    cudaEvent_t& done = done_[static_cast<size_t>(next_)];
    check(cudaEventSynchronize(done), "waiting for a place to stage");
    check(cudaMemcpyAsync(place(next_), from, bytes, cudaMemcpyDeviceToHost, stream), "copying from the device");
    check(cudaStreamSynchronize(stream), "waiting for the device");
    std::memcpy(host.data(), place(next_), bytes);
    next_ = (next_ + 1) % kPlaces;
    host = host.subspan(bytes);
    from += bytes;
  }
}

}  // namespace offload::cuda
