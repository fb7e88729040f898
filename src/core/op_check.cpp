// Preconditions of every op. A violation is a bug in the block that built the arguments, so these assert; what users
// and files supply was validated before.
#include <algorithm>

#include "core/canonical.h"
#include "core/ops.h"

namespace offload {
namespace {

bool is_float(const Tensor& t) {
  return t.dtype() == DType::f32 || t.dtype() == DType::bf16;
}
bool is(const Tensor& t, DType dtype, int rank) {
  return t.dtype() == dtype && t.rank() == rank;
}
bool shape_is(const Tensor& t, int64_t d0, int64_t d1) {
  return t.rank() == 2 && t.dim(0) == d0 && t.dim(1) == d1;
}
bool shape_is(const Tensor& t, int64_t d0, int64_t d1, int64_t d2) {
  return t.rank() == 3 && t.dim(0) == d0 && t.dim(1) == d1 && t.dim(2) == d2;
}
bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.rank() != b.rank()) return false;
  for (int i = 0; i < a.rank(); ++i)
    if (a.dim(i) != b.dim(i)) return false;
  return true;
}
bool inner_contiguous(const Tensor& t) {
  return t.rank() >= 1 && (t.dim(t.rank() - 1) <= 1 || t.stride(t.rank() - 1) == 1);
}
// An activation tensor of the given rank: F32 or BF16, last dimension dense.
bool activation(const Tensor& t, int rank) {
  return is_float(t) && t.rank() == rank && inner_contiguous(t);
}
bool vector_f32(const Tensor& t, int64_t n) {
  return is(t, DType::f32, 1) && t.dim(0) == n && t.contiguous();
}

}  // namespace

void check(const CopyArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && same_shape(a.x, a.out));
}

void check(const GatherRowsArgs& a) {
  OFL_ASSERT(activation(a.table, 2) && activation(a.out, 2) && is(a.ids, DType::i32, 1) && a.ids.contiguous());
  OFL_ASSERT(a.copies > 0 && shape_is(a.out, a.ids.dim(0), a.copies * a.table.dim(1)));
}

void check(const LinearArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && is_float(a.w) && a.w.contiguous() && activation(a.out, 2));
  OFL_ASSERT(a.w.rank() == 2 && a.w.dim(1) == a.x.dim(1) && shape_is(a.out, a.x.dim(0), a.w.dim(0)));
  OFL_ASSERT(a.out.dtype() == DType::f32 || a.out.dtype() == a.x.dtype());
}

void check(const RmsNormArgs& a) {
  OFL_ASSERT(activation(a.x, 3) && activation(a.out, 3) && same_shape(a.x, a.out) && a.out.dtype() == a.x.dtype());
  OFL_ASSERT(is(a.w, DType::f32, 2) && a.w.contiguous() && a.w.dim(1) == a.x.dim(2));
  OFL_ASSERT(a.w.dim(0) == 1 || a.w.dim(0) == a.x.dim(1));
}

void check(const ScaledSiluArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && same_shape(a.x, a.out) && a.out.dtype() == a.x.dtype());
}

void check(const SwigluArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && shape_is(a.x, a.out.dim(0), 2 * a.out.dim(1)));
}

void check(const AddArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.y, 2) && activation(a.out, 2));
  OFL_ASSERT(same_shape(a.x, a.y) && same_shape(a.x, a.out));
  OFL_ASSERT(a.x.dtype() == a.y.dtype() && a.x.dtype() == a.out.dtype());
}

void check(const MulSigmoidArgs& a) {
  OFL_ASSERT(activation(a.x, 3) && activation(a.gate, 3) && activation(a.out, 3));
  OFL_ASSERT(same_shape(a.x, a.gate) && same_shape(a.x, a.out) && a.x.dtype() == a.out.dtype());
}

void check(const StreamMixArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.u, 2) && activation(a.out, 2) && same_shape(a.x, a.u));
  OFL_ASSERT(a.streams > 0 && shape_is(a.x, a.out.dim(0), a.streams * a.out.dim(1)));
  OFL_ASSERT(a.x.dtype() == a.u.dtype() && a.x.dtype() == a.out.dtype());
}

void check(const StreamWriteArgs& a) {
  OFL_ASSERT(activation(a.stack, 2) && activation(a.y, 2) && activation(a.logits, 2));
  OFL_ASSERT(a.streams > 0 && shape_is(a.stack, a.y.dim(0), a.streams * a.y.dim(1)));
  OFL_ASSERT(shape_is(a.logits, a.y.dim(0), a.streams) && a.stack.dtype() == a.y.dtype());
}

void check(const HyperReadArgs& a) {
  OFL_ASSERT(activation(a.stack, 2) && activation(a.out, 2) && a.stack.dtype() == a.out.dtype() && a.streams > 0);
  const int64_t rows = a.stack.dim(0), width = a.stack.dim(1);
  OFL_ASSERT(rows <= kCanonicalRowsMax && shape_is(a.out, rows, width / a.streams) && width % a.streams == 0);
  OFL_ASSERT(is(a.norm, DType::f32, 2) && a.norm.contiguous() && shape_is(a.norm, a.streams, width / a.streams));
  OFL_ASSERT(a.down.rank() == 2 && a.down.contiguous() && a.down.dim(1) == width);
  OFL_ASSERT(a.up.rank() == 2 && a.up.contiguous() && shape_is(a.up, width, a.down.dim(0)));
  OFL_ASSERT(a.up.dtype() == a.down.dtype() && static_cast<bool>(a.inject) == static_cast<bool>(a.logits));
  if (!a.inject) return;
  OFL_ASSERT(a.inject.dtype() == a.down.dtype() && a.inject.contiguous() && shape_is(a.inject, a.streams, width));
  OFL_ASSERT(activation(a.logits, 2) && shape_is(a.logits, rows, a.streams));
}

void check(const CausalConvSiluArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && same_shape(a.x, a.out) && a.x.data() != a.out.data());
  OFL_ASSERT(is_float(a.w) && a.w.rank() == 2 && a.w.contiguous() && a.w.dim(0) == a.x.dim(1) && a.w.dim(1) >= 1);
  OFL_ASSERT(a.dilation >= 1 && shape_is(a.history, a.dilation * (a.w.dim(1) - 1), a.x.dim(1)));
  OFL_ASSERT(a.history.contiguous() && a.history.dtype() == a.x.dtype() && a.out.dtype() == a.x.dtype());
}

void check(const GatedDeltaArgs& a) {
  OFL_ASSERT(is(a.state, DType::f32, 3) && a.state.contiguous() && a.key_heads > 0 && a.chunk_rows >= 0);
  const int64_t heads = a.state.dim(0), key_dim = a.state.dim(1), value_dim = a.state.dim(2), rows = a.qkv.dim(0);
  OFL_ASSERT(heads % a.key_heads == 0);
  OFL_ASSERT(activation(a.qkv, 2) && a.qkv.dim(1) == 2 * a.key_heads * key_dim + heads * value_dim);
  OFL_ASSERT(activation(a.a, 2) && shape_is(a.a, rows, heads) && activation(a.b, 2) && shape_is(a.b, rows, heads));
  OFL_ASSERT(vector_f32(a.a_log, heads) && vector_f32(a.dt_bias, heads));
  OFL_ASSERT(activation(a.out, 2) && shape_is(a.out, rows, heads * value_dim) && a.out.dtype() == a.qkv.dtype());
}

void check(const GatedNormArgs& a) {
  OFL_ASSERT(activation(a.x, 3) && activation(a.z, 3) && activation(a.out, 3));
  OFL_ASSERT(same_shape(a.x, a.z) && same_shape(a.x, a.out) && a.x.dtype() == a.out.dtype());
  OFL_ASSERT(vector_f32(a.w, a.x.dim(2)));
}

void check(const RopeTableArgs& a) {
  OFL_ASSERT(is(a.inv_freq, DType::f32, 1) && a.inv_freq.contiguous() && is(a.out, DType::f32, 3) &&
             a.out.contiguous());
  OFL_ASSERT(shape_is(a.out, a.out.dim(0), a.inv_freq.dim(0), 2) && a.first >= 0 && a.step >= 1);
}

void check(const NormRopeArgs& a) {
  OFL_ASSERT(activation(a.x, 3) && activation(a.out, 3) && same_shape(a.x, a.out) && a.x.dtype() == a.out.dtype());
  OFL_ASSERT(!a.w || vector_f32(a.w, a.x.dim(2)));
  OFL_ASSERT(is(a.table, DType::f32, 3) && a.table.contiguous() && a.table.dim(0) == a.x.dim(0) && a.table.dim(2) == 2);
  OFL_ASSERT(2 * a.table.dim(1) <= a.x.dim(2));
}

void check(const MeanPoolArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && a.pool > 0 && a.x.dtype() == a.out.dtype());
  OFL_ASSERT(shape_is(a.x, a.out.dim(0) * a.pool, a.out.dim(1)));
}

void check(const BlockScoresArgs& a) {
  OFL_ASSERT(activation(a.q, 3) && activation(a.keys, 2) && a.keys.dim(1) == a.q.dim(2));
  OFL_ASSERT(is(a.out, DType::f32, 2) && inner_contiguous(a.out) && a.out.dim(0) == a.q.dim(0));
  OFL_ASSERT(a.first >= 0 && a.ratio > 0 && (a.first + a.q.dim(0)) / a.ratio <= a.out.dim(1));
  OFL_ASSERT((a.first + a.q.dim(0)) / a.ratio <= a.keys.dim(0));
}

void check(const BlockTopkArgs& a) {
  OFL_ASSERT(is(a.scores, DType::f32, 2) && inner_contiguous(a.scores) && is(a.blocks, DType::i32, 2));
  OFL_ASSERT(inner_contiguous(a.blocks) && is(a.counts, DType::i32, 1) && a.counts.contiguous());
  OFL_ASSERT(a.blocks.dim(0) == a.counts.dim(0) && a.scores.dim(0) == a.counts.dim(0) && a.blocks.dim(1) > 0);
  OFL_ASSERT(a.first >= 0 && a.ratio > 0 && (a.first + a.counts.dim(0)) / a.ratio <= a.scores.dim(1));
}

void check(const AttentionArgs& a) {
  OFL_ASSERT(activation(a.q, 3) && activation(a.k, 3) && activation(a.v, 3) && activation(a.out, 3));
  OFL_ASSERT(same_shape(a.q, a.out) && same_shape(a.k, a.v) && a.q.dim(2) == a.k.dim(2));
  OFL_ASSERT(a.k.dim(1) > 0 && a.q.dim(1) % a.k.dim(1) == 0 && a.first >= 0 && a.first + a.q.dim(0) <= a.k.dim(0));
  OFL_ASSERT(a.q.dtype() == a.k.dtype() && a.q.dtype() == a.v.dtype() && a.q.dtype() == a.out.dtype());
  OFL_ASSERT(static_cast<bool>(a.blocks) == static_cast<bool>(a.counts));
  if (a.blocks) {
    OFL_ASSERT(a.ratio > 0 && is(a.blocks, DType::i32, 2) && inner_contiguous(a.blocks));
    OFL_ASSERT(is(a.counts, DType::i32, 1) && a.counts.contiguous());
    OFL_ASSERT(a.blocks.dim(0) == a.q.dim(0) && a.counts.dim(0) == a.q.dim(0));
  }
}

void check(const RouterTopkArgs& a) {
  OFL_ASSERT(activation(a.logits, 2) && is(a.ids, DType::i32, 2) && is(a.weights, DType::f32, 2));
  OFL_ASSERT(inner_contiguous(a.ids) && inner_contiguous(a.weights) && same_shape(a.ids, a.weights));
  OFL_ASSERT(a.ids.dim(0) == a.logits.dim(0) && a.ids.dim(1) >= 1 && a.ids.dim(1) <= a.logits.dim(1));
}

void check(const SwigluExpertsArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && a.x.dim(1) == a.out.dim(1) && a.intermediate > 0);
  OFL_ASSERT(a.out.dtype() == DType::f32 || a.out.dtype() == a.x.dtype());
  OFL_ASSERT(a.weight_dtype == DType::f32 || a.weight_dtype == DType::bf16);
  OFL_ASSERT(a.rows.size() == a.out_rows.size());
  for (const ExpertRun& run : a.runs) {
    OFL_ASSERT(run.gate_up != nullptr && run.down != nullptr && run.begin >= 0 && run.count >= 0);
    OFL_ASSERT(run.begin + run.count <= static_cast<int64_t>(a.rows.size()));
  }
}

void check(const SwigluRoutedArgs& a) {
  OFL_ASSERT(activation(a.x, 2) && activation(a.out, 2) && a.x.dim(1) == a.out.dim(1) && a.intermediate > 0);
  OFL_ASSERT(a.out.dtype() == DType::f32 || a.out.dtype() == a.x.dtype());
  OFL_ASSERT(is_float(a.slab) && inner_contiguous(a.slab) && a.slab.dim(1) == 3 * a.intermediate * a.x.dim(1));
  OFL_ASSERT(is(a.ids, DType::i32, 2) && a.ids.contiguous() && a.ids.dim(0) == a.x.dim(0));
  OFL_ASSERT(is(a.present, DType::u8, 2) && a.present.contiguous() && same_shape(a.ids, a.present));
  OFL_ASSERT(is(a.slots, DType::i32, 1) && a.slots.contiguous() && a.out.dim(0) == a.ids.elements());
}

void check(const MoeCombineArgs& a) {
  OFL_ASSERT(activation(a.parts, 2) && is(a.weights, DType::f32, 2) && inner_contiguous(a.weights));
  OFL_ASSERT(activation(a.out, 2) && shape_is(a.parts, a.out.dim(0) * a.weights.dim(1), a.out.dim(1)));
  OFL_ASSERT(a.weights.dim(0) == a.out.dim(0));
  OFL_ASSERT(!a.present ||
             (is(a.present, DType::u8, 2) && same_shape(a.present, a.weights) && inner_contiguous(a.present)));
  OFL_ASSERT(!a.shared || (activation(a.shared, 2) && same_shape(a.shared, a.out)));
  OFL_ASSERT(!a.gate || (a.shared && activation(a.gate, 2) && shape_is(a.gate, a.out.dim(0), 1)));
}

void check(const TopkArgs& a) {
  OFL_ASSERT(is(a.x, DType::f32, 2) && inner_contiguous(a.x) && is(a.values, DType::f32, 2) &&
             is(a.ids, DType::i32, 2));
  OFL_ASSERT(inner_contiguous(a.values) && inner_contiguous(a.ids) && same_shape(a.values, a.ids));
  OFL_ASSERT(a.ids.dim(0) == a.x.dim(0) && a.ids.dim(1) >= 1 && a.ids.dim(1) <= std::min(a.x.dim(1), kTopkMax));
}

void check(const SignedRootGateArgs& a) {
  OFL_ASSERT(activation(a.key, 3) && activation(a.query, 3) && activation(a.out, 3) && activation(a.value, 2));
  OFL_ASSERT(same_shape(a.key, a.query) && same_shape(a.key, a.out) && shape_is(a.value, a.key.dim(0), a.key.dim(2)));
  OFL_ASSERT(a.key.dtype() == a.query.dtype() && a.key.dtype() == a.out.dtype() && a.key.dtype() == a.value.dtype());
}

}  // namespace offload
