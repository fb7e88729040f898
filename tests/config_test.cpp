// config.json of qwen4_exp -> ModelSpec: spellings, defaults, and what is refused by field name.
#include <doctest/doctest.h>

#include <cmath>

#include "core/models/registry.h"

namespace offload::config_test {

namespace {

// The published text configuration, as far as it is read.
Json published_text() {
  return parse_json(R"({
    "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
    "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "attention_bias": false,
    "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                        "mrope_interleaved": true, "mrope_section": [11, 11, 10]},
    "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "output_gate_type": "sigmoid", "mamba_ssm_dtype": "float32", "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320,
    "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 4, "eos_token_id": 248044, "bos_token_id": 248044, "tie_word_embeddings": false,
    "mtp_num_hidden_layers": 1, "number_of_conv_states": 3, "full_attention_interval": 4})",
                    "published");
}

ModelSpec spec_of(const Json& config) {
  return model_spec(config, "config.json");
}

Json with(const char* key, const Json& value) {
  Json config = published_text();
  config[key] = value;
  return config;
}

Json with_rope(const char* key, const Json& value) {
  Json config = published_text();
  config["rope_parameters"][key] = value;
  return config;
}

Json without(const char* key) {
  Json config = published_text();
  config.erase(key);
  return config;
}

// The message of the Error{input} that the configuration is refused with; empty when it is accepted.
std::string refusal(const Json& config) {
  try {
    spec_of(config);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.message().find('\n') == std::string::npos);
    return error.message();
  }
  return "";
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool is_linear(const ModelSpec& spec, size_t layer) {
  return std::holds_alternative<GatedDeltaNetSpec>(spec.layers[layer].mixer);
}

GatedDeltaNetSpec delta_net(const ModelSpec& spec) {
  return std::get<GatedDeltaNetSpec>(spec.layers.front().mixer);
}

}  // namespace

TEST_CASE("the_published_configuration_parses_to_the_published_sizes") {
  const ModelSpec spec = spec_of(published_text());
  CHECK(spec.vocab == 248320);
  CHECK(spec.hidden == 2560);
  CHECK(spec.context_max == 262144);
  CHECK(spec.hyper.streams == 4);
  CHECK(spec.hyper.lowrank == 320);
  CHECK(spec.rms_eps == 1e-6f);
  CHECK(spec.warnings.empty());
  REQUIRE(spec.layers.size() == 48);
  for (size_t i = 0; i < 48; ++i) CHECK(is_linear(spec, i) == (i % 4 != 3));
  const GatedDeltaNetSpec net = delta_net(spec);
  CHECK(net.key_heads == 16);
  CHECK(net.value_heads == 48);
  CHECK(net.key_dim == 128);
  CHECK(net.value_dim == 128);
  CHECK(net.conv_taps == 4);
  const auto& qsa = std::get<QsaSpec>(spec.layers[3].mixer);
  CHECK(qsa.query_heads == 24);
  CHECK(qsa.kv_heads == 2);
  CHECK(qsa.head_dim == 256);
  CHECK(qsa.index_heads == 4);
  CHECK(qsa.index_dim == 128);
  CHECK(qsa.ratio == 4);
  CHECK(qsa.budget_blocks == 512);
  const MoeSpec& moe = spec.layers[0].moe;
  CHECK(moe.experts == 512);
  CHECK(moe.top_k == 10);
  CHECK(moe.intermediate == 640);
  CHECK(moe.shared_intermediate == 640);
  REQUIRE(spec.layers[1].ngram.has_value());
  CHECK(spec.layers[1].ngram->vocab_base == 20000000);
  CHECK(spec.layers[1].ngram->eos_id == 248044);
}

TEST_CASE("a_composite_document_is_read_from_its_text_config") {
  Json text = published_text();
  const Json composite{{"model_type", "qwen4_exp"},
                       {"architectures", {"Qwen4ExpForConditionalGeneration"}},
                       {"vision_config", {{"depth", 27}, {"hidden_size", 1152}}},
                       {"hidden_size", 7},  // the outer object is not the text model's
                       {"text_config", text}};
  const ModelSpec spec = spec_of(composite), plain = spec_of(text);
  CHECK(spec.hidden == plain.hidden);
  CHECK(spec.layers.size() == plain.layers.size());
  CHECK(spec.rope.inv_freq == plain.rope.inv_freq);
  CHECK(spec.layers[1].ngram.has_value());
  Json broken = composite;
  broken["text_config"] = "yes";
  CHECK(contains(refusal(broken), "text_config must be an object"));
  broken["text_config"] = nullptr;
  CHECK(contains(refusal(broken), "text_config must be an object"));
  broken["text_config"] = Json::object();
  CHECK(contains(refusal(broken), "rope_parameters is missing"));
}

TEST_CASE("trap_01_ple_layer_ids_are_one_based_sorted_and_unique") {
  const ModelSpec one = spec_of(published_text());
  for (size_t i = 0; i < 48; ++i) CHECK(one.layers[i].ngram.has_value() == (i == 1));
  const ModelSpec two = spec_of(with("ple_layer_ids", {5, 2, 5, 48}));
  for (size_t i = 0; i < 48; ++i) CHECK(two.layers[i].ngram.has_value() == (i == 1 || i == 4 || i == 47));
  CHECK(two.layers[1].ngram->ordinal == 0);
  CHECK(two.layers[4].ngram->ordinal == 1);
  CHECK(two.layers[47].ngram->ordinal == 2);  // a sparse layer may have one
  for (const Json& ids : {Json{0}, Json{49}, Json{-1}, Json{2.5}, Json{"2"}, Json{18446744073709551615u}})
    CHECK(contains(refusal(with("ple_layer_ids", ids)), "ple_layer_ids are one-based and must lie in 1..48"));
  CHECK(contains(refusal(with("ple_layer_ids", 2)), "ple_layer_ids must be a list"));
  CHECK(!spec_of(with("ple_layer_ids", Json::array())).layers[1].ngram.has_value());
  CHECK(!spec_of(without("ple_layer_ids")).layers[1].ngram.has_value());
}

TEST_CASE("trap_02_seed_and_norm_topk_prob_have_the_defaults_of_the_published_file") {
  const ModelSpec spec = spec_of(published_text());
  CHECK(spec.layers[1].ngram->seed == 1234);
  CHECK(spec.layers[0].moe.normalise);
  CHECK(spec_of(with("seed", 7)).layers[1].ngram->seed == 7);
  CHECK(!spec_of(with("norm_topk_prob", false)).layers[0].moe.normalise);
}

TEST_CASE("trap_03_the_output_gate_is_what_the_file_says_and_hidden_act_with_a_warning_when_it_is_silent") {
  CHECK(delta_net(spec_of(published_text())).output_gate == Gate::sigmoid);
  CHECK(delta_net(spec_of(with("output_gate_type", "silu"))).output_gate == Gate::silu);
  for (const Json& config : {without("output_gate_type"), with("output_gate_type", nullptr)}) {
    const ModelSpec spec = spec_of(config);
    CHECK(delta_net(spec).output_gate == Gate::silu);
    REQUIRE(spec.warnings.size() == 1);
    CHECK(contains(spec.warnings[0], "output_gate_type is absent; hidden_act is used"));
  }
  CHECK(contains(refusal(with("output_gate_type", "tanh")), "output_gate_type \"tanh\" is not supported"));
}

TEST_CASE("trap_04_all_names_of_layer_types_parse_alike_and_an_unknown_one_is_an_error") {
  const std::vector<const char*> sparse = {"full_attention", "qwen_sparse_attention", "indexed_attention",
                                           "deepseek_sparse_attention", "hybrid_indexed"};
  for (const char* name : sparse) {
    Json types = Json::array();
    for (int i = 0; i < 48; ++i) types.push_back(i % 4 == 3 ? name : "linear_attention");
    const ModelSpec spec = spec_of(with("layer_types", types));
    for (size_t i = 0; i < 48; ++i) {
      CHECK(is_linear(spec, i) == (i % 4 != 3));
      CHECK(spec.layers[i].ngram.has_value() == (i == 1));  // from ple_layer_ids alone, never from the name
    }
    types[17] = "sliding_attention";
    CHECK(contains(refusal(with("layer_types", types)), "layer_types holds \"sliding_attention\"; supported: linear"));
    types[17] = 3;
    CHECK(contains(refusal(with("layer_types", types)), "layer_types must hold strings"));
    types.erase(17);
    CHECK(contains(refusal(with("layer_types", types)), "layer_types must be a list of num_hidden_layers = 48 names"));
  }
  CHECK(contains(refusal(with("layer_types", "linear_attention")), "layer_types must be a list"));
  const ModelSpec every_third = spec_of(with("full_attention_interval", 3));
  for (size_t i = 0; i < 48; ++i) CHECK(is_linear(every_third, i) == ((i + 1) % 3 != 0));
}

TEST_CASE("absent_fields_take_the_defaults_of_the_published_class") {
  const Json least = parse_json(R"({"model_type": "qwen4_exp_text", "rope_parameters": {}, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "eos_token_id": [9, 8], "ple_layer_ids": [1]})",
                                "least");
  const ModelSpec spec = spec_of(least);
  CHECK(spec.vocab == 248320);
  CHECK(spec.hidden == 2048);
  CHECK(spec.layers.size() == 40);
  CHECK(spec.context_max == 32768);
  CHECK(spec.rms_eps == 1e-6f);
  CHECK(spec.hyper.streams == 4);
  CHECK(spec.hyper.lowrank == 320);
  CHECK(spec.rope.inv_freq.size() == 128);  // partial_rotary_factor 1 of head_dim 256
  const GatedDeltaNetSpec net = delta_net(spec);
  CHECK(net.key_heads == 16);
  CHECK(net.value_heads == 32);
  CHECK(net.key_dim == 128);
  CHECK(net.conv_taps == 4);
  const auto& qsa = std::get<QsaSpec>(spec.layers[3].mixer);
  CHECK(qsa.query_heads == 16);
  CHECK(qsa.kv_heads == 2);
  CHECK(qsa.head_dim == 256);
  const MoeSpec& moe = spec.layers[0].moe;
  CHECK(moe.experts == 512);
  CHECK(moe.top_k == 10);
  CHECK(moe.intermediate == 512);
  CHECK(moe.shared_intermediate == 512);
  const NgramEmbeddingSpec& ngram = *spec.layers[0].ngram;
  CHECK(ngram.width == spec.hidden);
  CHECK(ngram.ngram_size == 3);
  CHECK(ngram.heads_per_ngram == 8);
  CHECK(ngram.conv_taps == 4);
  CHECK(ngram.vocab_base == 20000000);
  CHECK(ngram.row_divisor == 128);
  CHECK(ngram.seed == 1234);
  CHECK(ngram.eos_id == 9);  // the first of a list
}

TEST_CASE("each_rule_is_refused_by_its_field_name") {
  for (const char* field :
       {"indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"}) {
    CHECK(contains(refusal(without(field)), fmt::format("{} is missing", field)));
    CHECK(contains(refusal(with(field, nullptr)), fmt::format("{} is missing", field)));
    CHECK(contains(refusal(with(field, 0)), fmt::format("{} is 0", field)));
    CHECK(contains(refusal(with(field, -4)), fmt::format("{} is -4", field)));
  }
  CHECK(contains(refusal(with("indexer_kv_heads", 2)), "indexer_kv_heads is 2, only 1 is supported"));
  CHECK(contains(refusal(with("indexer_budget", 2047)), "indexer_budget (2047) must be a multiple of"));
  CHECK(contains(refusal(with("indexer_head_dim", 63)), "indexer_head_dim (63) is smaller than the rotary dimension"));
  CHECK(contains(refusal(with("hc_count", 1)), "hc_count is 1"));
  CHECK(contains(refusal(with("num_experts_per_tok", 0)), "num_experts_per_tok is 0"));
  CHECK(contains(refusal(with("num_experts_per_tok", 513)), "num_experts_per_tok (513) exceeds num_experts (512)"));
  CHECK(contains(refusal(with("ple_embed_dim", 2561)), "ple_embed_dim must be divisible by"));
  CHECK(contains(refusal(with("linear_num_value_heads", 40)), "linear_num_value_heads (40) must be a multiple of"));
  CHECK(contains(refusal(with("num_key_value_heads", 5)), "num_attention_heads (24) must be a multiple of"));
  CHECK(contains(refusal(without("eos_token_id")), "eos_token_id is missing"));
  CHECK(contains(refusal(with("eos_token_id", Json::array())), "eos_token_id must be a token id"));
  CHECK(contains(refusal(with("eos_token_id", -1)), "eos_token_id must be a token id"));
  CHECK(contains(refusal(with("eos_token_id", int64_t{1} << 31)), "eos_token_id must be a token id"));
  CHECK(contains(refusal(with("attention_bias", true)), "attention_bias true is not supported"));
  CHECK(contains(refusal(with("tie_word_embeddings", true)), "tie_word_embeddings true is not supported"));
  CHECK(contains(refusal(with("hidden_act", "gelu")), "hidden_act \"gelu\" is not supported"));
  CHECK(contains(refusal(with("quantization_config", Json::object())), "quantization_config"));
  CHECK(contains(refusal(without("rope_parameters")), "rope_parameters is missing"));
  CHECK(contains(refusal(with_rope("rope_type", "linear")), "rope_type \"linear\" is not supported"));
  CHECK(contains(refusal(with_rope("partial_rotary_factor", 1.5)), "partial_rotary_factor"));
  CHECK(contains(refusal(with_rope("rope_theta", 1)), "rope_theta"));
  CHECK(contains(refusal(with("rms_norm_eps", 0)), "rms_norm_eps"));
  CHECK(contains(refusal(with("model_type", "qwen3_next")), "model_type \"qwen3_next\" is not supported"));
  CHECK(contains(refusal(without("model_type")), "model_type is missing"));
  CHECK(contains(refusal(Json::array()), "expected a JSON object"));
}

TEST_CASE("plain_rope_has_the_published_frequencies") {
  const RopeSpec rope = spec_of(published_text()).rope;
  REQUIRE(rope.inv_freq.size() == 32);
  CHECK(rope.scale == 1.0f);
  const double expected[] = {1, 0.60429639, 0.36517413, 0.22067341};
  for (size_t i = 0; i < 4; ++i)
    CHECK(std::abs(double{rope.inv_freq[i]} - expected[i]) <= 6e-8);  // one FP32 step below 1
  CHECK(std::abs(double{rope.inv_freq[31]} / 1.654817e-7 - 1) <= 1e-6);
}

TEST_CASE("yarn_scales_the_published_frequencies_by_the_published_factors") {
  Json config = with_rope("rope_type", "yarn");
  config["rope_parameters"]["factor"] = 4.0;
  config["rope_parameters"]["original_max_position_embeddings"] = 262144;
  const RopeSpec yarn = spec_of(config).rope, plain = spec_of(published_text()).rope;
  const double ramp[] = {0.90625, 0.8125, 0.71875, 0.625, 0.53125, 0.4375, 0.34375};
  for (size_t i = 0; i < 32; ++i) {
    const double factor = i <= 14 ? 1 : i <= 21 ? ramp[i - 15] : 0.25;
    CHECK(std::abs(double{yarn.inv_freq[i]} / double{plain.inv_freq[i]} - factor) <= 1e-6);
    if (i <= 14) CHECK(yarn.inv_freq[i] == plain.inv_freq[i]);
  }
  CHECK(std::abs(double{yarn.scale} - 1.1386294) <= 1e-7);

  const auto broken = [&](const char* key, const Json& value) {
    Json changed = config;
    changed["rope_parameters"][key] = value;
    return refusal(changed);
  };
  CHECK(contains(broken("factor", 0.5), "rope_type yarn needs factor"));
  CHECK(contains(broken("factor", nullptr), "rope_type yarn needs factor"));
  CHECK(contains(broken("original_max_position_embeddings", 0), "original_max_position_embeddings"));
  CHECK(contains(broken("beta_fast", -1), "beta_fast"));
  CHECK(contains(broken("beta_slow", 0), "beta_slow"));
}

TEST_CASE("hostile_values_are_refused_or_harmless_and_never_give_a_frequency_that_is_no_number") {
  const std::vector<Json> values = {-1,
                                    0,
                                    1,
                                    3,
                                    (int64_t{1} << 20) + 1,
                                    int64_t{1} << 40,
                                    std::numeric_limits<int64_t>::max(),
                                    std::numeric_limits<int64_t>::min(),
                                    std::numeric_limits<uint64_t>::max(),
                                    0.5,
                                    -0.0,
                                    1e-308,
                                    1e308,
                                    -1e308,
                                    true,
                                    nullptr,
                                    "",
                                    "4",
                                    std::string(100000, 'x'),
                                    std::string("a\0b\x1b[2J\nc", 9),
                                    Json::array(),
                                    Json{1},
                                    Json{{1, 2}, {3}},
                                    Json::object(),
                                    Json{{"a", 1}}};
  const auto check = [](const Json& config) {
    try {
      const ModelSpec spec = spec_of(config);
      CHECK(spec.layers.size() <= 4096);
      for (const float frequency : spec.rope.inv_freq) CHECK(std::isfinite(frequency));
      CHECK(std::isfinite(spec.rope.scale));
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::input);
      CHECK(error.message().size() < 1000);
      for (const char c : error.message()) CHECK(static_cast<unsigned char>(c) >= 0x20);
    }
  };
  const Json text = published_text();
  for (auto field = text.begin(); field != text.end(); ++field)
    for (const Json& value : values) {
      CAPTURE(field.key());
      check(with(field.key().c_str(), value));
    }
  for (const char* type : {"default", "yarn"})
    for (const char* key : {"rope_type", "rope_theta", "partial_rotary_factor", "factor",
                            "original_max_position_embeddings", "beta_fast", "beta_slow"})
      for (const Json& value : values) {
        Json config = with_rope("rope_type", type);
        config["rope_parameters"]["factor"] = 4;
        config["rope_parameters"]["original_max_position_embeddings"] = 4096;
        config["rope_parameters"][key] = value;
        CAPTURE(key);
        check(config);
      }
  Json extreme = with_rope("rope_type", "yarn");
  extreme["rope_parameters"]["factor"] = 4;
  extreme["rope_parameters"]["original_max_position_embeddings"] = 1e300;
  extreme["rope_parameters"]["beta_fast"] = 1e-300;
  extreme["rope_parameters"]["beta_slow"] = 1e-300;
  CHECK(contains(refusal(extreme), "beta_fast"));
}

TEST_CASE("numbers_that_no_double_holds_are_refused_by_the_parser") {
  for (const char* number : {"1e400", "-1e400", "1e99999999"}) {
    std::string message;
    try {
      parse_json(fmt::format(R"({{"model_type": "qwen4_exp_text", "rms_norm_eps": {}}})", number), "config.json");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::input);
      message = error.message();
    }
    CHECK(contains(message, "config.json"));
  }
}

TEST_CASE("sizes_that_no_machine_has_are_refused_or_parsed_without_being_allocated") {
  Json config = with("hidden_size", 1 << 20);
  config["vocab_size"] = 1 << 24;
  config["ngram_vocab_size_base"] = int64_t{1} << 32;
  CHECK(spec_of(config).hidden == 1 << 20);
  config["num_hidden_layers"] = 4096;
  config["num_experts"] = 1 << 20;
  config["moe_intermediate_size"] = 1 << 20;
  CHECK(contains(refusal(config), "num_experts * moe_intermediate_size"));
  CHECK(contains(refusal(with("num_hidden_layers", 4097)), "num_hidden_layers is 4097, expected 1 to 4096"));
}

TEST_CASE("n_gram_primes_are_bounded_so_that_no_config_stalls_the_load") {
  Json config = with("heads_per_ngram", 64);
  config["ngram_size"] = 8;
  config["ple_embed_dim"] = 7 * 64;
  config["ple_layer_ids"] = {1, 2};
  CHECK(spec_of(config).layers[1].ngram.has_value());
  config["ple_layer_ids"] = {1, 2, 3};
  CHECK(contains(refusal(config), "heads_per_ngram above 1024"));
}

}  // namespace offload::config_test
