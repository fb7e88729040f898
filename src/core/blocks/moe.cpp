#include "core/blocks/moe.h"

namespace offload {

Moe::Moe(const ModelSpec& spec, const MoeSpec& moe, int64_t expert_layer, const std::string& prefix, RankSlice slice,
         WeightLoader& loader)
    : spec_(moe), expert_layer_(expert_layer), shared_width_(moe.shared_intermediate / slice.world) {
  OFL_ASSERT(moe.shared_intermediate % slice.world == 0);
  const Range shared{slice.rank * shared_width_, shared_width_};
  const std::string stem = prefix + "shared_expert.";
  in_ = loader.matrix({{prefix + "gate.weight", moe.experts, spec.hidden},
                       {stem + "gate_proj.weight", moe.shared_intermediate, spec.hidden, {shared}},
                       {stem + "up_proj.weight", moe.shared_intermediate, spec.hidden, {shared}},
                       {prefix + "shared_expert_gate.weight", 1, spec.hidden}});
  shared_down_ = loader.matrix({{stem + "down_proj.weight", spec.hidden, moe.shared_intermediate, {}, shared}});
}

void Moe::forward(const Step& step, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(step.arena);
  const int64_t rows = step.rows(), hidden = x.dim(1), k = spec_.top_k;
  const Tensor projected = step.linear(x, in_);
  step.ops.mark();
  const Tensor ids = step.arena.take(DType::i32, {rows, k});
  const Tensor weights = step.arena.take(DType::f32, {rows, k});
  step.ops(RouterTopkArgs{.logits = projected.narrow(1, 0, spec_.experts),
                          .ids = ids,
                          .weights = weights,
                          .normalise = spec_.normalise,
                          .round_to = step.rounding() == Rounding::reference ? step.dtype() : DType::f32});

  const Tensor parts = step.arena.take(step.experts.parts_dtype(step.dtype()), {rows * k, hidden});
  const Tensor present = step.arena.take(DType::u8, {rows, k});
  step.experts.run(RoutedExperts{expert_layer_, x, ids, parts, present, step.rounding(), step.visits_left,
                                 step.math(Site::experts, rows)});

  const Tensor activated = step.arena.take(step.dtype(), {rows, shared_width_});
  Tensor shared;
  const auto share = [&] {
    step.ops(SwigluArgs{projected.narrow(1, spec_.experts, 2 * shared_width_), activated, step.rounding()});
    shared = step.linear(activated, shared_down_);
  };
  // One token leaves most of a device idle while its experts are chosen.
  if (rows == 1)
    step.ops.beside(share);
  else
    share();

  step.all_reduce(y, [&](const Tensor& out) {
    step.ops(MoeCombineArgs{.parts = parts,
                            .weights = weights,
                            .present = present,
                            .shared = shared,
                            .gate = projected.narrow(1, spec_.experts + 2 * shared_width_, 1),
                            .out = out,
                            .rounding = step.rounding()});
  });
}

}  // namespace offload
