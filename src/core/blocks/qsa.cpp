#include "core/blocks/qsa.h"

#include <algorithm>
#include <cmath>

namespace offload {
namespace {

// Scores are computed and reduced to selections for tiles of rows of about this many scores (16 MiB).
constexpr int64_t kScoreTile = 4 << 20;

}  // namespace

Qsa::Qsa(const ModelSpec& spec, const QsaSpec& qsa, const std::string& prefix, RankSlice slice, WeightLoader& loader,
         StateLayout& layout)
    : spec_(qsa), query_heads_(qsa.query_heads / slice.world), eps_(spec.rms_eps) {
  OFL_ASSERT(qsa.query_heads % slice.world == 0);
  // Query heads of one rank read kv heads [begin, end); with more ranks than kv heads the ranks of a group share one.
  const int64_t group = qsa.query_heads / qsa.kv_heads;
  const int64_t kv_begin = slice.rank * query_heads_ / group;
  const int64_t kv_end = ((slice.rank + 1) * query_heads_ + group - 1) / group;
  kv_heads_ = kv_end - kv_begin;
  OFL_ASSERT(query_heads_ % kv_heads_ == 0 && (kv_heads_ == 1 || query_heads_ / kv_heads_ == group));

  const int64_t head = qsa.head_dim, hidden = spec.hidden, index_rows = (qsa.index_heads + 1) * qsa.index_dim;
  const Range query_rows{slice.rank * query_heads_ * 2 * head, query_heads_ * 2 * head};
  const Range kv_rows{kv_begin * head, kv_heads_ * head};
  in_ = loader.matrix({{prefix + "q_proj.weight", qsa.query_heads * 2 * head, hidden, {query_rows}},
                       {prefix + "k_proj.weight", qsa.kv_heads * head, hidden, {kv_rows}},
                       {prefix + "v_proj.weight", qsa.kv_heads * head, hidden, {kv_rows}},
                       {prefix + "indexer.index_qk_proj.weight", index_rows, hidden}});
  q_norm_ = loader.vector(prefix + "q_norm.weight", {head});
  k_norm_ = loader.vector(prefix + "k_norm.weight", {head});
  index_q_norm_ = loader.vector(prefix + "indexer.q_layernorm.weight", {qsa.index_dim});
  index_k_norm_ = loader.vector(prefix + "indexer.k_layernorm.weight", {qsa.index_dim});
  out_ = loader.matrix({{prefix + "o_proj.weight",
                         hidden,
                         qsa.query_heads * head,
                         {},
                         {slice.rank * query_heads_ * head, query_heads_ * head}}});

  const DType dtype = layout.activations();
  keys_ = layout.add(prefix + "keys", dtype, layout.context(), kv_heads_, head);
  values_ = layout.add(prefix + "values", dtype, layout.context(), kv_heads_, head);
  block_keys_ = layout.add(prefix + "block_keys", dtype, layout.context() / qsa.ratio, qsa.index_dim);
  raw_tail_ = layout.add(prefix + "raw_tail", dtype, qsa.ratio, qsa.index_dim);
}

// Completes the blocks whose last raw key arrives with this chunk and keeps the incomplete rest for the next.
void Qsa::append_block_keys(const Step& step, const Tensor& raw_keys) const {
  const ArenaScope scope(step.arena);
  const int64_t held = step.first % spec_.ratio, rows = raw_keys.dim(0), width = spec_.index_dim;
  const int64_t completed = (held + rows) / spec_.ratio, first_block = step.first / spec_.ratio;
  const int64_t rest = held + rows - completed * spec_.ratio;
  const Tensor tail = step.sequence.tensor(raw_tail_).reshaped({spec_.ratio, width});
  // Sized for the worst alignment to the block grid, so that a plan at one position covers all.
  const Tensor raw = step.arena.take(step.dtype(), {spec_.ratio - 1 + rows, width}).narrow(0, 0, held + rows);
  step.ops(CopyArgs{tail.narrow(0, 0, held), raw.narrow(0, 0, held)});
  step.ops(CopyArgs{raw_keys, raw.narrow(0, held, rows)});
  const Tensor pooled = step.arena.take(step.dtype(), {rows / spec_.ratio + 1, width}).narrow(0, 0, completed);
  step.ops(MeanPoolArgs{.x = raw.narrow(0, 0, completed * spec_.ratio), .out = pooled, .pool = spec_.ratio});
  const Tensor cache = step.sequence.tensor(block_keys_);
  step.ops(NormRopeArgs{.x = pooled.reshaped({completed, 1, width}),
                        .w = index_k_norm_,
                        .table = step.rope_blocks,
                        .out = cache.reshaped({cache.dim(0), 1, width}).narrow(0, first_block, completed),
                        .eps = eps_,
                        .rounding = step.rounding()});
  step.ops(CopyArgs{raw.narrow(0, completed * spec_.ratio, rest), tail.narrow(0, 0, rest)});
}

Qsa::Selection Qsa::select(const Step& step, const Tensor& index_q) const {
  const int64_t rows = step.rows(), blocks_visible = (step.first + rows) / spec_.ratio;
  if (blocks_visible <= spec_.budget_blocks) return {};
  const Selection selection = {step.arena.take(DType::i32, {rows, spec_.budget_blocks}),
                               step.arena.take(DType::i32, {rows})};
  const ArenaScope scope(step.arena);
  const Tensor cache = step.sequence.tensor(block_keys_);
  const int64_t capacity = std::min(rows * cache.dim(0), std::max(kScoreTile, cache.dim(0)));
  const int64_t tile = std::min(rows, capacity / blocks_visible);
  const Tensor scores =
      step.arena.take(DType::f32, {capacity}).narrow(0, 0, tile * blocks_visible).reshaped({tile, blocks_visible});
  for (int64_t begin = 0; begin < rows; begin += tile) {
    const int64_t count = std::min(tile, rows - begin);
    const Tensor tile_scores = scores.narrow(0, 0, count);
    step.ops(BlockScoresArgs{.q = index_q.narrow(0, begin, count),
                             .keys = cache.reshaped({cache.dim(0), spec_.index_dim}),
                             .out = tile_scores,
                             .first = step.first + begin,
                             .ratio = spec_.ratio,
                             .scale = 1.0f / std::sqrt(static_cast<float>(spec_.index_dim))});
    step.ops(BlockTopkArgs{.scores = tile_scores,
                           .blocks = selection.blocks.narrow(0, begin, count),
                           .counts = selection.counts.narrow(0, begin, count),
                           .first = step.first + begin,
                           .ratio = spec_.ratio});
  }
  if (step.selections != nullptr && !step.ops.planning()) step.selections->selected(selection.blocks, selection.counts);
  return selection;
}

void Qsa::forward(const Step& step, const Tensor& x, const Tensor& y) const {
  const ArenaScope scope(step.arena);
  const int64_t rows = step.rows(), head = spec_.head_dim, index_q_width = spec_.index_heads * spec_.index_dim;
  const Tensor projected = step.linear(x, in_);
  int64_t at = 0;
  const auto next = [&](int64_t width) {
    at += width;
    return projected.narrow(1, at - width, width);
  };
  const Tensor query_gate = next(query_heads_ * 2 * head).split_last(2 * head);
  const Tensor k = next(kv_heads_ * head).split_last(head);
  const Tensor v = next(kv_heads_ * head);
  const Tensor index_q_raw = next(index_q_width).split_last(spec_.index_dim);
  const Tensor index_k_raw = next(spec_.index_dim);

  const auto norm_rope = [&](const Tensor& in, const Tensor& w, const Tensor& out) {
    step.ops(NormRopeArgs{.x = in, .w = w, .table = step.rope, .out = out, .eps = eps_, .rounding = step.rounding()});
  };
  const Tensor q = step.arena.take(step.dtype(), {rows, query_heads_, head});
  const Tensor key_cache = step.sequence.tensor(keys_), value_cache = step.sequence.tensor(values_);
  norm_rope(query_gate.narrow(2, 0, head), q_norm_, q);
  norm_rope(k, k_norm_, key_cache.narrow(0, step.first, rows));
  step.ops(CopyArgs{v, value_cache.reshaped({value_cache.dim(0), kv_heads_ * head}).narrow(0, step.first, rows)});
  const Tensor index_q = step.arena.take(step.dtype(), {rows, spec_.index_heads, spec_.index_dim});
  norm_rope(index_q_raw, index_q_norm_, index_q);
  append_block_keys(step, index_k_raw);

  const Selection selection = select(step, index_q);
  const Tensor mixed = step.arena.take(step.dtype(), {rows, query_heads_, head});
  step.ops(AttentionArgs{.q = q,
                         .k = key_cache,
                         .v = value_cache,
                         .out = mixed,
                         .blocks = selection.blocks,
                         .counts = selection.counts,
                         .first = step.first,
                         .ratio = spec_.ratio,
                         .scale = 1.0f / std::sqrt(static_cast<float>(head)),
                         .rounding = step.rounding()});
  step.ops(
      MulSigmoidArgs{.x = mixed, .gate = query_gate.narrow(2, head, head), .out = mixed, .rounding = step.rounding()});
  step.linear_all_reduce(mixed.reshaped({rows, query_heads_ * head}), out_, y);
}

}  // namespace offload
