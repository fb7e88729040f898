// Model: the blocks of one rank, and the one forward loop over them.
//
// Built twice from the same constructor: on a measuring arena to validate names and count bytes, then for real.
// Confined to its rank's thread.
#ifndef OFFLOAD_CORE_MODEL_H_
#define OFFLOAD_CORE_MODEL_H_

#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "core/blocks/gated_delta_net.h"
#include "core/blocks/hyper_connection.h"
#include "core/blocks/moe.h"
#include "core/blocks/ngram_embedding.h"
#include "core/blocks/qsa.h"
#include "core/model_spec.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class Model {
 public:
  Model(const ModelSpec& spec, RankSlice slice, WeightLoader& loader, StateLayout& layout);

  // Where the routed experts of each layer lie in the checkpoint, and their common sizes (dtype as in the checkpoint).
  static std::vector<ExpertLayer> expert_layers(const ModelSpec& spec);
  static ExpertShape expert_shape(const ModelSpec& spec, DType dtype);

  // Blocks that want a host table, in layer order.
  std::vector<NgramEmbedding*> table_users();

  // Called with the residual stack [rows, streams * hidden] after each layer; for tests and parity reports.
  using LayerTap = std::function<void(size_t layer, const Tensor& stack)>;

  // hidden [rows, hidden] A, from the step's arena: what lm_head reads. Advances the sequence.
  Tensor forward(Step& step, const LayerTap& tap = {});

  // [vocab().count, hidden]: logits are its product with rows of what forward() returns.
  const Tensor& lm_head() const { return lm_head_; }

  // The tokens whose logits this rank computes.
  Range vocab() const { return vocab_; }

 private:
  struct Layer {
    std::optional<NgramEmbedding> ngram;
    HyperConnection mixer_connection;
    std::variant<GatedDeltaNet, Qsa> mixer;
    HyperConnection moe_connection;
    Moe moe;
  };

  void fill_rope(Step& step) const;

  const ModelSpec& spec_;
  int64_t block_ratio_ = 0;  // positions per attention block; 0 without block-sparse layers
  Tensor embedding_;
  Range vocab_;
  Tensor lm_head_, inv_freq_;
  std::vector<Layer> layers_;
  HyperConnection final_mixer_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_MODEL_H_
