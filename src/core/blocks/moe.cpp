#include "core/blocks/moe.h"

namespace offload {

Moe::Moe(const ModelSpec& spec, const MoeSpec& moe, int64_t expert_layer, const std::string& prefix, RankSlice slice,
         WeightLoader& loader)
    : spec_(moe),
      expert_layer_(expert_layer),
      hidden_(spec.hidden),
      shared_width_(moe.shared_intermediate / slice.world) {
  OFL_ASSERT(moe.shared_intermediate % slice.world == 0);
  const Range shared{slice.rank * shared_width_, shared_width_};
  const std::string stem = prefix + "shared_expert.";
  in_ = loader.matrix({{prefix + "gate.weight", moe.experts, spec.hidden},
                       {stem + "gate_proj.weight", moe.shared_intermediate, spec.hidden, {shared}},
                       {stem + "up_proj.weight", moe.shared_intermediate, spec.hidden, {shared}},
                       {prefix + "shared_expert_gate.weight", 1, spec.hidden}});
  shared_down_ = loader.matrix({{stem + "down_proj.weight", spec.hidden, moe.shared_intermediate, {}, shared}});
}

Moe::Parts Moe::take(const Step& step) const {
  const int64_t rows = step.rows(), k = spec_.top_k;
  Arena& arena = step.arena;
  return {.projected = step.take_product(rows, in_.dim(0)),
          .ids = arena.take(DType::i32, {rows, k}),
          .weights = arena.take(DType::f32, {rows, k}),
          .outs = arena.take(step.experts.parts_dtype(step.dtype()), {rows * k, hidden_}),
          .present = arena.take(DType::u8, {rows, k}),
          .activated = arena.take(step.dtype(), {rows, shared_width_}),
          .shared = step.take_product(rows, hidden_)};
}

void Moe::forward(const Step& step, const Tensor& x, const Tensor& y) const {
  choose(step, x);
  run_experts(step, x);
  share(step);
  combine(step, y);
}

void Moe::choose(const Step& step, const Tensor& x) const {
  const ArenaScope scope(step.arena);
  const Parts parts = take(step);
  step.linear(x, in_, parts.projected);
  step.ops.mark();
  step.ops(RouterTopkArgs{.logits = parts.projected.narrow(1, 0, spec_.experts),
                          .ids = parts.ids,
                          .weights = parts.weights,
                          .normalise = spec_.normalise,
                          .round_to = step.rounding() == Rounding::reference ? step.dtype() : DType::f32});
}

void Moe::run_experts(const Step& step, const Tensor& x) const {
  const ArenaScope scope(step.arena);
  const Parts parts = take(step);
  step.experts.run(RoutedExperts{expert_layer_, x, parts.ids, parts.outs, parts.present, step.rounding(),
                                 step.visits_left, step.math(Site::experts, step.rows())});
}

void Moe::share(const Step& step) const {
  const ArenaScope scope(step.arena);
  const Parts parts = take(step);
  const auto body = [&] {
    step.ops(SwigluArgs{parts.projected.narrow(1, spec_.experts, 2 * shared_width_), parts.activated, step.rounding()});
    step.linear(parts.activated, shared_down_, parts.shared);
  };
  // One token leaves most of a device idle while its experts are chosen.
  if (step.rows() == 1)
    step.ops.beside(body);
  else
    body();
}

void Moe::combine(const Step& step, const Tensor& y) const {
  const ArenaScope scope(step.arena);
  const Parts parts = take(step);
  step.all_reduce(y, [&](const Tensor& out) {
    step.ops(MoeCombineArgs{.parts = parts.outs,
                            .weights = parts.weights,
                            .present = step.experts.has_all() ? Tensor{} : parts.present,
                            .shared = parts.shared,
                            .gate = parts.projected.narrow(1, spec_.experts + 2 * shared_width_, 1),
                            .out = out,
                            .rounding = step.rounding()});
  });
}

}  // namespace offload
