// PinnedPieces: fresh memory touched and pinned for a device in pieces, by several threads, all of it or none.
//
// Owns the pinning, not the memory: unpins on destruction, so it must go before the memory does. What pinning means is
// the device side's; it hands in the hooks. One calling thread at a time; pin() has threads of its own.
#ifndef OFFLOAD_OFFLOAD_PINNING_H_
#define OFFLOAD_OFFLOAD_PINNING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/load_pool.h"

namespace offload {

constexpr int64_t kPageBytes = 4096;  // the smallest page: one write per page touches them all

// True when the pages are pinned; false when the system has no more of them to give. May throw for a device fault.
// Called from several threads at once, which are new to the device side, each with memory of its own.
using PinHook = std::function<bool(std::span<std::byte>)>;
// Undoes a successful PinHook; must not fail. Called from one thread at a time.
using UnpinHook = std::function<void(std::span<std::byte>)>;

struct PinHooks {
  PinHook pin;  // empty: nothing is pinned, nothing is warned of
  UnpinHook unpin;
  // Some threads have to touch while others pin, and the call's own cost has to vanish. Beside an H200, 16 threads, 16
  // GiB of fresh huge pages (a trial of its own, 2026-12-01): 31.8 GiB/s in pieces of 256 MiB, 24 of 1 GiB; 20 to 27
  // when one thread pins what all have touched before; 5 when nobody has.
  int64_t piece_bytes = int64_t{256} << 20;
};

class PinnedPieces {
 public:
  PinnedPieces() = default;
  PinnedPieces(const PinnedPieces&) = delete;
  PinnedPieces& operator=(const PinnedPieces&) = delete;
  ~PinnedPieces() { release(); }

  // Touches and pins all of `spans`: each of `threads` threads takes a piece, writes to its pages and pins it, until
  // none is left. `between` is called from the calling thread alone, several times a second; it may throw to stop.
  // Returns whether everything is pinned. When a piece is refused, or `between` or the hook throws, the other threads
  // end with the piece they are at, then everything pinned is unpinned; `refused_at_bytes` is how much that was. The
  // first exception is rethrown, unless a hook threw it behind a refusal.
  // REQUIRES: no content is needed, as the first byte of every page becomes 0. Spans start at a page and pieces are of
  // whole pages.
  struct Outcome {
    bool pinned = false;
    int64_t refused_at_bytes = 0;
  };
  Outcome pin(std::span<const std::span<std::byte>> spans, PinHooks hooks, int threads,
              const std::function<void()>& between);

  void release() noexcept;
  int64_t bytes() const { return bytes_; }

 private:
  PinHooks hooks_;
  std::vector<std::span<std::byte>> pieces_;
  int64_t bytes_ = 0;
};

// Writes a 0 to the first byte of every page until `meter` says stop. REQUIRES: `memory` starts at a page.
void touch_pages(std::span<std::byte> memory, const LoadMeter& meter);

// The one line that a user sees when pinning stopped after `reached` of `wanted` bytes: that it was host pinning and
// not the GPU's memory, and what lifts the limit. `memlock_bytes` is RLIMIT_MEMLOCK where one is set.
std::string pinning_warning(int64_t reached, int64_t wanted, std::optional<int64_t> memlock_bytes);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PINNING_H_
