// Hyper-connection: the residual path as C streams. A sub-layer reads a gated mean of the normalised streams and its
// output is added to every stream with that stream's own weight. Replicated on all ranks.
#ifndef OFFLOAD_CORE_BLOCKS_HYPER_CONNECTION_H_
#define OFFLOAD_CORE_BLOCKS_HYPER_CONNECTION_H_

#include <string>

#include "core/model_spec.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class HyperConnection {
 public:
  // `prefix`: "layers.3.attn_hyper_connection.". The final mixer has no injection.
  enum class Role { around_block, final_mixer };
  HyperConnection(const ModelSpec& spec, Role role, const std::string& prefix, WeightLoader& loader);

  // x [rows, hidden] = the gated mean of `stack` [rows, streams * hidden]; inject [rows, streams] = the logits that
  // write() needs (empty in the final mixer).
  void read(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& inject) const;

  // stack += y * 2 sigmoid(inject / streams), per stream.
  void write(const Step& step, const Tensor& stack, const Tensor& y, const Tensor& inject) const;

  // [rows, streams] of the dtype that the arithmetic keeps the logits in: F32 when fused.
  Tensor take_inject(const Step& step, int64_t rows) const;

 private:
  int64_t streams_;
  float eps_;
  Tensor norm_;    // F32 [streams, hidden]
  Tensor down_;    // [lowrank, streams * hidden]
  Tensor up_;      // [streams * hidden, lowrank]
  Tensor inject_;  // [streams, streams * hidden]
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BLOCKS_HYPER_CONNECTION_H_
