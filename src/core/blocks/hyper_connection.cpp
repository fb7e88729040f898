#include "core/blocks/hyper_connection.h"

#include "core/canonical.h"

namespace offload {

HyperConnection::HyperConnection(const ModelSpec& spec, Role role, const std::string& prefix, WeightLoader& loader)
    : streams_(spec.hyper.streams), eps_(spec.rms_eps) {
  const int64_t width = streams_ * spec.hidden, lowrank = spec.hyper.lowrank;
  norm_ = loader.vector(prefix + "hc_norm.weight", {width}).reshaped({streams_, spec.hidden});
  down_ = loader.matrix({{prefix + "input_mix_weight_down.weight", lowrank, width}});
  up_ = loader.matrix({{prefix + "input_mix_weight_up.weight", width, lowrank}});
  if (role == Role::around_block) inject_ = loader.matrix({{prefix + "block_inject_weight.weight", streams_, width}});
}

Tensor HyperConnection::take_inject(const Step& step, int64_t rows) const {
  return step.arena.take(step.rounding() == Rounding::fused ? DType::f32 : step.dtype(), {rows, streams_});
}

void HyperConnection::read(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& inject) const {
  const int64_t rows = stack.dim(0), hidden = x.dim(1);
  if (rows <= kCanonicalRowsMax) {
    step.ops(HyperReadArgs{.stack = stack,
                           .norm = norm_,
                           .down = down_,
                           .up = up_,
                           .inject = inject ? inject_ : Tensor{},
                           .out = x,
                           .logits = inject,
                           .streams = streams_,
                           .eps = eps_,
                           .rounding = step.rounding()});
    return;
  }
  const ArenaScope scope(step.arena);
  const Tensor normed = step.arena.take(step.dtype(), {rows, streams_ * hidden});
  step.ops(RmsNormArgs{.x = stack.split_last(hidden),
                       .w = norm_,
                       .out = normed.split_last(hidden),
                       .eps = eps_,
                       .weight = NormWeight::one_plus,
                       .rounding = step.rounding()});
  const Tensor down = step.linear(normed, down_, Site::hyper_connection);
  step.ops(ScaledSiluArgs{
      .x = down, .out = down, .scale = 1.0f / static_cast<float>(streams_), .rounding = step.rounding()});
  const Tensor gate = step.linear(down, up_, Site::hyper_connection);
  step.ops(StreamMixArgs{.x = normed, .u = gate, .out = x, .streams = streams_, .rounding = step.rounding()});
  if (inject) step.linear(normed, inject_, inject, Site::hyper_connection);
}

void HyperConnection::write(const Step& step, const Tensor& stack, const Tensor& y, const Tensor& inject) const {
  step.ops(StreamWriteArgs{.stack = stack, .y = y, .logits = inject, .streams = streams_, .rounding = step.rounding()});
}

}  // namespace offload
