// PinnedPieces: memory pinned for a device in pieces, all of it or none.
//
// Owns the pinning, not the memory: unpins on destruction, so it must go before the memory does. What pinning means is
// the device side's; it hands in the hooks. One thread at a time.
#ifndef OFFLOAD_OFFLOAD_PINNING_H_
#define OFFLOAD_OFFLOAD_PINNING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace offload {

// True when the pages are pinned; false when the system has no more of them to give. May throw for a device fault.
using PinHook = std::function<bool(std::span<std::byte>)>;
// Undoes a successful PinHook; must not fail.
using UnpinHook = std::function<void(std::span<std::byte>)>;

struct PinHooks {
  PinHook pin;  // empty: nothing is pinned, nothing is warned of
  UnpinHook unpin;
  // 1 GiB: the call's own cost vanishes, and a user's stop is heard between two pieces (0.02 to 0.5 s each).
  int64_t piece_bytes = int64_t{1} << 30;
};

class PinnedPieces {
 public:
  PinnedPieces() = default;
  PinnedPieces(const PinnedPieces&) = delete;
  PinnedPieces& operator=(const PinnedPieces&) = delete;
  ~PinnedPieces() { release(); }

  // Pins all of `spans`, calling `between` before each piece. Returns whether everything is pinned. When a piece is
  // refused, or `between` or the hook throws, everything pinned so far is unpinned. `refused_at_bytes` is then how much
  // had been pinned.
  struct Outcome {
    bool pinned = false;
    int64_t refused_at_bytes = 0;
  };
  Outcome pin(std::span<const std::span<std::byte>> spans, PinHooks hooks, const std::function<void()>& between);

  void release() noexcept;
  int64_t bytes() const { return bytes_; }

 private:
  PinHooks hooks_;
  std::vector<std::span<std::byte>> pieces_;
  int64_t bytes_ = 0;
};

// The one line that a user sees when pinning stopped after `reached` of `wanted` bytes: that it was host pinning and
// not the GPU's memory, and what lifts the limit. `memlock_bytes` is RLIMIT_MEMLOCK where one is set.
std::string pinning_warning(int64_t reached, int64_t wanted, std::optional<int64_t> memlock_bytes);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PINNING_H_
