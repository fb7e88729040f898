#include "core/blocks/gated_delta_net.h"

namespace offload {
namespace {

// Rows per chunk of the chunked form; what the published implementations use, so that splitting a prompt at multiples
// of it keeps the arithmetic.
constexpr int64_t kChunkRows = 64;

}  // namespace

GatedDeltaNet::GatedDeltaNet(const ModelSpec& spec, const GatedDeltaNetSpec& net, const std::string& prefix,
                             RankSlice slice, WeightLoader& loader, StateLayout& layout)
    : local_(net), eps_(spec.rms_eps) {
  OFL_ASSERT(net.key_heads % slice.world == 0);
  local_.key_heads = net.key_heads / slice.world;
  local_.value_heads = net.value_heads / slice.world;
  const int64_t keys = net.key_heads * net.key_dim, values = net.value_heads * net.value_dim;
  const Range key_rows{slice.rank * local_.key_heads * net.key_dim, local_.key_heads * net.key_dim};
  const Range value_rows{slice.rank * local_.value_heads * net.value_dim, local_.value_heads * net.value_dim};
  const Range heads{slice.rank * local_.value_heads, local_.value_heads};
  const std::vector<Range> qkv_rows = {
      key_rows, {keys + key_rows.begin, key_rows.count}, {2 * keys + value_rows.begin, value_rows.count}};

  in_ = loader.matrix({{prefix + "in_proj_qkv.weight", 2 * keys + values, spec.hidden, qkv_rows},
                       {prefix + "in_proj_z.weight", values, spec.hidden, {value_rows}},
                       {prefix + "in_proj_b.weight", net.value_heads, spec.hidden, {heads}},
                       {prefix + "in_proj_a.weight", net.value_heads, spec.hidden, {heads}}});
  const int64_t channels = 2 * key_rows.count + value_rows.count;
  conv_ = loader.vector(prefix + "conv1d.weight", {2 * keys + values, 1, net.conv_taps}, qkv_rows)
              .reshaped({channels, net.conv_taps});
  a_log_ = loader.vector(prefix + "A_log", {net.value_heads}, {heads});
  dt_bias_ = loader.vector(prefix + "dt_bias", {net.value_heads}, {heads});
  norm_ = loader.vector(prefix + "norm.weight", {net.value_dim});
  out_ = loader.matrix({{prefix + "out_proj.weight", spec.hidden, values, {}, value_rows}});
  history_ = layout.add(prefix + "conv_history", layout.activations(), net.conv_taps - 1, channels);
  state_ = layout.add(prefix + "state", DType::f32, local_.value_heads, net.key_dim, net.value_dim);
}

void GatedDeltaNet::forward(const Step& step, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(step.arena);
  const int64_t rows = step.rows(), heads = local_.value_heads, values = heads * local_.value_dim;
  const int64_t channels = conv_.dim(0);
  const Tensor projected = step.linear(x, in_);
  const Tensor z = projected.narrow(1, channels, values).split_last(local_.value_dim);
  const Tensor b = projected.narrow(1, channels + values, heads);
  const Tensor a = projected.narrow(1, channels + values + heads, heads);

  const Tensor qkv = step.arena.take(step.dtype(), {rows, channels});
  const Tensor history = step.sequence.tensor(history_);
  step.ops(CausalConvSiluArgs{.x = projected.narrow(1, 0, channels),
                              .w = conv_,
                              .history = history.reshaped({history.dim(0), history.dim(1)}),
                              .out = qkv,
                              .dilation = 1,
                              .rounding = step.rounding()});
  const Tensor mixed = step.arena.take(step.dtype(), {rows, values});
  step.ops(GatedDeltaArgs{.qkv = qkv,
                          .a = a,
                          .b = b,
                          .a_log = a_log_,
                          .dt_bias = dt_bias_,
                          .state = step.sequence.tensor(state_),
                          .out = mixed,
                          .key_heads = local_.key_heads,
                          .chunk_rows = rows == 1 ? 0 : kChunkRows,
                          .rounding = step.rounding()});
  step.ops(GatedNormArgs{.x = mixed.split_last(local_.value_dim),
                         .z = z,
                         .w = norm_,
                         .out = mixed.split_last(local_.value_dim),
                         .eps = eps_,
                         .gate = local_.output_gate,
                         .rounding = step.rounding()});
  step.linear_all_reduce(mixed, out_, y);
}

}  // namespace offload
