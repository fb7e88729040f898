// Gated delta net: short causal convolution, gated delta rule with an FP32 state, gated norm. Split over ranks by
// heads.
#ifndef OFFLOAD_CORE_BLOCKS_GATED_DELTA_NET_H_
#define OFFLOAD_CORE_BLOCKS_GATED_DELTA_NET_H_

#include <string>

#include "core/model_spec.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class GatedDeltaNet {
 public:
  GatedDeltaNet(const ModelSpec& spec, const GatedDeltaNetSpec& net, const std::string& prefix, RankSlice slice,
                WeightLoader& loader, StateLayout& layout);

  // y = the mixer's output for x, both [rows, hidden]; advances the sequence's state.
  void forward(const Step& step, const Tensor& x, const Tensor& y) const;

 private:
  GatedDeltaNetSpec local_;  // heads of this rank
  float eps_;
  Tensor in_;  // [q | k | v | z | b | a rows, hidden]
  Tensor conv_, a_log_, dt_bias_, norm_, out_;
  size_t history_ = 0, state_ = 0;  // in SequenceState
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BLOCKS_GATED_DELTA_NET_H_
