// Memory and streams outside a Backend, for what joins or measures devices. Each owns one handle, zeroed at the start.
//
// Constructors leave the current device as it was and throw Error{resource, device}.
#ifndef OFFLOAD_CUDA_DEVICE_MEMORY_H_
#define OFFLOAD_CUDA_DEVICE_MEMORY_H_

#include <cstddef>
#include <utility>

#include "cuda/device.h"

namespace offload::cuda {

// Makes a device the current one and puts back the one before.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&before_), "reading the current device");
    check(cudaSetDevice(device), "choosing the device");
  }
  ~DeviceScope() { static_cast<void>(cudaSetDevice(before_)); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(int device, int64_t bytes) : bytes_(bytes) {
    const DeviceScope scope(device);
    check(cudaMalloc(&data_, static_cast<size_t>(bytes)), "taking device memory");
    cudaError_t status = cudaMemset(data_, 0, static_cast<size_t>(bytes));
    if (status == cudaSuccess) status = cudaStreamSynchronize(nullptr);  // no lane waits for the stream that clears
    if (status != cudaSuccess) static_cast<void>(cudaFree(std::exchange(data_, nullptr)));
    check(status, "clearing device memory");
  }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Page-locked host memory that every device reaches at the host's own address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(int64_t bytes) : bytes_(bytes) {
    check(cudaHostAlloc(&data_, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
          "taking page-locked host memory");
    clear();
  }
  ~PinnedMemory() { static_cast<void>(cudaFreeHost(data_)); }
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void clear() {
    for (int64_t i = 0; i < bytes_; ++i) as<std::byte>()[i] = std::byte{0};
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class DeviceEvent {
 public:
  explicit DeviceEvent(int device) {
    const DeviceScope scope(device);
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
  }
  ~DeviceEvent() {
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  }
  DeviceEvent(DeviceEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  DeviceEvent& operator=(DeviceEvent&&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class DeviceStream {
 public:
  explicit DeviceStream(int device) {
    const DeviceScope scope(device);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~DeviceStream() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }
  DeviceStream(DeviceStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  DeviceStream& operator=(DeviceStream&&) = delete;

  cudaStream_t get() const { return stream_; }
  void sync() const { check(cudaStreamSynchronize(stream_), "waiting for the device"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_DEVICE_MEMORY_H_
