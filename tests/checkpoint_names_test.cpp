#include "core/checkpoint_names.h"

#include <doctest/doctest.h>

namespace offload::checkpoint_names_test {

namespace {

TensorEntry entry(std::string name, std::vector<int64_t> shape = {1}, DType dtype = DType::bf16) {
  TensorEntry tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

std::vector<TensorEntry> entries(const std::vector<std::string>& names) {
  std::vector<TensorEntry> tensors;
  for (const std::string& name : names) tensors.push_back(entry(name));
  return tensors;
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    return error.message();
  }
  return "";
}

constexpr const char* kStem = "layers.1.ple.ple_embedding.ngram_embedding";

std::string shard_name(std::string_view number) {
  return fmt::format("model.{}.shard_{}.weight", kStem, number);
}

}  // namespace

TEST_CASE("text_names_lose_their_prefix_and_vision_names_resolve_to_nothing") {
  CHECK(text_name("model.language_model.embed_tokens.weight") == "embed_tokens.weight");
  CHECK(text_name("language_model.embed_tokens.weight") == "embed_tokens.weight");
  CHECK(text_name("language_model.model.embed_tokens.weight") == "embed_tokens.weight");
  CHECK(text_name("model.embed_tokens.weight") == "embed_tokens.weight");
  CHECK(text_name("embed_tokens.weight") == "embed_tokens.weight");
  CHECK(text_name("lm_head.weight") == "lm_head.weight");
  CHECK(text_name("mtp.layers.0.self_attn.q_proj.weight") == "mtp.layers.0.self_attn.q_proj.weight");
  CHECK(text_name("model.mtp.norm.weight") == "mtp.norm.weight");
  CHECK_FALSE(text_name("model.visual.blocks.0.attn.qkv.weight").has_value());
  CHECK_FALSE(text_name("visual.merger.norm.weight").has_value());
  CHECK(text_name("layers.0.visual.weight") == "layers.0.visual.weight");
  CHECK(text_name("modelx.a") == "modelx.a");
  CHECK(text_name("") == "");
}

TEST_CASE("composite_text_only_and_bare_files_offer_the_same_names") {
  const std::vector<std::vector<std::string>> files = {
      {"model.language_model.layers.0.a", "lm_head.weight", "mtp.fc.weight", "model.visual.patch_embed.proj.weight"},
      {"model.layers.0.a", "lm_head.weight", "model.mtp.fc.weight"},
      {"layers.0.a", "lm_head.weight", "mtp.fc.weight", "visual.x"},
      {"language_model.layers.0.a", "language_model.lm_head.weight", "mtp.fc.weight"}};
  for (const auto& names : files) {
    const auto tensors = entries(names);
    const TextTensors text(tensors, "folder");
    REQUIRE(text.items().size() == 3);
    CHECK(text.items()[0].name == "layers.0.a");
    CHECK(text.items()[1].name == "lm_head.weight");
    CHECK(text.items()[2].name == "mtp.fc.weight");
    CHECK(text.find("layers.0.a") == &tensors[0]);
    CHECK(text.find("model.layers.0.a") == nullptr);
    CHECK(&text.at("lm_head.weight") == &tensors[1]);
  }
}

TEST_CASE("two_tensors_that_resolve_to_one_name_are_refused_naming_both") {
  const auto tensors = entries({"model.layers.0.a", "b", "model.language_model.layers.0.a"});
  CHECK(message_of([&] { TextTensors(tensors, "folder"); }) ==
        "folder: tensors model.language_model.layers.0.a and model.layers.0.a both resolve to layers.0.a");
}

TEST_CASE("a_missing_text_tensor_is_named_with_the_nearest_ones") {
  const auto tensors = entries({"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "model.norm.bias"});
  const TextTensors text(tensors, "folder");
  const std::string message = message_of([&] { text.at("layers.2.mlp.gate.weight"); });
  CHECK(message.starts_with("folder: tensor layers.2.mlp.gate.weight is missing; the nearest names are layers.0.mlp"));
  CHECK(message_of([&] { TextTensors({}, "folder").at("a"); }) ==
        "folder: tensor a is missing; the checkpoint has no tensors");
}

TEST_CASE("table_rows_follow_the_numeric_order_of_the_shards") {
  std::vector<TensorEntry> tensors;
  for (const char* k : {"10", "2", "0", "1", "11", "3", "4", "5", "6", "7", "8", "9"})
    tensors.push_back(entry(shard_name(k), {std::string(k) == "11" ? 3 : 5, 4}));
  const RowTable table(TextTensors(tensors, "folder"), kStem);
  CHECK(table.rows() == 11 * 5 + 3);
  CHECK(table.columns() == 4);
  CHECK(table.row_bytes() == 8);
  CHECK(table.shards().size() == 12);
  for (int64_t row = 0; row < table.rows(); ++row) {
    const auto [tensor, local] = table.locate(row);
    CHECK(tensor->name == shard_name(std::to_string(row / 5)));
    CHECK(local == row % 5);
  }
}

TEST_CASE("the_published_table_places_row_5000024_at_row_0_of_shard_2") {
  std::vector<TensorEntry> tensors;
  for (int k = 0; k < 128; ++k) tensors.push_back(entry(shard_name(std::to_string(k)), {2500012, 160}));
  const RowTable table(TextTensors(tensors, "folder"), kStem);
  CHECK(table.rows() == 320001536);
  CHECK(table.row_bytes() == 320);
  CHECK(table.locate(2 * 2500012).tensor->name == shard_name("2"));
  CHECK(table.locate(2 * 2500012).row == 0);
  CHECK(table.locate(2 * 2500012 - 1).tensor->name == shard_name("1"));
  CHECK(table.locate(2 * 2500012 - 1).row == 2500011);
  CHECK(table.locate(320001535).tensor->name == shard_name("127"));
}

TEST_CASE("an_unsplit_table_and_shards_of_any_height_are_legal") {
  const std::vector<TensorEntry> whole = {entry(fmt::format("{}.weight", kStem), {7, 2}, DType::f32)};
  const RowTable table(TextTensors(whole, "folder"), kStem);
  CHECK((table.rows() == 7 && table.row_bytes() == 8 && table.dtype() == DType::f32));
  CHECK((table.locate(6).tensor == whole.data() && table.locate(6).row == 6));

  const std::vector<TensorEntry> uneven = {entry(shard_name("0"), {2, 2}), entry(shard_name("1"), {0, 2}),
                                           entry(shard_name("2"), {3, 2})};
  const RowTable stepped(TextTensors(uneven, "folder"), kStem);
  CHECK(stepped.rows() == 5);
  CHECK((stepped.locate(1).tensor == &uneven[0] && stepped.locate(1).row == 1));
  CHECK((stepped.locate(2).tensor == &uneven[2] && stepped.locate(2).row == 0));
}

TEST_CASE("incomplete_or_inconsistent_tables_are_refused_by_name") {
  const auto refused = [](std::vector<TensorEntry> tensors) {
    return message_of([&] { RowTable(TextTensors(tensors, "folder"), kStem); });
  };
  const auto shard = [](std::string_view k, std::vector<int64_t> shape = {2, 2}, DType dtype = DType::bf16) {
    return entry(shard_name(k), std::move(shape), dtype);
  };
  CHECK(refused({shard("0"), shard("2")}).find("shard_1.weight is missing, but " + shard_name("2")) !=
        std::string::npos);
  CHECK(refused({shard("1")}).find("shard_0.weight is missing") != std::string::npos);
  CHECK(refused({shard("0"), shard("9223372036854775807")}).find("shard_1.weight is missing") != std::string::npos);
  for (const char* k : {"01", "-1", "+1", "", "x", "1x", "1.weight", "99999999999999999999"})
    CHECK(refused({shard("0"), shard(k)}).find("tensor " + shard_name(k) + ": expected") != std::string::npos);
  CHECK(refused({shard("0"), entry(fmt::format("{}.weight", kStem), {2, 2})}).find("two forms of one table") !=
        std::string::npos);
  CHECK(refused({entry("model.layers.0.a")}).find("shard_0.weight is missing") != std::string::npos);
  CHECK(refused({shard("0", {2})}).find("has shape [2], expected [rows, columns]") != std::string::npos);
  CHECK(refused({shard("0"), shard("1", {2, 3})}).find("shard_1.weight is BF16 with 3 columns") != std::string::npos);
  CHECK(refused({shard("0"), shard("1", {2, 2}, DType::f32)}).find("is F32 with 2 columns") != std::string::npos);
  const int64_t huge = int64_t{1} << 62;
  CHECK(refused({shard("0", {huge, 0}), shard("1", {huge, 0})}).find("more than a table can count") !=
        std::string::npos);
}

}  // namespace offload::checkpoint_names_test
