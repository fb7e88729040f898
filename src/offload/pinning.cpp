#include "offload/pinning.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/base.h"
#include "offload/budget.h"

namespace offload {
namespace {

std::vector<std::span<std::byte>> pieces_of(std::span<const std::span<std::byte>> spans, size_t piece_bytes) {
  std::vector<std::span<std::byte>> pieces;
  for (const auto& span : spans) {
    OFL_ASSERT(reinterpret_cast<uintptr_t>(span.data()) % static_cast<uintptr_t>(kPageBytes) == 0);
    for (size_t at = 0; at < span.size(); at += piece_bytes)
      pieces.push_back(span.subspan(at, std::min(piece_bytes, span.size() - at)));
  }
  return pieces;
}

}  // namespace

void touch_pages(std::span<std::byte> memory, const LoadMeter& meter) {
  for (size_t at = 0; at < memory.size() && !meter.stopped(); at += static_cast<size_t>(kPageBytes))
    memory[at] = std::byte{0};
}

PinnedPieces::Outcome PinnedPieces::pin(std::span<const std::span<std::byte>> spans, PinHooks hooks, int threads,
                                        const std::function<void()>& between) {
  release();
  OFL_ASSERT(hooks.pin && hooks.unpin && hooks.piece_bytes > 0 && hooks.piece_bytes % kPageBytes == 0 && threads >= 1);
  hooks_ = std::move(hooks);
  const auto pieces = pieces_of(spans, static_cast<size_t>(hooks_.piece_bytes));
  if (pieces.empty()) return {true, 0};
  pieces_.reserve(pieces.size());  // so that a pinned piece can always be noted
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards pieces_, bytes_ and is_refused
  bool is_refused = false;
  const auto work = [&](int, LoadMeter& meter) {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      touch_pages(pieces[i], meter);
      if (meter.stopped()) return;
      bool is_pinned = false;
      try {
        is_pinned = hooks_.pin(pieces[i]);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (is_refused) return;
        throw;
      }
      const std::lock_guard lock(mutex);
      if (!is_pinned) {
        is_refused = true;
        return meter.stop();
      }
      pieces_.push_back(pieces[i]);
      bytes_ += static_cast<int64_t>(pieces[i].size());
    }
  };
  try {
    run_load(static_cast<int>(std::min<int64_t>(threads, std::ssize(pieces))), work, [&](int64_t) {
      if (between) between();
    });
  } catch (...) {
    release();
    throw;
  }
  if (!is_refused) return {true, 0};
  const int64_t reached = bytes_;
  release();
  return {false, reached};
}

void PinnedPieces::release() noexcept {
  while (!pieces_.empty()) {
    hooks_.unpin(pieces_.back());
    pieces_.pop_back();
  }
  bytes_ = 0;
}

std::string pinning_warning(int64_t reached, int64_t wanted, std::optional<int64_t> memlock_bytes) {
  const std::string limit = memlock_bytes
                                ? fmt::format("RLIMIT_MEMLOCK is {}", bytes_text(*memlock_bytes))
                                : std::string("RLIMIT_MEMLOCK is not the limit, the driver's or the platform's own is");
  return fmt::format(
      "host pinning stopped at {} of {}; this is host memory, the GPU is not full. All experts stay pageable: same "
      "results, slower copies. {}; raise memlock in /etc/security/limits.conf or LimitMEMLOCK=infinity in the systemd "
      "unit (under WSL2 the driver sets a ceiling that neither lifts)",
      bytes_text(reached), bytes_text(wanted), limit);
}

}  // namespace offload
