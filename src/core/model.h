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

  // Called with a chunk's residual stack [rows, streams * hidden] after each layer, or with each of its halves; for
  // tests and parity reports. May throw to stop.
  using LayerTap = std::function<void(size_t layer, const Tensor& stack)>;

  // Has the step's tokens pass each layer in chunks of `chunk` rows (the last one may be smaller), all chunks before
  // the next layer: one chunk is the plain order of layers. A chunk's bits do not depend on what is around it. Chunks
  // of step.overlap_rows_min rows and more pass as two halves, which count as chunks of their own. Returns the residual
  // stacks [rows, streams * hidden], from the step's arena. Advances the sequence.
  Tensor forward(Step& step, int64_t chunk, const LayerTap& tap = {});

  // How often such a step passes each layer.
  static int64_t visits(const Step& step, int64_t chunk);

  // hidden [rows, hidden] A = what lm_head reads of a chunk's `stack`, which forward() of this step returned.
  void read_out(const Step& step, const Tensor& stack, const Tensor& hidden) const;

  // [vocab().count, hidden]: logits are its product with rows of what read_out() gives.
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

    void forward(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y, const Tensor& inject);

    // Each in two parts, between which the sum over the ranks may be deferred: y = the sub-layer of x, then y goes into
    // the stack.
    void start_mixer(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y, const Tensor& inject);
    void start_experts(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y, const Tensor& inject);
  };

  struct Half;
  class Stretch;

  void forward_one_row(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y, const Tensor& inject,
                       const LayerTap& tap);
  void forward_by_halves(const Step& step, int64_t chunk, const Tensor& stacks, const LayerTap& tap);
  void fill_rope(Step& step) const;
  Step chunk_of(const Step& step, int64_t begin, int64_t rows) const;

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
