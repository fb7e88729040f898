#include "offload/pinning.h"

#include <algorithm>

#include "core/base.h"
#include "offload/budget.h"

namespace offload {

PinnedPieces::Outcome PinnedPieces::pin(std::span<const std::span<std::byte>> spans, PinHooks hooks,
                                        const std::function<void()>& between) {
  release();
  OFL_ASSERT(hooks.pin && hooks.unpin && hooks.piece_bytes > 0);
  hooks_ = std::move(hooks);
  const auto piece_bytes = static_cast<size_t>(hooks_.piece_bytes);
  size_t count = 0;
  for (const auto& span : spans) count += span.size() / piece_bytes + 1;
  pieces_.reserve(count);  // so that a pinned piece can always be noted
  try {
    for (const auto& span : spans)
      for (size_t at = 0; at < span.size(); at += piece_bytes) {
        const auto piece = span.subspan(at, std::min(piece_bytes, span.size() - at));
        if (between) between();
        if (!hooks_.pin(piece)) {
          const int64_t reached = bytes_;
          release();
          return {false, reached};
        }
        pieces_.push_back(piece);
        bytes_ += static_cast<int64_t>(piece.size());
      }
  } catch (...) {
    release();
    throw;
  }
  return {true, 0};
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
