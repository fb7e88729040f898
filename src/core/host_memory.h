// HostMemory: a block of anonymous pages, huge ones where the system has them, returned to the system when it goes.
#ifndef OFFLOAD_CORE_HOST_MEMORY_H_
#define OFFLOAD_CORE_HOST_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

namespace offload {

class HostMemory {
 public:
  HostMemory() = default;
  // `bytes` of zeros, aligned to 2 MiB when larger than that, not yet touched. `tag` names them in the Error{resource}
  // thrown when the system refuses.
  HostMemory(int64_t bytes, std::string_view tag);
  HostMemory(HostMemory&& other) noexcept { swap(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    HostMemory taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~HostMemory();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  void swap(HostMemory& other) {
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_bytes_, other.mapping_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* mapping_ = nullptr;
  int64_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_HOST_MEMORY_H_
