#include "core/generation_config.h"

#include <doctest/doctest.h>

#include "core/base.h"
#include "core/tokenizer.h"

namespace offload::generation_config_test {

namespace {

GenerationDefaults read(std::string_view json) {
  GenerationDefaults defaults;
  apply_generation_config(json, "generation_config.json", defaults);
  return defaults;
}

}  // namespace

TEST_CASE("the_demo_model_has_its_own_defaults") {
  const std::string directory = OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp";
  const Tokenizer tokenizer = Tokenizer::load(directory);
  const auto defaults = GenerationDefaults::load(directory, &tokenizer);
  CHECK(defaults.eos_ids == std::vector<int32_t>{4071, 4073});
  CHECK(defaults.pad_id == 4071);
  CHECK_FALSE(defaults.bos_id);
  CHECK(defaults.do_sample);
  CHECK(defaults.temperature == 0.7);
  CHECK(defaults.top_p == 0.8);
  CHECK(defaults.top_k == 20);
  CHECK(defaults.min_p == 0);
  CHECK(defaults.repetition_penalty == 1);
  CHECK_FALSE(defaults.max_new_tokens);
}

TEST_CASE("missing_files_mean_neutral_values") {
  const auto defaults = GenerationDefaults::load(OFFLOAD_SOURCE_DIR "/tests/data", nullptr);
  CHECK(defaults.eos_ids.empty());
  CHECK_FALSE(defaults.do_sample);
  CHECK(defaults.temperature == 1);
  CHECK(defaults.top_p == 1);
  CHECK(defaults.top_k == 0);
}

TEST_CASE("stop_ids_are_the_union_of_all_places") {
  GenerationDefaults defaults;
  apply_generation_config(R"({"eos_token_id": [9, 3], "bos_token_id": 1})", "generation_config.json", defaults);
  apply_model_config(
      R"({"eos_token_id": 3, "bos_token_id": 2, "text_config": {"eos_token_id": [7], "pad_token_id": 0}})",
      "config.json", defaults);
  CHECK(defaults.eos_ids == std::vector<int32_t>{3, 7, 9});
  CHECK(defaults.bos_id == 1);
  CHECK(defaults.pad_id == 0);
  const Tokenizer tiny = Tokenizer::load(OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/tiny");
  CHECK(GenerationDefaults::load(OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/tiny", &tiny).eos_ids.empty());
}

TEST_CASE("null_and_absent_are_the_same") {
  const auto defaults = read(R"({"eos_token_id": null, "temperature": null, "top_k": null, "max_new_tokens": null})");
  CHECK(defaults.eos_ids.empty());
  CHECK(defaults.temperature == 1);
  CHECK_FALSE(defaults.max_new_tokens);
}

TEST_CASE("hostile_values_are_refused_by_file_key_and_value") {
  struct Case {
    const char *json, *key, *value;
  };
  const Case cases[] = {
      {R"({"temperature": NaN})", "temperature", "NaN"},
      {R"({"temperature": -Infinity})", "temperature", "-Infinity"},
      {R"({"temperature": -0.5})", "temperature", "-0.5"},
      {R"({"temperature": "hot"})", "temperature", "hot"},
      {R"({"temperature": true})", "temperature", "true"},
      {R"({"top_p": 0})", "top_p", "0"},
      {R"({"top_p": 1.5})", "top_p", "1.5"},
      {R"({"top_k": -1})", "top_k", "-1"},
      {R"({"top_k": 2.5})", "top_k", "2.5"},
      {R"({"top_k": 99999999999})", "top_k", "99999999999"},
      {R"({"min_p": -0.1})", "min_p", "-0.1"},
      {R"({"min_p": 1.1})", "min_p", "1.1"},
      {R"({"repetition_penalty": 0})", "repetition_penalty", "0"},
      {R"({"repetition_penalty": Infinity})", "repetition_penalty", "Infinity"},
      {R"({"do_sample": "yes"})", "do_sample", "yes"},
      {R"({"max_new_tokens": 0})", "max_new_tokens", "0"},
      {R"({"max_new_tokens": -5})", "max_new_tokens", "-5"},
      {R"({"eos_token_id": -1})", "eos_token_id", "-1"},
      {R"({"eos_token_id": [1, "2"]})", "eos_token_id", "2"},
      {R"({"eos_token_id": 4294967296})", "eos_token_id", "4294967296"},
      {R"({"pad_token_id": 1.5})", "pad_token_id", "1.5"},
      {R"({"bos_token_id": {}})", "bos_token_id", "{}"},
  };
  for (const Case& item : cases) {
    CAPTURE(item.json);
    std::string message;
    try {
      read(item.json);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::input);
      message = error.message();
    }
    CHECK(message.find("generation_config.json") != std::string::npos);
    CHECK(message.find(item.key) != std::string::npos);
    CHECK(message.find(item.value) != std::string::npos);
  }
  CHECK_THROWS_AS(read("[]"), Error);
  CHECK_THROWS_AS(read("{\"temperature\": 1"), Error);
  CHECK_THROWS_AS(read("{\"temperature\": 1e999}"), Error);
}

TEST_CASE("the_words_nan_and_infinity_inside_strings_stay") {
  CHECK(read(R"({"note": "NaN \" Infinity", "temperature": 0.25})").temperature == 0.25);
}

}  // namespace offload::generation_config_test
