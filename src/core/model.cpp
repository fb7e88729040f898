#include "core/model.h"

namespace offload {
namespace {

std::string layer_prefix(size_t i) {
  return fmt::format("layers.{}.", i);
}

}  // namespace

std::vector<ExpertLayer> Model::expert_layers(const ModelSpec& spec) {
  std::vector<ExpertLayer> layers;
  for (size_t i = 0; i < spec.layers.size(); ++i) layers.push_back({layer_prefix(i) + "mlp.experts"});
  return layers;
}

ExpertShape Model::expert_shape(const ModelSpec& spec, DType dtype) {
  const MoeSpec& moe = spec.layers.front().moe;
  return {moe.experts, spec.hidden, moe.intermediate, dtype};
}

Model::Model(const ModelSpec& spec, RankSlice slice, WeightLoader& loader, StateLayout& layout)
    : spec_(spec),
      embedding_(loader.matrix({{"embed_tokens.weight", spec.vocab, spec.hidden}})),
      vocab_{spec.vocab * slice.rank / slice.world,
             spec.vocab * (slice.rank + 1) / slice.world - spec.vocab * slice.rank / slice.world},
      lm_head_(loader.matrix({{"lm_head.weight", spec.vocab, spec.hidden, {vocab_}}})),
      inv_freq_(loader.constant(spec.rope.inv_freq)),
      final_mixer_(spec, HyperConnection::Role::final_mixer, "hyper_connection_mixer.", loader) {
  layers_.reserve(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    const std::string prefix = layer_prefix(i);
    using Role = HyperConnection::Role;
    std::optional<NgramEmbedding> ngram;
    if (layer.ngram) ngram.emplace(spec, *layer.ngram, prefix + "ple.", loader, layout);
    const auto mixer = [&]() -> std::variant<GatedDeltaNet, Qsa> {
      if (const auto* net = std::get_if<GatedDeltaNetSpec>(&layer.mixer))
        return GatedDeltaNet(spec, *net, prefix + "linear_attn.", slice, loader, layout);
      const QsaSpec& qsa = std::get<QsaSpec>(layer.mixer);
      block_ratio_ = qsa.ratio;
      return Qsa(spec, qsa, prefix + "self_attn.", slice, loader, layout);
    };
    layers_.push_back(
        Layer{std::move(ngram), HyperConnection(spec, Role::around_block, prefix + "attn_hyper_connection.", loader),
              mixer(), HyperConnection(spec, Role::around_block, prefix + "mlp_hyper_connection.", loader),
              Moe(spec, layer.moe, static_cast<int64_t>(i), prefix + "mlp.", slice, loader)});
  }
}

std::vector<NgramEmbedding*> Model::table_users() {
  std::vector<NgramEmbedding*> users;
  for (Layer& layer : layers_)
    if (layer.ngram) users.push_back(&*layer.ngram);
  return users;
}

void Model::fill_rope(Step& step) const {
  const int64_t half = inv_freq_.dim(0);
  const auto fill = [&](const Tensor& out, int64_t first, int64_t stride) {
    step.ops(RopeTableArgs{.inv_freq = inv_freq_,
                           .out = out,
                           .first = first,
                           .step = stride,
                           .scale = spec_.rope.scale,
                           .round_to = step.dtype()});
    return out;
  };
  step.rope = fill(step.arena.take(DType::f32, {step.rows(), half, 2}), step.first, 1);
  if (block_ratio_ == 0) return;
  const int64_t first_block = step.first / block_ratio_;
  const int64_t completed = (step.first + step.rows()) / block_ratio_ - first_block;
  const Tensor blocks = step.arena.take(DType::f32, {step.rows() / block_ratio_ + 1, half, 2});
  step.rope_blocks = fill(blocks.narrow(0, 0, completed), first_block * block_ratio_, block_ratio_);
}

Tensor Model::forward(Step& step, const LayerTap& tap) {
  const int64_t rows = step.rows(), hidden = spec_.hidden;
  const Tensor output = step.arena.take(step.dtype(), {rows, hidden});
  const ArenaScope scope(step.arena);
  const Tensor ids = step.arena.take(DType::i32, {rows});
  for (Layer& layer : layers_)
    if (layer.ngram) layer.ngram->fetch(step);
  if (!step.ops.planning()) step.backend.upload(std::as_bytes(step.tokens), ids);
  fill_rope(step);
  const Tensor stack = step.arena.take(step.dtype(), {rows, spec_.hyper.streams * hidden});
  step.ops(GatherRowsArgs{.table = embedding_, .ids = ids, .out = stack, .copies = spec_.hyper.streams});

  const Tensor x = step.arena.take(step.dtype(), {rows, hidden});
  const Tensor y = step.arena.take(step.dtype(), {rows, hidden});
  const Tensor inject = final_mixer_.take_inject(step);
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    if (layer.ngram) layer.ngram->add_to(step, stack);
    layer.mixer_connection.read(step, stack, x, inject);
    std::visit([&](const auto& mixer) { mixer.forward(step, x, y); }, layer.mixer);
    layer.mixer_connection.write(step, stack, y, inject);
    layer.moe_connection.read(step, stack, x, inject);
    layer.moe.forward(step, x, y);
    layer.moe_connection.write(step, stack, y, inject);
    if (tap && !step.ops.planning()) tap(i, stack);
  }
  final_mixer_.read(step, stack, output, {});
  if (!step.ops.planning()) step.sequence.advance(step.tokens);
  return output;
}

}  // namespace offload
