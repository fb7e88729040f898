// hyper_read out of the ops that it is made of, for backends and shapes without a kernel for the whole.
#ifndef OFFLOAD_CORE_OP_PARTS_H_
#define OFFLOAD_CORE_OP_PARTS_H_

#include <algorithm>

#include "core/arena.h"
#include "core/ops.h"

namespace offload {

// Scratch: the first `nested_bytes` are the parts' own, as their ops find it; then what lies between them.
struct HyperReadScratch {
  Tensor nested, normed, down, gate;

  HyperReadScratch(Arena& arena, const HyperReadArgs& a, int64_t nested_bytes)
      : nested(arena.take(DType::u8, {nested_bytes})),
        normed(arena.take(a.stack.dtype(), {a.stack.dim(0), a.stack.dim(1)})),
        down(arena.take(a.stack.dtype(), {a.stack.dim(0), a.down.dim(0)})),
        gate(arena.take(a.stack.dtype(), {a.stack.dim(0), a.stack.dim(1)})) {}
};

inline RmsNormArgs norm_part(const HyperReadArgs& a, const HyperReadScratch& s) {
  const int64_t n = a.out.dim(1);
  return {.x = a.stack.split_last(n),
          .w = a.norm,
          .out = s.normed.split_last(n),
          .eps = a.eps,
          .weight = NormWeight::one_plus,
          .rounding = a.rounding};
}

// Calls function(args) for each part, in order.
template <typename Function>
void for_each_part(const HyperReadArgs& a, const HyperReadScratch& s, const Function& function) {
  function(norm_part(a, s));
  function(LinearArgs{.x = s.normed, .w = a.down, .out = s.down});
  function(ScaledSiluArgs{
      .x = s.down, .out = s.down, .scale = 1.0f / static_cast<float>(a.streams), .rounding = a.rounding});
  function(LinearArgs{.x = s.down, .w = a.up, .out = s.gate});
  function(StreamMixArgs{.x = s.normed, .u = s.gate, .out = a.out, .streams = a.streams, .rounding = a.rounding});
  if (a.inject) function(LinearArgs{.x = s.normed, .w = a.inject, .out = a.logits});
}

// Bytes of scratch for all parts, of which scratch_bytes(args) each takes its own.
template <typename ScratchBytes>
int64_t nested_scratch_bytes(const HyperReadArgs& a, const ScratchBytes& scratch_bytes) {
  Arena measuring;
  const HyperReadScratch none(measuring, a, 0);
  int64_t bytes = 0;
  for_each_part(a, none, [&](const auto& part) { bytes = std::max(bytes, scratch_bytes(part)); });
  return bytes;
}

}  // namespace offload

#endif  // OFFLOAD_CORE_OP_PARTS_H_
