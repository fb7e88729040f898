// Pinning by bookkeeping, for tests: counts, refuses or throws at a given piece, and sees that pages were touched first
// and are still there when they are unpinned.
#ifndef OFFLOAD_TESTS_FAKE_PINS_H_
#define OFFLOAD_TESTS_FAKE_PINS_H_

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "core/base.h"
#include "offload/pinning.h"

namespace offload {

class FakePins {
 public:
  // The numbers of calls, from 0; -1: never.
  struct Faults {
    int64_t refuse_at = -1, throw_at = -1;
  };
  FakePins() = default;
  explicit FakePins(Faults faults) : faults_(faults) {}

  // REQUIRES: this outlives what is pinned.
  PinHooks hooks(int64_t piece_bytes) {
    return {.pin = [this](std::span<std::byte> piece) { return pin(piece); },
            .unpin = [this](std::span<std::byte> piece) { unpin(piece); },
            .piece_bytes = piece_bytes};
  }

  int64_t calls() const { return read(calls_); }
  int64_t bytes() const { return read(bytes_); }            // pinned now
  int64_t bytes_most() const { return read(bytes_most_); }  // that were pinned at once
  std::map<const std::byte*, size_t> pieces() const { return read(pieces_); }

 private:
  template <typename T>
  T read(const T& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  bool pin(std::span<std::byte> piece) {
    // Pages not yet touched are in no table of the system's. In a sandbox that cannot tell, all count as touched.
    std::vector<unsigned char> resident((piece.size() + kPageBytes - 1) / kPageBytes);
    CHECK(::mincore(piece.data(), piece.size(), resident.data()) == 0);
    CHECK(std::all_of(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; }));
    const std::lock_guard lock(mutex_);
    if (calls_ == faults_.throw_at) throw_error(ErrorCode::device, "driver fault");
    if (calls_++ == faults_.refuse_at) return false;
    CHECK(pieces_.emplace(piece.data(), piece.size()).second);
    bytes_ += std::ssize(piece);
    bytes_most_ = std::max(bytes_most_, bytes_);
    return true;
  }

  void unpin(std::span<std::byte> piece) {
    std::vector<unsigned char> resident((piece.size() + kPageBytes - 1) / kPageBytes);
    CHECK(::mincore(piece.data(), piece.size(), resident.data()) == 0);  // ENOMEM where the memory has gone
    const std::lock_guard lock(mutex_);
    const auto at = pieces_.find(piece.data());
    const bool is_known = at != pieces_.end() && at->second == piece.size();
    CHECK(is_known);
    if (!is_known) return;
    pieces_.erase(at);
    bytes_ -= std::ssize(piece);
  }

  Faults faults_;
  mutable std::mutex mutex_;  // guards what follows
  int64_t calls_ = 0, bytes_ = 0, bytes_most_ = 0;
  std::map<const std::byte*, size_t> pieces_;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_FAKE_PINS_H_
