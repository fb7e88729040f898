// ModelSpec: what a config.json says, as data that blocks are built from. One struct per block variant; sizes are those
// of the whole model, before tensor parallelism.
//
// Pure values; models/*.cpp fill and validate them, so that a spec in hand is consistent.
#ifndef OFFLOAD_CORE_MODEL_SPEC_H_
#define OFFLOAD_CORE_MODEL_SPEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/ops.h"

namespace offload {

// inv_freq[i] of the rotated pairs, and the factor on cos and sin (1 but for YaRN).
struct RopeSpec {
  std::vector<float> inv_freq;
  float scale = 1.0f;
};

// C residual streams; each sub-layer reads a gated mean of their norms and writes back with one weight per stream.
struct HyperConnectionSpec {
  int64_t streams = 0;
  int64_t lowrank = 0;
};

struct GatedDeltaNetSpec {
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t conv_taps = 0;
  Gate output_gate = Gate::sigmoid;
};

// Attention over blocks chosen by an indexer, plus the incomplete tail block.
struct QsaSpec {
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t index_heads = 0;
  int64_t index_dim = 0;
  int64_t ratio = 0;          // positions per block
  int64_t budget_blocks = 0;  // blocks attended at most
};

struct MoeSpec {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t intermediate = 0;
  int64_t shared_intermediate = 0;
  bool normalise = true;
};

// Embedding of hashed n-grams, looked up in a host-side table and mixed into the residual streams.
struct NgramEmbeddingSpec {
  int64_t ordinal = 0;  // index among the layers that have one; enters the hash
  int64_t width = 0;    // of the concatenated rows
  int64_t ngram_size = 0;
  int64_t heads_per_ngram = 0;
  int64_t vocab_base = 0;
  int64_t row_divisor = 0;
  int64_t seed = 0;
  int64_t conv_taps = 0;
  int32_t eos_id = 0;
};

struct LayerSpec {
  std::optional<NgramEmbeddingSpec> ngram;
  std::variant<GatedDeltaNetSpec, QsaSpec> mixer;
  MoeSpec moe;
};

struct ModelSpec {
  std::string model_type;
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t context_max = 0;  // positions the model was made for
  float rms_eps = 1e-6f;
  RopeSpec rope;
  HyperConnectionSpec hyper;
  std::vector<LayerSpec> layers;
  std::vector<std::string> warnings;  // one line each, for a log: what the config left open and what was chosen
};

// The numbers of ranks, up to 64, that the model can be split over: by key, value and query heads, the shared expert's
// intermediate dimension and, with `sliced_experts`, the routed experts'. Ascending; 1 is always among them.
std::vector<int> tensor_parallel_worlds(const ModelSpec& spec, bool sliced_experts);

// What is split, with its counts, for a message: "24 query heads, 16 key heads".
std::string tensor_parallel_obstacle(const ModelSpec& spec);

}  // namespace offload

#endif  // OFFLOAD_CORE_MODEL_SPEC_H_
