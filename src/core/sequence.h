// The state that one sequence carries between tokens: recurrent states, convolution tails, key/value and block-key
// caches, recent token ids. It is one unit: copying, truncating or restoring a sequence moves all of it or none.
//
// StateLayout is filled while a model is built (which tensors, how large for a context); SequenceState is one
// sequence's copy of them in device memory.
#ifndef OFFLOAD_CORE_SEQUENCE_H_
#define OFFLOAD_CORE_SEQUENCE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/backend.h"

namespace offload {

class StateLayout {
 public:
  // `context`: positions a sequence may have. `activations`: the dtype of cached activations.
  StateLayout(int64_t context, DType activations) : context_(context), activations_(activations) {}

  int64_t context() const { return context_; }
  DType activations() const { return activations_; }

  // Returns the index under which SequenceState has the tensor. All start as zeros.
  size_t add(std::string name, DType dtype, int64_t d0, int64_t d1, int64_t d2 = 1) {
    items_.push_back({std::move(name), dtype, d0, d1, d2});
    return items_.size() - 1;
  }

  // The ids of the `count` latest tokens are kept, `fill` before the first.
  void keep_recent_ids(int64_t count, int32_t fill) {
    recent_ids_ = std::max(recent_ids_, count);
    recent_fill_ = fill;
  }

  int64_t bytes() const {
    Arena arena;
    for (const Item& item : items_) arena.take(item.dtype, {item.d0, item.d1, item.d2});
    return arena.peak_bytes();
  }

 private:
  friend class SequenceState;
  struct Item {
    std::string name;
    DType dtype;
    int64_t d0, d1, d2;
  };

  int64_t context_;
  DType activations_;
  std::vector<Item> items_;
  int64_t recent_ids_ = 0;
  int32_t recent_fill_ = 0;
};

class SequenceState {
 public:
  // Allocates on `backend` and zeroes. Throws Error{resource}.
  SequenceState(const StateLayout& layout, Backend& backend)
      : backend_(&backend), layout_(&layout), memory_(backend.allocate(layout.bytes(), "sequence state")) {
    Arena arena(memory_.data(), memory_.bytes());
    for (const auto& item : layout.items_) tensors_.push_back(arena.take(item.dtype, {item.d0, item.d1, item.d2}));
    reset();
  }

  // For planning: tensors that must not be touched, no memory.
  explicit SequenceState(const StateLayout& layout) : layout_(&layout) {
    Arena arena;
    for (const auto& item : layout.items_) tensors_.push_back(arena.take(item.dtype, {item.d0, item.d1, item.d2}));
  }

  // [d0, d1, d2] as laid out.
  const Tensor& tensor(size_t index) const { return tensors_[index]; }
  int64_t length() const { return length_; }
  int64_t context() const { return layout_->context(); }
  // Oldest first.
  const std::vector<int32_t>& recent_ids() const { return recent_ids_; }

  // After a step over `tokens`.
  void advance(std::span<const int32_t> tokens) {
    length_ += static_cast<int64_t>(tokens.size());
    recent_ids_.insert(recent_ids_.end(), tokens.begin(), tokens.end());
    recent_ids_.erase(recent_ids_.begin(), recent_ids_.end() - static_cast<std::ptrdiff_t>(layout_->recent_ids_));
  }

  // Back to an empty sequence.
  void reset() {
    backend_->fill_zero(Tensor(memory_.data(), DType::u8, {memory_.bytes()}));
    length_ = 0;
    recent_ids_.assign(static_cast<size_t>(layout_->recent_ids_), layout_->recent_fill_);
  }

 private:
  Backend* backend_ = nullptr;
  const StateLayout* layout_;
  Buffer memory_;
  std::vector<Tensor> tensors_;
  int64_t length_ = 0;
  std::vector<int32_t> recent_ids_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_SEQUENCE_H_
