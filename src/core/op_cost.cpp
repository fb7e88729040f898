// Bytes and flops of every op: each tensor crosses the memory interface once, an FMA counts two. Elementwise flops are
// counted as one per formula step; they bound nothing and only keep the sums honest.
#include "core/ops.h"

namespace offload {
namespace {

int64_t total_bytes(std::initializer_list<const Tensor*> tensors) {
  int64_t bytes = 0;
  for (const Tensor* tensor : tensors)
    if (*tensor) bytes += tensor->bytes();
  return bytes;
}

Cost elementwise(std::initializer_list<const Tensor*> read, std::initializer_list<const Tensor*> written,
                 int64_t flops) {
  return {total_bytes(read), total_bytes(written), flops};
}

// sum over rows r of the complete blocks (first + r + 1) / ratio.
int64_t visible_blocks(int64_t first, int64_t rows, int64_t ratio) {
  int64_t blocks = 0;
  for (int64_t r = 0; r < rows; ++r) blocks += (first + r + 1) / ratio;
  return blocks;
}

}  // namespace

Cost cost(const CopyArgs& a) {
  return elementwise({&a.x}, {&a.out}, 0);
}

Cost cost(const GatherRowsArgs& a) {
  return {a.ids.bytes() + a.ids.dim(0) * a.table.dim(1) * dtype_bytes(a.table.dtype()), a.out.bytes(), 0};
}

Cost cost(const LinearArgs& a) {
  if (a.x.dim(0) == 0) return {};
  return elementwise({&a.x, &a.w}, {&a.out}, 2 * a.x.dim(0) * a.w.elements());
}

Cost cost(const RmsNormArgs& a) {
  return elementwise({&a.x, &a.w}, {&a.out}, 4 * a.x.elements());
}
Cost cost(const ScaledSiluArgs& a) {
  return elementwise({&a.x}, {&a.out}, 4 * a.x.elements());
}
Cost cost(const SwigluArgs& a) {
  return elementwise({&a.x}, {&a.out}, 5 * a.out.elements());
}
Cost cost(const AddArgs& a) {
  return elementwise({&a.x, &a.y}, {&a.out}, a.x.elements());
}
Cost cost(const MulSigmoidArgs& a) {
  return elementwise({&a.x, &a.gate}, {&a.out}, 4 * a.x.elements());
}
Cost cost(const StreamMixArgs& a) {
  return elementwise({&a.x, &a.u}, {&a.out}, 5 * a.x.elements());
}

Cost cost(const StreamWriteArgs& a) {
  return elementwise({&a.stack, &a.y, &a.logits}, {&a.stack}, 2 * a.stack.elements());
}

Cost cost(const HyperReadArgs& a) {
  const int64_t rows = a.stack.dim(0), width = a.stack.dim(1);
  const int64_t products = a.down.elements() + a.up.elements() + (a.inject ? a.inject.elements() : 0);
  return elementwise({&a.stack, &a.norm, &a.down, &a.up, &a.inject}, {&a.out, &a.logits},
                     rows * (2 * products + 11 * width));
}

Cost cost(const CausalConvSiluArgs& a) {
  return elementwise({&a.x, &a.w, &a.history}, {&a.out, &a.history},
                     2 * a.x.elements() * a.w.dim(1) + 4 * a.x.elements());
}

Cost cost(const GatedDeltaArgs& a) {
  const int64_t rows = a.qkv.dim(0), heads = a.state.dim(0), key_dim = a.state.dim(1), value_dim = a.state.dim(2);
  // Recurrence: decay, read, rank-one update, output = 7 per state element and row. Chunked form of N rows: k.k and q.k
  // (2 N key_dim each), the two triangular solves (N (key_dim + value_dim)), the three products with the state (2
  // key_dim value_dim each) and the intra-chunk output (N value_dim), per row.
  const int64_t n = a.chunk_rows;
  const int64_t per_row = n == 0
                              ? 7 * key_dim * value_dim
                              : 4 * n * key_dim + n * (key_dim + value_dim) + 6 * key_dim * value_dim + n * value_dim;
  return elementwise({&a.qkv, &a.a, &a.b, &a.a_log, &a.dt_bias, &a.state}, {&a.out, &a.state}, rows * heads * per_row);
}

Cost cost(const GatedNormArgs& a) {
  return elementwise({&a.x, &a.z, &a.w}, {&a.out}, 8 * a.x.elements());
}
Cost cost(const RopeTableArgs& a) {
  return elementwise({&a.inv_freq}, {&a.out}, a.out.elements());
}
Cost cost(const NormRopeArgs& a) {
  return elementwise({&a.x, &a.w, &a.table}, {&a.out}, 7 * a.x.elements());
}
Cost cost(const MeanPoolArgs& a) {
  return elementwise({&a.x}, {&a.out}, a.x.elements());
}

Cost cost(const BlockScoresArgs& a) {
  const int64_t rows = a.q.dim(0);
  const int64_t pairs = visible_blocks(a.first, rows, a.ratio);
  const int64_t keys_read = (a.first + rows) / a.ratio * a.keys.dim(1) * dtype_bytes(a.keys.dtype());
  return {a.q.bytes() + keys_read, pairs * 4, pairs * a.q.dim(1) * (2 * a.q.dim(2) + 2)};
}

Cost cost(const BlockTopkArgs& a) {
  const int64_t pairs = visible_blocks(a.first, a.counts.dim(0), a.ratio);
  return {pairs * 4, a.blocks.bytes() + a.counts.bytes(), pairs};
}

Cost cost(const AttentionArgs& a) {
  const int64_t rows = a.q.dim(0), heads = a.q.dim(1), n = a.q.dim(2);
  int64_t pairs = 0, positions_read = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t visible = a.first + r + 1;
    const int64_t attended =
        a.blocks ? std::min(visible / a.ratio, a.blocks.dim(1)) * a.ratio + visible % a.ratio : visible;
    pairs += attended;
    positions_read = std::max(positions_read, a.blocks ? std::min(a.first + rows, positions_read + attended) : visible);
  }
  const int64_t kv_bytes = 2 * positions_read * a.k.dim(1) * n * dtype_bytes(a.k.dtype());
  return {a.q.bytes() + kv_bytes, a.out.bytes(), pairs * heads * (4 * n + 5)};
}

Cost cost(const RouterTopkArgs& a) {
  return elementwise({&a.logits}, {&a.ids, &a.weights}, 4 * a.logits.elements());
}

Cost cost(const SwigluExpertsArgs& a) {
  const int64_t hidden = a.x.dim(1);
  Cost sum;
  for (const ExpertRun& run : a.runs) {
    if (run.count == 0) continue;
    sum.bytes_read += 3 * a.intermediate * hidden * dtype_bytes(a.weight_dtype);
    sum.bytes_read += run.count * hidden * dtype_bytes(a.x.dtype());
    sum.bytes_written += run.count * hidden * dtype_bytes(a.out.dtype());
    sum.flops += run.count * (6 * a.intermediate * hidden + 5 * a.intermediate);
  }
  return sum;
}

// As if every slot had an expert of its own, as far as there are experts.
Cost cost(const SwigluRoutedArgs& a) {
  const int64_t hidden = a.x.dim(1), slots = a.ids.elements(), weights = 3 * a.intermediate * hidden;
  return {std::min(slots, a.slots.dim(0)) * weights * dtype_bytes(a.slab.dtype()) + a.x.bytes() + a.ids.bytes(),
          a.out.bytes() + a.present.bytes(), slots * (2 * weights + 5 * a.intermediate)};
}

Cost cost(const MoeCombineArgs& a) {
  return elementwise({&a.parts, &a.weights, &a.present, &a.shared, &a.gate}, {&a.out}, 2 * a.parts.elements());
}

Cost cost(const TopkArgs& a) {
  return elementwise({&a.x}, {&a.values, &a.ids}, a.x.elements());
}

Cost cost(const SignedRootGateArgs& a) {
  return elementwise({&a.key, &a.query, &a.value}, {&a.out}, 3 * a.key.elements());
}

}  // namespace offload
