// A model's own defaults for sampling and stopping: generation_config.json, with the end-of-text ids of config.json and
// tokenizer_config.json.
//
// Missing files and keys leave the neutral values below; a request overrides them. Refuses values that no sampler could
// use, naming file, key and value. Does not sample. Thread-safe: no state.
#ifndef OFFLOAD_CORE_GENERATION_CONFIG_H_
#define OFFLOAD_CORE_GENERATION_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace offload {

class Tokenizer;

struct GenerationDefaults {
  std::vector<int32_t> eos_ids;  // ascending, each once: any of them ends the text
  std::optional<int32_t> bos_id, pad_id;
  bool do_sample = false;  // false: greedy, whatever the values below
  double temperature = 1;
  double top_p = 1;
  int64_t top_k = 0;  // 0: off
  double min_p = 0;
  double repetition_penalty = 1;
  std::optional<int64_t> max_new_tokens;

  // Reads the three files of `model_directory`, each if it is there. `tokenizer` turns tokenizer_config.json's
  // eos_token into an id; null for a model without one. Throws Error{input}.
  static GenerationDefaults load(const std::string& model_directory, const Tokenizer* tokenizer);
};

// One file's part, from its text; for load and for tests. `origin` is the file's name.
void apply_generation_config(std::string_view json, std::string_view origin, GenerationDefaults& defaults);
// config.json: eos_token_id, bos_token_id, pad_token_id, also those of its text_config. Set ids of bos and pad stay.
void apply_model_config(std::string_view json, std::string_view origin, GenerationDefaults& defaults);

}  // namespace offload

#endif  // OFFLOAD_CORE_GENERATION_CONFIG_H_
