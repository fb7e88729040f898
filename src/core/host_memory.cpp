#include "core/host_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/base.h"

namespace offload {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;

}  // namespace

HostMemory::HostMemory(int64_t bytes, std::string_view tag) : bytes_(bytes) {
  OFL_ASSERT(bytes >= 0);
  if (bytes == 0) return;
  const bool huge = bytes >= kHugePageBytes;
  mapping_bytes_ = bytes + (huge ? kHugePageBytes : 0);
  void* mapping = mmap(nullptr, static_cast<size_t>(mapping_bytes_), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED)
    throw_error(ErrorCode::resource, "{} bytes of host memory for {} could not be reserved: {}", bytes, tag,
                std::strerror(errno));
  mapping_ = mapping;
  auto address = reinterpret_cast<uintptr_t>(mapping);
  if (huge) {
    address = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    // Advice only: without huge pages everything works, slower.
    static_cast<void>(madvise(reinterpret_cast<void*>(address), static_cast<size_t>(bytes), MADV_HUGEPAGE));
  }
  data_ = reinterpret_cast<std::byte*>(address);
}

HostMemory::~HostMemory() {
  if (mapping_ != nullptr) munmap(mapping_, static_cast<size_t>(mapping_bytes_));
}

}  // namespace offload
