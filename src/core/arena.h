// Arena: a bump allocator over memory that its owner provided, with a measuring mode that hands out no memory.
//
// A plan runs the program once on a measuring arena, allocates peak_bytes() once, and runs for real on that block: the
// same code sizes and uses it. ArenaScope returns everything taken since it was opened. Not thread-safe.
#ifndef OFFLOAD_CORE_ARENA_H_
#define OFFLOAD_CORE_ARENA_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/tensor.h"

namespace offload {

class Arena {
 public:
  static constexpr int64_t kAlignment = 256;

  Arena() = default;                                                         // measuring
  Arena(void* base, int64_t bytes) : base_(base), capacity_bytes_(bytes) {}  // REQUIRES: base aligned to kAlignment

  bool measuring() const { return base_ == nullptr; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t capacity_bytes() const { return capacity_bytes_; }

  // A contiguous tensor of undefined content; when measuring, one whose data must not be touched. An arena that is too
  // small is a bug: it was sized by a plan of the same calls.
  Tensor take(DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor probe(nullptr, dtype, shape);
    const int64_t begin = used_bytes_;
    used_bytes_ += (probe.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    if (measuring()) return Tensor(reinterpret_cast<void*>(kAlignment + begin), dtype, shape);
    OFL_ASSERT(used_bytes_ <= capacity_bytes_);
    return Tensor(static_cast<std::byte*>(base_) + begin, dtype, shape);
  }

 private:
  friend class ArenaScope;

  void* base_ = nullptr;
  int64_t capacity_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_bytes_(arena.used_bytes_) {}
  ~ArenaScope() { arena_.used_bytes_ = mark_bytes_; }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  int64_t mark_bytes_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_ARENA_H_
