// ExpertCache: which expert lies in which slot of one rank's device slab, and who may not be disturbed.
//
// Owns the directory, the slots' states and the pins; not the slab's memory, nor the choice of what to evict
// (expert_policy.h makes it). Driven in program order: a slot is `ready` once everything issued later is ordered after
// its copy. Refuses, by assertion, to evict what is being filled or pinned. Confined to its rank's thread. Allocates
// nothing after construction.
#ifndef OFFLOAD_OFFLOAD_EXPERT_CACHE_H_
#define OFFLOAD_OFFLOAD_EXPERT_CACHE_H_

#include <cstdint>
#include <vector>

#include "core/base.h"

namespace offload {

// A routed expert by its place in the model: the index among the layers with experts, and the global expert id.
// A slice of an expert has no key of its own: a rank holds one slice of every expert.
struct ExpertKey {
  int32_t layer = -1;
  int32_t expert = -1;

  bool exists() const { return layer >= 0; }
  friend bool operator==(const ExpertKey&, const ExpertKey&) = default;
};

class ExpertCache {
 public:
  // free -> filling -> ready; a pin is a count beside it, taken on a ready slot or on a filling one by the run that
  // waits for the copy.
  enum class State : uint8_t { free, filling, ready };

  // Keeps a slot's content in place while it lives. Must not outlive the cache.
  class Pin {
   public:
    Pin() = default;
    Pin(Pin&& other) noexcept : cache_(other.cache_), slot_(other.slot_) { other.cache_ = nullptr; }
    Pin& operator=(Pin&& other) noexcept;
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    ~Pin() { release(); }

    void release();
    explicit operator bool() const { return cache_ != nullptr; }
    // REQUIRES: holds a slot.
    int64_t slot() const {
      OFL_ASSERT(cache_ != nullptr);
      return slot_;
    }

   private:
    friend class ExpertCache;
    Pin(ExpertCache* cache, int64_t slot) : cache_(cache), slot_(slot) {}

    ExpertCache* cache_ = nullptr;
    int64_t slot_ = 0;
  };

  // REQUIRES: every count is positive and slots fits an int32.
  ExpertCache(int64_t layers, int64_t experts, int64_t slots);
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;
  ~ExpertCache();

  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t slots_free() const { return slots_free_; }

  // The slot that holds `key` or is being filled with it, or -1.
  int64_t find(ExpertKey key) const;
  bool is_filling(int64_t slot) const { return at(slot).state == State::filling; }
  State state(int64_t slot) const { return at(slot).state; }
  bool pinned(int64_t slot) const { return at(slot).pins > 0; }
  // The content of a slot that is not free, or no key.
  ExpertKey key(int64_t slot) const { return at(slot).key; }
  bool evictable(int64_t slot) const { return at(slot).state == State::ready && at(slot).pins == 0; }

  // A copy of `key` into `slot` has been issued; what was there is gone. Returns the evicted key or no key.
  // REQUIRES: the slot is free or evictable; no other slot holds `key`.
  ExpertKey begin_fill(int64_t slot, ExpertKey key);
  // Whatever is issued from now on is ordered after the copy. REQUIRES: the slot is filling.
  void end_fill(int64_t slot);
  // REQUIRES: the slot holds `key` or is being filled with it.
  [[nodiscard]] Pin pin(int64_t slot, ExpertKey key);

  // Asserts that directory, slots and counts agree; linear in the number of slots.
  void check() const;

 private:
  struct Slot {
    ExpertKey key;
    State state = State::free;
    int32_t pins = 0;
  };

  const Slot& at(int64_t slot) const;
  Slot& at(int64_t slot) { return const_cast<Slot&>(static_cast<const ExpertCache*>(this)->at(slot)); }
  size_t directory_index(ExpertKey key) const;
  void unpin(int64_t slot);

  int64_t layers_, experts_;
  int64_t slots_free_, pins_ = 0;
  std::vector<Slot> slots_;
  std::vector<int32_t> directory_;  // [layers, experts] -> slot or -1
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_EXPERT_CACHE_H_
