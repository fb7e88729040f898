// Mixture of experts: router, routed experts (run by whoever owns residency), gated shared expert, combination.
// Router and gate are replicated on all ranks; the shared expert's intermediate dimension is split.
#ifndef OFFLOAD_CORE_BLOCKS_MOE_H_
#define OFFLOAD_CORE_BLOCKS_MOE_H_

#include <string>

#include "core/model_spec.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class Moe {
 public:
  // `expert_layer`: this layer's index among the layers with experts.
  Moe(const ModelSpec& spec, const MoeSpec& moe, int64_t expert_layer, const std::string& prefix, RankSlice slice,
      WeightLoader& loader);

  // y = the block's output for x, both [rows, hidden].
  void forward(const Step& step, const Tensor& x, const Tensor& y) const;

  // forward() is these, in this order, or with share() before run_experts(). What they hand on lies where the step's
  // arena is when they begin, which must be the same place for all. Only run_experts() does anything but have ops run.
  void choose(const Step& step, const Tensor& x) const;  // the experts of each row
  void run_experts(const Step& step, const Tensor& x) const;
  void share(const Step& step) const;                     // the shared expert
  void combine(const Step& step, const Tensor& y) const;  // all of them

 private:
  // What the parts hand on.
  struct Parts {
    Tensor projected;          // [rows, router | shared gate | shared up | gate of the shared expert]
    Tensor ids, weights;       // [rows, K]
    Tensor outs, present;      // [rows * K, hidden]; [rows, K]
    Tensor activated, shared;  // [rows, shared width]; [rows, hidden]
  };
  Parts take(const Step& step) const;

  MoeSpec spec_;
  int64_t expert_layer_, hidden_;
  int64_t shared_width_;  // of this rank
  Tensor in_;             // [router | shared gate_proj | shared up_proj | shared_expert_gate rows, hidden]
  Tensor shared_down_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BLOCKS_MOE_H_
