#include "cuda/staging_ring.h"

#include <algorithm>
#include <cstring>

#include "cuda/pull_words.h"

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

std::span<std::byte> StagingRing::fill_place(std::span<const std::byte> host) {
  const size_t bytes = std::min(host.size(), static_cast<size_t>(kPlaceBytes));
  check(cudaEventSynchronize(done_[static_cast<size_t>(next_)]), "waiting for a place to stage");
  std::memcpy(place(next_), host.data(), bytes);
  return {place(next_), bytes};
}

void StagingRing::place_used(cudaStream_t stream) {
  check(cudaEventRecord(done_[static_cast<size_t>(next_)], stream), "recording an event");
  next_ = (next_ + 1) % kPlaces;
}

void StagingRing::copy_in(std::span<const std::byte> host, void* device, cudaStream_t stream) {
  for (auto* to = static_cast<std::byte*>(device); !host.empty();) {
    const std::span<std::byte> staged = fill_place(host);
    check(cudaMemcpyAsync(to, staged.data(), staged.size(), cudaMemcpyHostToDevice, stream), "copying to the device");
    place_used(stream);
    host = host.subspan(staged.size());
    to += staged.size();
  }
}

void StagingRing::pull_in(std::span<const std::byte> host, void* device, cudaStream_t stream) {
  for (auto* to = static_cast<std::byte*>(device); !host.empty();) {
    const std::span<std::byte> staged = fill_place(host);
    pull_words(staged.data(), to, static_cast<int64_t>(staged.size()) / 4, stream);
    place_used(stream);
    host = host.subspan(staged.size());
    to += staged.size();
  }
}

void StagingRing::copy_out(const void* device, std::span<std::byte> host, cudaStream_t stream) {
  const auto* from = static_cast<const std::byte*>(device);
  while (!host.empty()) {
    const size_t bytes = std::min(host.size(), static_cast<size_t>(kPlaceBytes));
    check(cudaEventSynchronize(done_[static_cast<size_t>(next_)]), "waiting for a place to stage");
    check(cudaMemcpyAsync(place(next_), from, bytes, cudaMemcpyDeviceToHost, stream), "copying from the device");
    check(cudaStreamSynchronize(stream), "waiting for the device");
    std::memcpy(host.data(), place(next_), bytes);
    next_ = (next_ + 1) % kPlaces;
    host = host.subspan(bytes);
    from += bytes;
  }
}

}  // namespace offload::cuda
