// The forms in which one model may be stored: all give the same bits. And what is refused, by name.
#include <doctest/doctest.h>

#include <filesystem>
#include <set>

#include "golden.h"
#include "model_runner.h"
#include "stored_model.h"

namespace offload::model_layout_test {

namespace {

constexpr Arithmetic kBf16{DType::bf16, Rounding::fused};
const std::string kTable = "model.layers.1.ple.ple_embedding.ngram_embedding.";

// 106 tokens: selection acts on the last seven.
const std::vector<int32_t>& prompt() {
  static const std::vector<int32_t> ids = Golden().prompts()[5].ids;
  return ids;
}

std::vector<float> logits_of(const std::string& model_dir, Arithmetic arithmetic = kBf16) {
  return ModelRunner(model_dir, arithmetic).logits(prompt());
}

const std::vector<float>& demo_logits() {
  static const std::vector<float> logits = logits_of(Golden::model_dir());
  return logits;
}

// Whether the changed demo, written in `files` files, has the demo's logits bit for bit.
bool same_as_demo(const std::function<void(StoredModel&)>& change, int files = 1) {
  StoredModel model = StoredModel::demo();
  change(model);
  const StoredFolder folder;
  model.write(folder, files);
  return logits_of(folder.path()) == demo_logits();
}

std::string expert(int layer, int e, const char* projection) {
  return fmt::format("model.layers.{}.mlp.experts.{}.{}.weight", layer, e, projection);
}

void fuse_experts(StoredModel& model) {
  for (int layer = 0; layer < 8; ++layer) {
    std::vector<StoredTensor> gate_up, down;
    for (int e = 0; e < 32; ++e) {
      gate_up.push_back(model.take(expert(layer, e, "gate_proj")));
      gate_up.push_back(model.take(expert(layer, e, "up_proj")));
      down.push_back(model.take(expert(layer, e, "down_proj")));
    }
    const auto joined = [](const std::vector<StoredTensor>& parts, std::vector<int64_t> shape) {
      std::vector<const StoredTensor*> views;
      for (const StoredTensor& part : parts) views.push_back(&part);
      StoredTensor out = join_rows(views);
      out.shape = std::move(shape);
      return out;
    };
    const std::string stem = fmt::format("model.layers.{}.mlp.experts.", layer);
    model.tensors.emplace(stem + "gate_up_proj", joined(gate_up, {32, 64, 128}));
    model.tensors.emplace(stem + "down_proj", joined(down, {32, 128, 32}));
  }
}

StoredTensor take_whole_table(StoredModel& model) {
  std::vector<StoredTensor> shards;
  for (int k = 0; model.tensors.contains(fmt::format("{}shard_{}.weight", kTable, k)); ++k)
    shards.push_back(model.take(fmt::format("{}shard_{}.weight", kTable, k)));
  REQUIRE(shards.size() == 4);
  std::vector<const StoredTensor*> views;
  for (const StoredTensor& shard : shards) views.push_back(&shard);
  return join_rows(views);
}

// In `count` shards of equal height but the last.
void split_table(StoredModel& model, int64_t count) {
  const StoredTensor whole = take_whole_table(model);
  const int64_t rows = whole.shape[0], height = (rows + count - 1) / count;
  const int64_t row_bytes = static_cast<int64_t>(whole.bytes.size()) / rows;
  for (int64_t k = 0; k * height < rows; ++k) {
    const int64_t begin = k * height, end = std::min(rows, begin + height);
    model.tensors.emplace(
        fmt::format("{}shard_{}.weight", kTable, k),
        StoredTensor{whole.dtype,
                     {end - begin, whole.shape[1]},
                     {whole.bytes.begin() + begin * row_bytes, whole.bytes.begin() + end * row_bytes}});
  }
}

std::string with_prefix(const std::string& prefix, const std::string& name) {
  return name.starts_with("model.") ? prefix + name.substr(6) : name;
}

void make_composite(StoredModel& model) {
  model.rename([](const std::string& name) { return with_prefix("model.language_model.", name); });
  model.config = {{"model_type", "qwen4_exp"},
                  {"architectures", {"Qwen4ExpForConditionalGeneration"}},
                  {"text_config", model.config},
                  {"vision_config", {{"model_type", "qwen4_exp_vision"}, {"hidden_size", 1152}}}};
  model.tensors.emplace("model.visual.blocks.0.attn.qkv.weight", StoredTensor{DType::bf16, {3, 1}, {6, std::byte{1}}});
  model.tensors.emplace("model.visual.pos_embed.weight", StoredTensor{DType::u8, {2}, {2, std::byte{255}}});
}

// A tensor whose bytes would show in the logits, were it read.
StoredTensor not_a_number(std::vector<int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  return {DType::bf16, std::move(shape), std::vector<std::byte>(static_cast<size_t>(elements) * 2, std::byte{0xFF})};
}

// The demo in one file that is written once, behind an index in which a test leaves names out or places changed tensors
// in a second file.
class IndexedDemo {
 public:
  IndexedDemo() : model_(StoredModel::demo()) {
    write_safetensors(folder_.file("demo.safetensors"), model_.tensors);
    folder_.write("config.json", model_.config.dump());
  }
  const StoredModel& model() const { return model_; }

  // The error that a plan of the changed model ends with; empty when it passes.
  std::string refusal(const std::set<std::string>& left_out, const StoredTensors& changed = {}) {
    Json map = Json::object();
    for (const auto& [name, tensor] : model_.tensors)
      if (!left_out.contains(name)) map[name] = "demo.safetensors";
    for (const auto& [name, tensor] : changed) map[name] = "changed.safetensors";
    if (!changed.empty()) write_safetensors(folder_.file("changed.safetensors"), changed);
    folder_.write("model.safetensors.index.json", Json{{"weight_map", map}}.dump());
    return plan_error(folder_.path());
  }

  static std::string plan_error(const std::string& model_dir) {
    cpu::CpuBackend backend(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1}));
    EngineOptions options;
    options.model_dir = model_dir;
    options.context = 16;
    options.chunk = 8;
    options.plan_only = true;
    try {
      const Engine engine(options, backend);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::input);
      CHECK(error.message().find('\n') == std::string::npos);
      return error.message();
    }
    return "";
  }

 private:
  StoredFolder folder_;
  StoredModel model_;
};

IndexedDemo& indexed_demo() {
  static IndexedDemo demo;
  return demo;
}

// One name per kind of tensor: the first linear layer, the first sparse layer, the n-gram layer, one expert.
std::vector<std::string> one_of_each_kind() {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : indexed_demo().model().tensors) {
    const bool in_layer = name.starts_with("model.layers.");
    const bool of_chosen_layer = name.starts_with("model.layers.1.") || name.starts_with("model.layers.7.");
    if (in_layer && !of_chosen_layer) continue;
    if (name.find(".experts.") != std::string::npos && name.find(".experts.7.") == std::string::npos) continue;
    names.push_back(name);
  }
  return names;
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// What messages call it: without the prefix.
std::string relative(const std::string& name) {
  return with_prefix("", name);
}

}  // namespace

TEST_CASE("one_file_and_many_files_are_the_same_model") {
  CHECK(same_as_demo([](StoredModel&) {}));
  CHECK(same_as_demo([](StoredModel&) {}, 2));
  CHECK(same_as_demo([](StoredModel&) {}, 13));
}

TEST_CASE("trap_09_fused_experts_and_one_matrix_each_load_to_the_same_memory") {
  CHECK(same_as_demo(fuse_experts));
  StoredModel swapped = StoredModel::demo();  // gate rows come first: the other order is another model
  for (int e = 0; e < 32; ++e) std::swap(swapped.at(expert(0, e, "gate_proj")), swapped.at(expert(0, e, "up_proj")));
  const StoredFolder folder;
  swapped.write(folder);
  CHECK(logits_of(folder.path()) != demo_logits());
}

TEST_CASE("composite_and_bare_prefixes_are_the_same_model_and_vision_is_left_alone") {
  CHECK(same_as_demo([](StoredModel& model) {
    fuse_experts(model);  // as the published file has them
    make_composite(model);
  }));
  CHECK(same_as_demo([](StoredModel& model) {
    model.rename([](const std::string& name) { return with_prefix("language_model.", name); });
  }));
  CHECK(same_as_demo(
      [](StoredModel& model) { model.rename([](const std::string& name) { return with_prefix("", name); }); }));
}

TEST_CASE("trap_15_vectors_stored_as_f32_give_the_same_bits") {
  CHECK(same_as_demo([](StoredModel& model) {
    for (auto& [name, tensor] : model.tensors)
      if (tensor.dtype == DType::bf16 && (tensor.shape.size() == 1 || name.ends_with("conv1d.weight")))
        tensor = tensor.as_f32();
  }));
}

TEST_CASE("a_file_all_in_f32_is_the_same_model_to_rounding") {
  StoredModel model = StoredModel::demo();
  for (auto& [name, tensor] : model.tensors)
    if (tensor.dtype == DType::bf16) tensor = tensor.as_f32();
  const StoredFolder folder;
  model.write(folder);
  const std::vector<float> expected = logits_of(Golden::model_dir(), kFp32Arithmetic);
  CHECK(largest_difference(logits_of(folder.path(), kFp32Arithmetic), expected) <= 1e-4);
}

TEST_CASE("trap_10_table_shards_are_read_in_numeric_order_however_many") {
  for (const int64_t shards : {12, 25, 128}) {  // shard_10 sorts before shard_2 as text
    CAPTURE(shards);
    CHECK(same_as_demo(
        [&](StoredModel& model) {
          split_table(model, shards);
          model.config["split_ngram_parts"] = 512;  // the shards that are there count
        },
        shards == 25 ? 3 : 1));
  }
  CHECK(same_as_demo([](StoredModel& model) {
    StoredTensor whole = take_whole_table(model);
    model.tensors.emplace(kTable + "weight", std::move(whole));
  }));
}

TEST_CASE("trap_07_tensors_that_the_model_does_not_have_are_neither_asked_for_nor_read") {
  const StoredModel demo = StoredModel::demo();
  for (const auto& [name, tensor] : demo.tensors) {
    CHECK(name != "model.norm.weight");
    if (contains(name, "layernorm.weight")) CHECK(contains(name, "indexer."));
  }
  CHECK(same_as_demo([](StoredModel& model) {
    model.tensors.emplace("model.norm.weight", not_a_number({128}));
    model.tensors.emplace("model.layers.0.input_layernorm.weight", not_a_number({128}));
    model.tensors.emplace("model.layers.0.post_attention_layernorm.weight", not_a_number({128}));
    model.tensors.emplace("model.layers.0.ple.key_proj.weight", not_a_number({512, 128}));  // trap 1: one-based
    model.tensors.emplace("model.layers.2.ple.key_proj.weight", not_a_number({512, 128}));
    model.tensors.emplace("model.hyper_connection_mixer.block_inject_weight.weight", not_a_number({4, 512}));
    model.tensors.emplace("model.mtp.fc_hidden.weight", not_a_number({128, 128}));
    model.tensors.emplace("mtp.layers.0.mlp.gate.weight", not_a_number({32, 128}));
    model.tensors.emplace("a_tensor_of_nobody", not_a_number({0}));
  }));
}

TEST_CASE("trap_08_lm_head_is_its_own_matrix_and_must_be_there") {
  StoredModel model = StoredModel::demo();
  CHECK(model.at("lm_head.weight").shape == model.at("model.embed_tokens.weight").shape);
  CHECK(model.at("lm_head.weight").bytes != model.at("model.embed_tokens.weight").bytes);
  model.at("lm_head.weight") = model.at("model.embed_tokens.weight");
  const StoredFolder folder;
  model.write(folder);
  CHECK(logits_of(folder.path()) != demo_logits());
  CHECK(contains(indexed_demo().refusal({"lm_head.weight"}), "lm_head.weight"));
}

TEST_CASE("a_missing_tensor_of_any_kind_is_refused_by_its_name") {
  CHECK(indexed_demo().refusal({}) == "");
  const std::vector<std::string> names = one_of_each_kind();
  CHECK(names.size() > 45);
  for (const std::string& name : names) {
    if (contains(name, "shard_")) continue;  // below
    CAPTURE(name);
    CHECK(contains(indexed_demo().refusal({name}), relative(name)));
  }
  CHECK(contains(indexed_demo().refusal({kTable + "shard_1.weight"}), relative(kTable) + "shard_1.weight is missing"));
  CHECK(contains(indexed_demo().refusal({kTable + "shard_3.weight"}), relative(kTable).substr(0, 30)));  // too few rows
}

TEST_CASE("trap_05_the_indexer_is_required_in_every_sparse_layer") {
  for (const char* layer : {"3", "7"})
    for (const char* name : {"index_qk_proj", "q_layernorm", "k_layernorm"}) {
      const std::string full = fmt::format("model.layers.{}.self_attn.indexer.{}.weight", layer, name);
      CHECK(contains(indexed_demo().refusal({full}), relative(full)));
    }
}

TEST_CASE("a_tensor_of_another_shape_is_refused_by_its_name_with_both_shapes") {
  for (const std::string& name : one_of_each_kind()) {
    StoredTensor tensor = indexed_demo().model().tensors.at(name);
    tensor.shape.push_back(1);  // as many bytes, but another rank
    CAPTURE(name);
    const std::string message = indexed_demo().refusal({}, {{name, tensor}});
    CHECK(contains(message, contains(name, "ple_embedding.ngram_embedding") ? kTable : relative(name)));
    CHECK(contains(message, fmt::format("{}", tensor.shape.front())));
  }
  // Turned on its side: the same rank and bytes.
  for (const std::string& name : one_of_each_kind()) {
    StoredTensor tensor = indexed_demo().model().tensors.at(name);
    if (tensor.shape.size() != 2 || tensor.shape[0] == tensor.shape[1]) continue;
    std::swap(tensor.shape[0], tensor.shape[1]);
    CAPTURE(name);
    CHECK(contains(indexed_demo().refusal({}, {{name, tensor}}),
                   contains(name, "ple_embedding.ngram_embedding") ? kTable : relative(name)));
  }
}

TEST_CASE("a_tensor_of_another_type_is_refused_by_its_name") {
  for (const std::string& name : one_of_each_kind()) {
    StoredTensor tensor = indexed_demo().model().tensors.at(name);
    tensor.dtype = tensor.dtype == DType::bf16 ? DType::i16 : DType::f64;
    CAPTURE(name);
    CHECK(contains(indexed_demo().refusal({}, {{name, tensor}}),
                   contains(name, "ple_embedding.ngram_embedding") ? kTable : relative(name)));
  }
}

TEST_CASE("trap_11_hash_constants_must_be_those_of_the_config_to_the_last_bit") {
  for (const char* name : {"layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"}) {
    const std::string full = fmt::format("model.layers.1.ple.ple_embedding.{}", name);
    const StoredTensor& stored = indexed_demo().model().tensors.at(full);
    REQUIRE(stored.dtype == DType::i64);
    for (size_t i = 0; i < stored.bytes.size() / 8; ++i) {
      StoredTensor changed = stored;
      changed.bytes[8 * i] ^= std::byte{1};  // one unit: lost, had it passed through FP32
      const std::string message = indexed_demo().refusal({}, {{full, changed}});
      CHECK(contains(message, fmt::format("{}[{}] is ", relative(full), i)));
      CHECK(contains(message, "config and weights do not belong together"));
    }
  }
  for (const char* field : {"seed", "ngram_vocab_size_base"}) {
    StoredModel model = StoredModel::demo();
    model.config[field] = field == std::string("seed") ? 1235 : 2000;
    const StoredFolder folder;
    model.write(folder);
    CHECK(contains(IndexedDemo::plan_error(folder.path()), "config and weights do not belong together"));
  }
}

TEST_CASE("experts_of_mixed_form_or_type_are_refused_by_name") {
  const std::string name = expert(5, 7, "up_proj");
  CHECK(contains(indexed_demo().refusal({name}), "layers.5.mlp.experts.7.up_proj.weight"));
  CHECK(contains(indexed_demo().refusal({}, {{name, indexed_demo().model().tensors.at(name).as_f32()}}), name));
  StoredModel model = StoredModel::demo();
  fuse_experts(model);
  model.tensors.erase("model.layers.6.mlp.experts.down_proj");
  const StoredFolder folder;
  model.write(folder);
  CHECK(contains(IndexedDemo::plan_error(folder.path()), "layers.6.mlp.experts.down_proj"));
  model.tensors.emplace("model.layers.6.mlp.experts.down_proj", not_a_number({32, 32, 128}));
  model.write(folder);
  CHECK(contains(IndexedDemo::plan_error(folder.path()), "layers.6.mlp.experts.down_proj"));
}

TEST_CASE("sizes_of_the_config_that_the_file_does_not_have_are_refused_by_tensor_name_before_anything_is_allocated") {
  // Each far beyond any machine's memory.
  const std::vector<std::pair<const char*, int64_t>> sizes = {{"hidden_size", 1 << 20},
                                                              {"vocab_size", 1 << 24},
                                                              {"num_experts", 1 << 20},
                                                              {"hc_lowrank", 1 << 20},
                                                              {"moe_intermediate_size", 1 << 20},
                                                              {"head_dim", 1 << 20},
                                                              {"num_hidden_layers", 4096},
                                                              {"shared_expert_intermediate_size", 1 << 20},
                                                              {"linear_num_value_heads", 1 << 20},
                                                              {"linear_conv_kernel_dim", 1 << 20},
                                                              {"ple_conv_kernel_size", 1 << 20},
                                                              {"indexer_n_heads", 1 << 20},
                                                              {"ple_embed_dim", 1 << 20},
                                                              {"make_ngram_vocab_size_divisible_by", 1 << 20}};
  for (const auto& size : sizes) {
    const std::string field = size.first;
    CAPTURE(field);
    StoredModel model = StoredModel::demo();
    model.config[field] = size.second;
    if (field == "num_hidden_layers") model.config.erase("layer_types");
    if (field == "head_dim") model.config["rope_parameters"]["partial_rotary_factor"] = 2e-6;
    const StoredFolder folder;
    folder.write("config.json", model.config.dump());
    write_safetensors(folder.file("model.safetensors"), model.tensors);
    const std::string message = IndexedDemo::plan_error(folder.path());
    CHECK((contains(message, ": tensor ") || contains(message, ": table ")));
  }
}

TEST_CASE("a_truncated_shard_is_refused_by_its_file_name") {
  StoredModel model = StoredModel::demo();
  const StoredFolder folder;
  model.write(folder, 3);
  const std::string shard = folder.file("model-00002-of-00003.safetensors");
  const auto bytes = std::filesystem::file_size(shard);
  for (const uintmax_t length : {bytes - 1, bytes / 2, uintmax_t{9}, uintmax_t{0}}) {
    std::filesystem::resize_file(shard, length);
    CHECK(contains(IndexedDemo::plan_error(folder.path()), "model-00002-of-00003.safetensors"));
  }
  std::filesystem::remove(shard);
  CHECK(contains(IndexedDemo::plan_error(folder.path()), "model-00002-of-00003.safetensors"));
}

}  // namespace offload::model_layout_test
