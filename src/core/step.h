// Step: everything that one forward pass over tokens of one sequence needs, handed from block to block.
//
// Owns nothing. In planning mode (ops.planning()) the same calls size arenas; no tensor is touched.
#ifndef OFFLOAD_CORE_STEP_H_
#define OFFLOAD_CORE_STEP_H_

#include <cstdint>
#include <functional>
#include <span>

#include "core/arena.h"
#include "core/arm.h"
#include "core/backend.h"
#include "core/collective.h"
#include "core/experts.h"
#include "core/ops.h"
#include "core/sequence.h"

namespace offload {

// How a step computes: the dtype of activations, where formulas round, and the rules of its arm. F32 is the oracle;
// BF16 with Rounding::reference rounds as the published implementations, with Rounding::fused once per fused chain.
struct Arithmetic {
  DType activations = DType::bf16;
  Rounding rounding = Rounding::fused;
  MathRules rules = {};
};

// Is told what block-sparse attention selected: blocks I32 [rows, budget], counts I32 [rows], on the device.
class SelectionObserver {
 public:
  virtual ~SelectionObserver() = default;
  virtual void selected(const Tensor& blocks, const Tensor& counts) = 0;
};

// A sum over the ranks that runs beside other work until Step::finish_sum().
struct DeferredSum {
  Tensor part;  // F32 [at least a part's rows, hidden]: what this rank adds, then the sum
};

struct Step {
  Backend& backend;
  Ops& ops;
  Arena& arena;
  ExpertRunner& experts;
  SequenceState& sequence;
  Collective* collective = nullptr;  // null for one rank
  Arithmetic arithmetic;
  std::span<const int32_t> tokens;          // REQUIRES: every id is in the vocabulary
  int64_t first = 0;                        // position of tokens[0]
  SelectionObserver* selections = nullptr;  // null: nobody asks; not called when planning

  // A chunk of so many rows and more passes the layers in halves: the sums over the ranks of one run beside the work of
  // the other.
  int64_t overlap_rows_min = INT64_MAX;

  // Filled by the model; what it hands to a layer's blocks is one chunk of the tokens.
  Tensor rope{};                    // F32 [rows, half, 2] at positions first, first + 1, ...
  Tensor rope_blocks{};             // F32 [blocks completed in these rows, half, 2] at their first positions
  int64_t visits_left = 0;          // chunks of the tokens that go through the same layer next
  DeferredSum* deferred = nullptr;  // where all_reduce() leaves its sum to be finished; null: it is in y at once

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  DType dtype() const { return arithmetic.activations; }
  Rounding rounding() const { return arithmetic.rounding; }

  // Of a product of so many rows. A step of more rows than experts have a canonical order for is a prompt.
  Math math(Site site, int64_t product_rows) const {
    const Phase phase = rows() <= kCanonicalRowsMax ? Phase::decode : Phase::prefill;
    return arithmetic.rules.math_of(site, phase, product_rows);
  }

  // y = x w^T.
  void linear(const Tensor& x, const Tensor& w, const Tensor& y, Site site = Site::dense) const {
    ops(LinearArgs{.x = x, .w = w, .out = y, .math = math(site, x.dim(0))});
  }
  // The same into the step's arena.
  Tensor linear(const Tensor& x, const Tensor& w, Site site = Site::dense) const {
    const Tensor y = take_product(x.dim(0), w.dim(0));
    linear(x, w, y, site);
    return y;
  }
  // [rows, n] of dtype A in the step's arena. Its rows are aligned to 16 bytes, which matrix units ask for.
  Tensor take_product(int64_t rows, int64_t n) const {
    constexpr int64_t kElements = 8;
    return arena.take(dtype(), {rows, (n + kElements - 1) / kElements * kElements}).narrow(1, 0, n);
  }
  // y = x w^T summed over the ranks, each of which has a part of the columns: in FP32, rounded once.
  void linear_all_reduce(const Tensor& x, const Tensor& w, const Tensor& y) const {
    all_reduce(y, [&](const Tensor& out) { linear(x, w, out); });
  }
  // Has `compute` write this rank's part of y, and leaves in y the sum over the ranks. With several ranks the parts and
  // their sum are F32 and rounded to y's dtype at the end.
  template <typename Compute>
  void all_reduce(const Tensor& y, const Compute& compute) const {
    if (collective == nullptr) return compute(y);
    if (deferred != nullptr) {
      const Tensor part = deferred->part.narrow(0, 0, y.dim(0));
      compute(part);
      if (!ops.planning()) collective->start_sum(part);
      return;
    }
    const ArenaScope scope(arena);
    const Tensor part = arena.take(DType::f32, {y.dim(0), y.dim(1)});
    compute(part);
    if (!ops.planning()) collective->all_reduce_sum(part);
    ops(CopyArgs{part, y});
  }
  // y = the sum that was deferred; the oldest first.
  void finish_sum(const DeferredSum& sum, const Tensor& y) const {
    if (!ops.planning()) collective->finish_sum();
    ops(CopyArgs{sum.part.narrow(0, 0, y.dim(0)), y});
  }
};

}  // namespace offload

#endif  // OFFLOAD_CORE_STEP_H_
