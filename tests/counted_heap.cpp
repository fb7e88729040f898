#include "counted_heap.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0}, bytes_held{0}, bytes_most{0};

void* counted(size_t bytes) noexcept {
  void* memory = std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) return nullptr;
  ++allocations;
  const int64_t now = bytes_held += static_cast<int64_t>(malloc_usable_size(memory));
  int64_t seen = bytes_most;
  while (seen < now && !bytes_most.compare_exchange_weak(seen, now)) {
  }
  return memory;
}

void released(void* memory) noexcept {
  if (memory != nullptr) bytes_held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

namespace offload {

int64_t heap_allocations() {
  return allocations;
}
int64_t heap_bytes() {
  return bytes_held;
}
int64_t heap_bytes_most() {
  return bytes_most;
}
void restart_heap_peak() {
  bytes_most = bytes_held.load();
}

}  // namespace offload

// Not inlined: GCC would see free() beside a new expression and call it a mismatch. The arrays' forms call these.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* memory = counted(bytes)) return memory;
  throw std::bad_alloc();
}
// stable_sort's; else it would be taken from the system's and given back to ours.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return counted(bytes);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  released(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  released(memory);
}
