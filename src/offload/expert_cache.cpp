#include "offload/expert_cache.h"

#include <limits>

namespace offload {

ExpertCache::Pin& ExpertCache::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    cache_ = other.cache_;
    slot_ = other.slot_;
    other.cache_ = nullptr;
  }
  return *this;
}

void ExpertCache::Pin::release() {
  if (cache_ != nullptr) cache_->unpin(slot_);
  cache_ = nullptr;
}

ExpertCache::ExpertCache(int64_t layers, int64_t experts, int64_t slots)
    : layers_(layers), experts_(experts), slots_free_(slots) {
  OFL_ASSERT(layers > 0 && experts > 0 && slots > 0 && slots <= std::numeric_limits<int32_t>::max());
  slots_.resize(static_cast<size_t>(slots));
  directory_.assign(static_cast<size_t>(layers * experts), -1);
}

ExpertCache::~ExpertCache() {
  OFL_ASSERT(pins_ == 0);
}

int64_t ExpertCache::find(ExpertKey key) const {
  return directory_[directory_index(key)];
}

ExpertKey ExpertCache::begin_fill(int64_t slot, ExpertKey key) {
  Slot& target = at(slot);
  OFL_ASSERT(target.state != State::filling);
  OFL_ASSERT(target.pins == 0);
  OFL_ASSERT(find(key) < 0);
  const ExpertKey evicted = target.key;
  if (evicted.exists()) {
    OFL_ASSERT(find(evicted) == slot);
    directory_[directory_index(evicted)] = -1;
  } else {
    --slots_free_;
  }
  target.key = key;
  target.state = State::filling;
  directory_[directory_index(key)] = static_cast<int32_t>(slot);
  return evicted;
}

void ExpertCache::end_fill(int64_t slot) {
  OFL_ASSERT(at(slot).state == State::filling);
  at(slot).state = State::ready;
}

ExpertCache::Pin ExpertCache::pin(int64_t slot, ExpertKey key) {
  Slot& target = at(slot);
  OFL_ASSERT(target.state != State::free && target.key == key);
  ++target.pins;
  ++pins_;
  return {this, slot};
}

void ExpertCache::check() const {
  int64_t held = 0, free = 0, pins = 0;
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    pins += slot.pins;
    OFL_ASSERT(slot.pins >= 0 && slot.key.exists() == (slot.state != State::free));
    if (slot.state == State::free) {
      OFL_ASSERT(slot.pins == 0);
      ++free;
    } else {
      OFL_ASSERT(find(slot.key) == static_cast<int64_t>(s));
    }
  }
  for (const int32_t slot : directory_) held += slot >= 0 ? 1 : 0;
  OFL_ASSERT(free == slots_free_ && held == slots() - free && pins == pins_);
}

const ExpertCache::Slot& ExpertCache::at(int64_t slot) const {
  OFL_ASSERT(slot >= 0 && slot < slots());
  return slots_[static_cast<size_t>(slot)];
}

size_t ExpertCache::directory_index(ExpertKey key) const {
  OFL_ASSERT(key.layer >= 0 && key.layer < layers_ && key.expert >= 0 && key.expert < experts_);
  return static_cast<size_t>(key.layer * experts_ + key.expert);
}

void ExpertCache::unpin(int64_t slot) {
  Slot& target = at(slot);
  OFL_ASSERT(target.pins > 0);
  --target.pins;
  --pins_;
}

}  // namespace offload
