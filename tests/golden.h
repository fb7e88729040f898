// The demo checkpoint's reference outputs (tests/data/golden/demo-qwen4-exp), made by the published implementation.
#ifndef OFFLOAD_TESTS_GOLDEN_H_
#define OFFLOAD_TESTS_GOLDEN_H_

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/checkpoint.h"
#include "core/json.h"

namespace offload {

struct GoldenChain {
  std::vector<int32_t> tokens;
  std::vector<double> margins;  // top-1 less top-2 at each decision
};

struct GoldenPrompt {
  std::string name;
  std::vector<int32_t> ids;
  GoldenChain fp32, bf16;
  double bf16_mean_kl;  // of the published BF16 run against its FP32 run
};

struct GoldenTensor {
  std::vector<float> values;
  int64_t columns;
  int64_t rows() const { return static_cast<int64_t>(values.size()) / columns; }
  std::span<const float> row(int64_t i) const {
    return std::span(values).subspan(static_cast<size_t>(i * columns), static_cast<size_t>(columns));
  }
};

class Golden {
 public:
  Golden()
      : tensors_(Checkpoint::open(dir() + "/reference.safetensors")),
        json_(parse_json(read_text_file(dir() + "/reference.json", 1 << 20), "reference.json")) {
    for (const char* name : {"english", "chinese", "code", "fact", "long_english", "long_chinese", "long_code"}) {
      const Json& prompt = json_.at("prompts").at(name);
      const auto chain = [&](const char* arm) {
        return GoldenChain{prompt.at("greedy").at(arm).at("tokens").get<std::vector<int32_t>>(),
                           prompt.at("greedy").at(arm).at("margins").get<std::vector<double>>()};
      };
      prompts_.push_back({name, prompt.at("ids").get<std::vector<int32_t>>(), chain("fp32"), chain("bf16"),
                          prompt.at("bf16_vs_fp32_mean_kl").get<double>()});
    }
  }

  static std::string model_dir() { return OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp"; }
  const std::vector<GoldenPrompt>& prompts() const { return prompts_; }
  const Json& json() const { return json_; }

  GoldenTensor tensor(const std::string& name) const {
    const TensorEntry& entry = tensors_.at(name);
    return {tensors_.read_as_f32(entry), entry.shape.back()};
  }
  std::vector<int32_t> ids(const std::string& name) const {
    const TensorEntry& entry = tensors_.at(name);
    std::vector<int32_t> values(static_cast<size_t>(entry.bytes / 4));
    tensors_.read(entry, 0, std::as_writable_bytes(std::span(values)));
    return values;
  }

 private:
  static std::string dir() { return OFFLOAD_SOURCE_DIR "/tests/data/golden/demo-qwen4-exp"; }

  Checkpoint tensors_;
  Json json_;
  std::vector<GoldenPrompt> prompts_;
};

inline size_t argmax(std::span<const float> values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_GOLDEN_H_
