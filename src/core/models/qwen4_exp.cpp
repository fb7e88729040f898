#include "core/models/qwen4_exp.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace offload {
namespace {

// Reads fields of one config with the defaults of the published configuration class, and refuses by field name.
class ConfigFields {
 public:
  ConfigFields(const Json& json, std::string_view origin) : json_(json), origin_(origin) {}

  // `most` keeps every product of three sizes inside 63 bits.
  int64_t integer(const char* key, int64_t fallback, int64_t least = 1, int64_t most = int64_t{1} << 20) const {
    const int64_t value = json_get<int64_t>(json_, key, fallback, origin_);
    if (value < least || value > most)
      throw_error(ErrorCode::input, "{}: {} is {}, expected {} to {}", origin_, key, value, least, most);
    return value;
  }
  int64_t required(const char* key) const {
    if (!has(key)) throw_error(ErrorCode::input, "{}: {} is missing", origin_, key);
    return integer(key, 0);
  }
  double number(const char* key, double fallback) const { return json_get<double>(json_, key, fallback, origin_); }
  bool boolean(const char* key, bool fallback) const { return json_get<bool>(json_, key, fallback, origin_); }
  std::string text(const char* key, std::string fallback) const {
    return json_get<std::string>(json_, key, std::move(fallback), origin_);
  }
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  const Json& at(const char* key) const { return json_.at(key); }

  void require(bool condition, std::string_view message) const {
    if (!condition) throw_error(ErrorCode::input, "{}: {}", origin_, message);
  }
  std::string_view origin() const { return origin_; }

 private:
  const Json& json_;
  std::string_view origin_;
};

// True for a gated delta net, false for block-sparse attention.
bool is_linear_layer(const std::string& name, const ConfigFields& config) {
  static constexpr std::string_view kSparse[] = {"full_attention", "qwen_sparse_attention", "indexed_attention",
                                                 "deepseek_sparse_attention", "hybrid_indexed"};
  if (name == "linear_attention") return true;
  if (std::find(std::begin(kSparse), std::end(kSparse), name) != std::end(kSparse)) return false;
  throw_error(ErrorCode::input, "{}: layer_types holds \"{}\"; supported: linear_attention, {}", config.origin(),
              printable(name), fmt::join(kSparse, ", "));
}

std::vector<bool> linear_layers(const ConfigFields& config, int64_t layers) {
  std::vector<bool> linear;
  if (!config.has("layer_types")) {
    const int64_t interval = config.integer("full_attention_interval", 4);
    for (int64_t i = 0; i < layers; ++i) linear.push_back((i + 1) % interval != 0);
    return linear;
  }
  const Json& types = config.at("layer_types");
  config.require(types.is_array() && static_cast<int64_t>(types.size()) == layers,
                 fmt::format("layer_types must be a list of num_hidden_layers = {} names", layers));
  for (const Json& type : types) {
    config.require(type.is_string(), "layer_types must hold strings");
    linear.push_back(is_linear_layer(type.get<std::string>(), config));
  }
  return linear;
}

// YaRN: frequencies above the ramp are divided by `factor`, those below kept, cos and sin scaled by 0.1 ln(factor) + 1.
void apply_yarn(const ConfigFields& rope, double theta, RopeSpec& spec) {
  const double factor = rope.number("factor", 0.0);
  const double original = rope.number("original_max_position_embeddings", 0.0);
  rope.require(factor >= 1.0 && original >= 1.0,
               "rope_type yarn needs factor >= 1 and original_max_position_embeddings >= 1");
  const double beta_fast = rope.number("beta_fast", 32.0), beta_slow = rope.number("beta_slow", 1.0);
  rope.require(beta_fast > 0 && beta_slow > 0, "beta_fast and beta_slow must be positive");
  const double d = 2.0 * static_cast<double>(spec.inv_freq.size());
  const auto correction = [&](double rotations) {
    return d * std::log(original / (2.0 * M_PI * rotations)) / (2.0 * std::log(theta));
  };
  const double fast = correction(beta_fast), slow = correction(beta_slow);
  rope.require(std::isfinite(fast) && std::isfinite(slow),
               "original_max_position_embeddings, beta_fast and beta_slow give no finite YaRN ramp");
  const double low = std::max(std::floor(fast), 0.0);
  double high = std::min(std::ceil(slow), d - 1.0);
  if (high <= low) high = low + 0.001;
  for (size_t i = 0; i < spec.inv_freq.size(); ++i) {
    const float ramp = static_cast<float>(std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0));
    const float frequency = spec.inv_freq[i];
    spec.inv_freq[i] = frequency * (1.0f - ramp) + frequency / static_cast<float>(factor) * ramp;
  }
  spec.scale = static_cast<float>(0.1 * std::log(factor) + 1.0);
}

RopeSpec rope_spec(const ConfigFields& config, int64_t head_dim) {
  config.require(config.has("rope_parameters") && config.at("rope_parameters").is_object(),
                 "rope_parameters is missing");
  const ConfigFields rope(config.at("rope_parameters"), config.origin());
  const double theta = rope.number("rope_theta", 10000.0);
  const double factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0));
  rope.require(theta > 1.0 && factor > 0.0 && factor <= 1.0,
               "rope_theta must be above 1 and partial_rotary_factor in (0, 1]");
  const auto rotary_dim = static_cast<int64_t>(static_cast<double>(head_dim) * factor);
  rope.require(rotary_dim >= 2 && rotary_dim % 2 == 0, "head_dim * partial_rotary_factor must be even and at least 2");
  RopeSpec spec;
  for (int64_t i = 0; i < rotary_dim / 2; ++i) {
    const float power = std::pow(static_cast<float>(theta), static_cast<float>(2 * i) / static_cast<float>(rotary_dim));
    spec.inv_freq.push_back(1.0f / power);
  }
  const std::string type = rope.text("rope_type", "default");
  if (type == "yarn") {
    apply_yarn(rope, theta, spec);
  } else if (type != "default") {
    throw_error(ErrorCode::input, "{}: rope_type \"{}\" is not supported; supported: default, yarn", config.origin(),
                printable(type));
  }
  return spec;
}

GatedDeltaNetSpec delta_net_spec(const ConfigFields& config, std::vector<std::string>& warnings) {
  GatedDeltaNetSpec spec;
  spec.key_heads = config.integer("linear_num_key_heads", 16);
  spec.value_heads = config.integer("linear_num_value_heads", 32);
  spec.key_dim = config.integer("linear_key_head_dim", 128);
  spec.value_dim = config.integer("linear_value_head_dim", 128);
  spec.conv_taps = config.integer("linear_conv_kernel_dim", 4, 2);
  config.require(spec.value_heads % spec.key_heads == 0,
                 fmt::format("linear_num_value_heads ({}) must be a multiple of linear_num_key_heads ({})",
                             spec.value_heads, spec.key_heads));
  if (!config.has("output_gate_type"))
    warnings.push_back(fmt::format("{}: output_gate_type is absent; hidden_act is used", config.origin()));
  const std::string gate = config.text("output_gate_type", config.text("hidden_act", "silu"));
  config.require(gate == "sigmoid" || gate == "silu",
                 fmt::format("output_gate_type \"{}\" is not supported; supported: sigmoid, silu", printable(gate)));
  spec.output_gate = gate == "sigmoid" ? Gate::sigmoid : Gate::silu;
  return spec;
}

QsaSpec qsa_spec(const ConfigFields& config, int64_t rotary_dim) {
  QsaSpec spec;
  spec.query_heads = config.integer("num_attention_heads", 16);
  spec.kv_heads = config.integer("num_key_value_heads", 2);
  spec.head_dim = config.integer("head_dim", 256);
  spec.index_heads = config.required("indexer_n_heads");
  spec.index_dim = config.required("indexer_head_dim");
  spec.ratio = config.required("indexer_compress_ratio");
  const int64_t budget = config.required("indexer_budget");
  const int64_t index_kv_heads = config.required("indexer_kv_heads");
  config.require(index_kv_heads == 1, fmt::format("indexer_kv_heads is {}, only 1 is supported", index_kv_heads));
  config.require(
      budget % spec.ratio == 0,
      fmt::format("indexer_budget ({}) must be a multiple of indexer_compress_ratio ({})", budget, spec.ratio));
  spec.budget_blocks = budget / spec.ratio;
  config.require(spec.query_heads % spec.kv_heads == 0,
                 fmt::format("num_attention_heads ({}) must be a multiple of num_key_value_heads ({})",
                             spec.query_heads, spec.kv_heads));
  config.require(
      rotary_dim <= spec.index_dim,
      fmt::format("indexer_head_dim ({}) is smaller than the rotary dimension ({})", spec.index_dim, rotary_dim));
  config.require(!config.boolean("attention_bias", false), "attention_bias true is not supported");
  return spec;
}

MoeSpec moe_spec(const ConfigFields& config) {
  MoeSpec spec;
  spec.experts = config.integer("num_experts", 512);
  spec.top_k = config.integer("num_experts_per_tok", 10);
  spec.intermediate = config.integer("moe_intermediate_size", 512);
  spec.shared_intermediate = config.integer("shared_expert_intermediate_size", 512);
  spec.normalise = config.boolean("norm_topk_prob", true);
  config.require(spec.top_k <= spec.experts,
                 fmt::format("num_experts_per_tok ({}) exceeds num_experts ({})", spec.top_k, spec.experts));
  const std::string act = config.text("hidden_act", "silu");
  config.require(act == "silu", fmt::format("hidden_act \"{}\" is not supported; supported: silu", printable(act)));
  return spec;
}

int32_t ngram_eos(const ConfigFields& config) {
  config.require(config.has("eos_token_id"), "eos_token_id is missing; the n-gram embedding needs it");
  const Json& eos = config.at("eos_token_id");
  const Json& first = eos.is_array() && !eos.empty() ? eos.front() : eos;
  config.require(first.is_number_unsigned() && first.get<uint64_t>() <= std::numeric_limits<int32_t>::max(),
                 "eos_token_id must be a token id or a list of them");
  return first.get<int32_t>();
}

// Layer index -> its n-gram embedding. ple_layer_ids are one-based.
void add_ngram_layers(const ConfigFields& config, ModelSpec& spec) {
  if (!config.has("ple_layer_ids")) return;
  const Json& list = config.at("ple_layer_ids");
  const auto layers = static_cast<int64_t>(spec.layers.size());
  config.require(list.is_array(), "ple_layer_ids must be a list");
  std::set<int64_t> ids;
  for (const Json& id : list) {
    config.require(id.is_number_integer() && id.get<int64_t>() >= 1 && id.get<int64_t>() <= layers,
                   fmt::format("ple_layer_ids are one-based and must lie in 1..{}", layers));
    ids.insert(id.get<int64_t>());
  }
  if (ids.empty()) return;
  NgramEmbeddingSpec ngram;
  ngram.width = config.integer("ple_embed_dim", spec.hidden);
  ngram.ngram_size = config.integer("ngram_size", 3, 2);
  ngram.heads_per_ngram = config.integer("heads_per_ngram", 8);
  ngram.vocab_base = config.integer("ngram_vocab_size_base", 20000000, 2, int64_t{1} << 32);
  ngram.row_divisor = config.integer("make_ngram_vocab_size_divisible_by", 128);
  ngram.seed = config.integer("seed", 1234, 0, int64_t{1} << 40);
  ngram.conv_taps = config.integer("ple_conv_kernel_size", 4, 1);
  ngram.eos_id = ngram_eos(config);
  config.require(ngram.ngram_size <= 8 && ngram.heads_per_ngram <= 64,
                 "ngram_size must be at most 8 and heads_per_ngram at most 64");
  config.require(ngram.width % ((ngram.ngram_size - 1) * ngram.heads_per_ngram) == 0,
                 "ple_embed_dim must be divisible by (ngram_size - 1) * heads_per_ngram");
  // Every layer takes its own primes, found one after another: bounded, so that a hostile file cannot stall a load.
  constexpr int64_t kPrimesMax = 1024;
  config.require(
      static_cast<int64_t>(ids.size()) * (ngram.ngram_size - 1) * ngram.heads_per_ngram <= kPrimesMax,
      fmt::format("ple_layer_ids * (ngram_size - 1) * heads_per_ngram above {} is not supported", kPrimesMax));
  for (const int64_t id : ids) {
    spec.layers[static_cast<size_t>(id - 1)].ngram = ngram;
    ++ngram.ordinal;
  }
}

}  // namespace

ModelSpec qwen4_exp_spec(const Json& document, std::string_view origin) {
  const bool composite = document.contains("text_config");
  if (composite && !document.at("text_config").is_object())
    throw_error(ErrorCode::input, "{}: text_config must be an object", origin);
  const ConfigFields config(composite ? document.at("text_config") : document, origin);
  if (document.contains("quantization_config") || config.has("quantization_config"))
    throw_error(ErrorCode::input,
                "{}: quantised checkpoints (quantization_config) are not supported; use the BF16 release", origin);
  constexpr int64_t kVocabMax = int64_t{1} << 24, kLayersMax = 4096, kContextMax = int64_t{1} << 30;

  ModelSpec spec;
  spec.model_type = "qwen4_exp";
  spec.vocab = config.integer("vocab_size", 248320, 1, kVocabMax);
  spec.hidden = config.integer("hidden_size", 2048);
  spec.context_max = config.integer("max_position_embeddings", 32768, 1, kContextMax);
  spec.rms_eps = static_cast<float>(config.number("rms_norm_eps", 1e-6));
  config.require(spec.rms_eps > 0.0f && spec.rms_eps < 1.0f, "rms_norm_eps must lie between 0 and 1");
  config.require(!config.boolean("tie_word_embeddings", false), "tie_word_embeddings true is not supported");
  spec.hyper = {config.integer("hc_count", 4, 2, 64), config.integer("hc_lowrank", 320)};

  const int64_t layers = config.integer("num_hidden_layers", 40, 1, kLayersMax);
  spec.rope = rope_spec(config, config.integer("head_dim", 256));
  const std::vector<bool> linear = linear_layers(config, layers);
  const GatedDeltaNetSpec delta_net = delta_net_spec(config, spec.warnings);
  const QsaSpec qsa = qsa_spec(config, 2 * static_cast<int64_t>(spec.rope.inv_freq.size()));
  const MoeSpec moe = moe_spec(config);
  for (const bool is_linear : linear) {
    LayerSpec layer;
    if (is_linear)
      layer.mixer = delta_net;
    else
      layer.mixer = qsa;
    layer.moe = moe;
    spec.layers.push_back(std::move(layer));
  }
  add_ngram_layers(config, spec);
  // Byte counts of all experts stay inside 63 bits.
  const double elements = 3.0 * static_cast<double>(layers) * static_cast<double>(moe.experts) *
                          static_cast<double>(moe.intermediate) * static_cast<double>(spec.hidden);
  config.require(elements < 0x1p56,
                 "num_hidden_layers * num_experts * moe_intermediate_size * hidden_size is too large");
  return spec;
}

}  // namespace offload
