#include "cpu/cpu_backend.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace offload::cpu {

Buffer CpuBackend::allocate(int64_t bytes, std::string_view tag) {
  if (bytes == 0) return {};
  if (before_allocate_) before_allocate_();
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    throw_error(ErrorCode::resource, "{} bytes of host memory for {} could not be reserved: {}", bytes, tag,
                std::strerror(errno));
  static_cast<void>(madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE));  // advice only
  return {*this, data, bytes};
}

void CpuBackend::release(void* data, int64_t bytes) noexcept {
  munmap(data, static_cast<size_t>(bytes));
}

void CpuBackend::upload(std::span<const std::byte> host, const Tensor& device) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  if (!host.empty()) std::memcpy(device.data(), host.data(), host.size());
}

void CpuBackend::download(const Tensor& device, std::span<std::byte> host) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  if (!host.empty()) std::memcpy(host.data(), device.data(), host.size());
}

void CpuBackend::fill_zero(const Tensor& device) {
  OFL_ASSERT(device.contiguous());
  if (device.bytes() > 0) std::memset(device.data(), 0, static_cast<size_t>(device.bytes()));
}

}  // namespace offload::cpu
