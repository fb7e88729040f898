// Selection and combination: block and expert top-k, and the weighted sum of the experts' outputs.
//
// Selection works on 64-bit keys, (score, index) in one number, so that it is exact, total (NaN included) and O(n).
#include <bit>

#include "cpu/cpu_ops.h"
#include "cpu/cpu_ops_rows.h"

namespace offload::cpu {
namespace {

// Larger for a larger score, and for the lower index of equal scores. -0 equals +0.
uint64_t selection_key(float score, int64_t index) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << 32) | (0xffffffffu - static_cast<uint32_t>(index));
}

int64_t index_of(uint64_t key) {
  return static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key));
}

bool before(uint64_t x, uint64_t y) {
  return x > y;
}

}  // namespace

int64_t CpuOps::scratch_bytes(const BlockTopkArgs& a) const {
  Arena arena;
  arena.take(DType::u64, {threads_, a.scores.dim(1)});
  return arena.peak_bytes();
}

void CpuOps::execute(const BlockTopkArgs& a) {
  const int64_t rows = a.counts.dim(0), budget = a.blocks.dim(1);
  if (rows == 0) return;
  Arena arena = scratch_arena();
  const Tensor buffers = arena.take(DType::u64, {threads_, a.scores.dim(1)});
  for_each_row(threads_, rows, 4 * a.scores.dim(1), [&](int64_t r, int thread) {
    const int64_t complete = (a.first + r + 1) / a.ratio, count = std::min(budget, complete);
    int32_t* blocks = a.blocks.row<int32_t>(r);
    a.counts.as<int32_t>()[r] = static_cast<int32_t>(count);
    if (complete <= budget) {
      for (int64_t b = 0; b < complete; ++b) blocks[b] = static_cast<int32_t>(b);
      return;
    }
    const float* scores = a.scores.row<float>(r);
    uint64_t* keys = buffers.row<uint64_t>(thread);
    for (int64_t b = 0; b < complete; ++b) keys[b] = selection_key(scores[b], b);
    std::nth_element(keys, keys + count - 1, keys + complete, before);
    const uint64_t last = keys[count - 1];
    for (int64_t b = 0; b < complete; ++b)
      if (selection_key(scores[b], b) >= last) *blocks++ = static_cast<int32_t>(b);
  });
}

int64_t CpuOps::scratch_bytes(const RouterTopkArgs& a) const {
  Arena arena;
  arena.take(DType::f32, {threads_, round_to_lanes(a.logits.dim(1))});
  arena.take(DType::u64, {threads_, a.logits.dim(1)});
  return arena.peak_bytes();
}

void CpuOps::execute(const RouterTopkArgs& a) {
  const int64_t rows = a.logits.dim(0), experts = a.logits.dim(1), k = a.ids.dim(1);
  if (rows == 0) return;
  Arena arena = scratch_arena();
  const Tensor probabilities = arena.take(DType::f32, {threads_, round_to_lanes(experts)});
  const Tensor buffers = arena.take(DType::u64, {threads_, experts});
  for_each_row(threads_, rows, 4 * experts, [&](int64_t r, int thread) {
    float* p = probabilities.row<float>(thread);
    uint64_t* keys = buffers.row<uint64_t>(thread);
    load_row(kernels_, a.logits, row_offset(a.logits, r), p, experts);
    // Logits order as probabilities do, and without the rounding of exp.
    for (int64_t e = 0; e < experts; ++e) keys[e] = selection_key(p[e], e);
    std::nth_element(keys, keys + k - 1, keys + experts, before);
    std::sort(keys, keys + k, before);
    const float sum = kernels_.exp_sum(p, kernels_.max(p, experts), experts);
    float chosen = 0;
    for (int64_t s = 0; s < k; ++s) chosen += p[index_of(keys[s])] / sum;
    for (int64_t s = 0; s < k; ++s) {
      const int64_t e = index_of(keys[s]);
      const float weight = a.normalise ? p[e] / sum / chosen : p[e] / sum;
      a.ids.row<int32_t>(r)[s] = static_cast<int32_t>(e);
      a.weights.row<float>(r)[s] = a.round_to == DType::bf16 ? to_float(to_bf16(weight)) : weight;
    }
  });
}

void CpuOps::execute(const MoeCombineArgs& a) {
  const Rnd rnd(kernels_, a.out.dtype(), a.rounding);
  const int64_t n = a.out.dim(1), k = a.weights.dim(1);
  for_each_row(threads_, a.out.dim(0), n * (k + 1), [&](int64_t r, int) {
    const float* weights = a.weights.row<float>(r);
    const uint8_t* present = a.present ? a.present.row<uint8_t>(r) : nullptr;
    const float gate = a.gate ? rnd.one(sigmoid_one(kernels_, load_one(a.gate, row_offset(a.gate, r)))) : 1.0f;
    RowBuffer routed, x;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      std::fill_n(routed.f, kRowChunk, 0.0f);
      for (int64_t s = 0; s < k; ++s) {
        if (present != nullptr && present[s] == 0) continue;
        load_row(kernels_, a.parts, row_offset(a.parts, r * k + s) + begin, x, count);
        kernels_.axpy(routed, weights[s], x, count);
      }
      if (a.shared) {
        load_row(kernels_, a.shared, row_offset(a.shared, r) + begin, x, count);
        kernels_.scale(x, gate, count);
        rnd(x, count);
        rnd(routed, count);
        kernels_.add(routed, x, count);
      }
      store_row(kernels_, routed, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

}  // namespace offload::cpu
