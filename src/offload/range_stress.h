// Range stress: a twin of a checkpoint that computes the same function with very different magnitudes.
//
// Where a product's output channel reaches a later product's column through linear steps alone, the channel's row is
// multiplied by 2^a and the column by 2^-a, a drawn for each channel. That is so for
//   routed and shared experts: row i of up and column i of down; silu(gate) * up is linear in up
//   block-sparse attention: row (kv head g, j) of v and columns (h, j) of o for all query heads h of g; the softmax
//   mixes positions, the gate multiplies after it
// and not for the gated delta rule (its values pass a SiLU before and a norm behind) nor for hyper-connections and
// n-gram embeddings (norms). BF16 and FP32 with FP32 sums give the same bits on the twin: powers of two commute with
// every rounding in between. FP16 has too few binades for it unless rows are scaled.
// A channel keeps a = 0 when one of its weights is subnormal, infinite or NaN, or would become so.
// BF16 weights alone; fused and per-expert storage. Reads and writes one expert at a time. Confined to one thread.
#ifndef OFFLOAD_OFFLOAD_RANGE_STRESS_H_
#define OFFLOAD_OFFLOAD_RANGE_STRESS_H_

#include <cstdint>
#include <functional>
#include <string>

namespace offload {

struct RangeStressOptions {
  int exponent_max = 12;  // a is drawn from [-exponent_max, exponent_max]
  uint64_t seed = 0;
};

struct RangeStressCounts {
  int64_t channels = 0;       // that a was drawn for
  int64_t channels_kept = 0;  // of them left alone, as a weight would have left BF16's normal range
};

// Rewrites the weights of the checkpoint folder `model_dir` in place. `progress` is told the channels done; it may
// throw to stop, which leaves a folder of neither function. Throws Error{input} for a checkpoint that lacks a tensor or
// has one of another type, Error{resource} when a file cannot be written.
RangeStressCounts stress_in_place(const std::string& model_dir, const RangeStressOptions& options,
                                  const std::function<void(const RangeStressCounts&)>& progress = {});

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RANGE_STRESS_H_
