// Tiny random checkpoints against the published implementation (tests/data/golden/tiny-qwen4-exp/make_golden.py says
// how they were made): what the demo cannot tell apart.
#include <doctest/doctest.h>

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "core/checkpoint.h"
#include "core/json.h"
#include "model_runner.h"

namespace offload::tiny_golden_test {

namespace {

constexpr double kOfLargestLogit = 1e-4;   // FP32 against FP32, sums in another order
constexpr double kRouterMarginMin = 1e-5;  // of a probability
constexpr double kBlockMarginMin = 1e-4;   // of a score of about 1
constexpr size_t kStoredIdStep = 4;        // the file holds the logits of every fourth id
// Root mean square of the error over that of the logits. Measured 0.012 to 0.027, a few flipped experts included.
constexpr double kBf16ErrorMax = 0.05;
const std::vector<size_t> kPieces{7, 1, 1, 13, 64, 44};

std::string variant_dir(const std::string& variant) {
  return OFFLOAD_SOURCE_DIR "/tests/data/golden/tiny-qwen4-exp/" + variant;
}

struct Reference {
  explicit Reference(const std::string& variant) {
    const Checkpoint file = Checkpoint::open(variant_dir(variant) + "/reference.safetensors");
    const TensorEntry& entry = file.at("input_ids");
    ids.resize(static_cast<size_t>(entry.bytes / 4));
    file.read(entry, 0, std::as_writable_bytes(std::span(ids)));
    logits = file.read_as_f32(file.at("logits"));
    router_margin = file.read_as_f32(file.at("router_margin"));
    block_margin = file.read_as_f32(file.at("block_margin"));
  }
  double scale() const {
    double largest = 0;
    for (const float v : logits) largest = std::max(largest, std::abs(double{v}));
    return largest;
  }

  std::vector<int32_t> ids;
  std::vector<float> logits;  // [ids, vocab / kStoredIdStep]
  std::vector<float> router_margin, block_margin;
};

// Those of the stored ids.
std::vector<float> stored_columns(const std::vector<float>& logits) {
  std::vector<float> out;
  for (size_t i = 0; i < logits.size(); i += kStoredIdStep) out.push_back(logits[i]);
  return out;
}

// How far the model differs from the reference, as a part of the largest logit.
double deviation(const std::string& model_dir, const Reference& reference, const std::vector<size_t>& pieces) {
  ModelRunner runner(model_dir);
  return largest_difference(stored_columns(runner.logits(reference.ids, pieces)), reference.logits) / reference.scale();
}

// A copy of a variant whose config.json has one field changed; its tensors are links to the variant's.
class ChangedVariant {
 public:
  ChangedVariant(const std::string& variant, const std::function<void(Json& text_config)>& change) {
    std::string name = (std::filesystem::temp_directory_path() / "offload_tiny_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
    const std::string from = variant_dir(variant);
    Json config = parse_json(read_text_file(from + "/config.json", 1 << 20), "config.json");
    change(config.contains("text_config") ? config["text_config"] : config);
    std::ofstream(path_ + "/config.json") << config.dump();
    std::filesystem::create_symlink(from + "/model.safetensors", path_ + "/model.safetensors");
  }
  ~ChangedVariant() { std::filesystem::remove_all(path_); }
  ChangedVariant(const ChangedVariant&) = delete;
  ChangedVariant& operator=(const ChangedVariant&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

constexpr const char* kVariants[] = {"base", "two_streams", "composite", "three_streams"};

}  // namespace

TEST_CASE("fp32_arm_reproduces_the_published_logits_of_every_variant_at_once_and_in_pieces") {
  for (const char* variant : kVariants) {
    CAPTURE(std::string(variant));
    const Reference reference(variant);
    REQUIRE(reference.ids.size() == 130);
    // No decision of these files hangs on rounding; a row that did would have to be left out with all after it.
    for (size_t r = 0; r < reference.ids.size(); ++r) {
      REQUIRE(reference.router_margin[r] >= kRouterMarginMin);
      REQUIRE(reference.block_margin[r] >= kBlockMarginMin);
    }
    for (const std::vector<size_t>& pieces : {std::vector<size_t>{SIZE_MAX}, kPieces, {1}, {64}}) {
      CAPTURE(pieces.front());
      CHECK(deviation(variant_dir(variant), reference, pieces) <= kOfLargestLogit);
    }
  }
}

TEST_CASE("bf16_arms_stay_near_the_published_fp32_logits_of_every_variant") {
  for (const char* variant : kVariants) {
    CAPTURE(std::string(variant));
    const Reference reference(variant);
    for (const Rounding rounding : {Rounding::reference, Rounding::fused}) {
      ModelRunner runner(variant_dir(variant), {DType::bf16, rounding});
      const std::vector<float> logits = stored_columns(runner.logits(reference.ids));
      double squares = 0, expected_squares = 0;
      for (size_t i = 0; i < logits.size(); ++i) {
        const double difference = double{logits[i]} - double{reference.logits[i]};
        squares += difference * difference;
        expected_squares += double{reference.logits[i]} * double{reference.logits[i]};
      }
      CHECK(std::sqrt(squares / expected_squares) <= kBf16ErrorMax);
    }
  }
}

// Each misreading that these files are there to catch moves the logits far beyond the tolerance.
TEST_CASE("the_variants_tell_apart_what_they_are_meant_to") {
  constexpr double kSeen = 20 * kOfLargestLogit;
  struct Misreading {
    const char* variant;
    const char* field;
    Json value;
  };
  const std::vector<Misreading> misreadings = {
      {"base", "output_gate_type", "silu"},    {"two_streams", "output_gate_type", "sigmoid"},
      {"base", "rms_norm_eps", 1e-2},          {"composite", "rms_norm_eps", 1e-6},
      {"base", "indexer_budget", 20},          {"three_streams", "norm_topk_prob", true},
      {"base", "eos_token_id", 251},           {"two_streams", "eos_token_id", Json::array({251, 250})},
      {"three_streams", "indexer_budget", 10},
  };
  for (const Misreading& each : misreadings) {
    CAPTURE(std::string(each.variant));
    CAPTURE(std::string(each.field));
    const ChangedVariant changed(each.variant, [&](Json& config) { config[each.field] = each.value; });
    CHECK(deviation(changed.path(), Reference(each.variant), {SIZE_MAX}) >= kSeen);
  }
  const std::vector<Misreading> rope_misreadings = {
      {"composite", "rope_type", "default"}, {"composite", "factor", 2.0}, {"base", "rope_theta", 1e6}};
  for (const Misreading& each : rope_misreadings) {
    CAPTURE(std::string(each.field));
    const ChangedVariant changed(each.variant,
                                 [&](Json& config) { config["rope_parameters"][each.field] = each.value; });
    CHECK(deviation(changed.path(), Reference(each.variant), {SIZE_MAX}) >= kSeen);
  }
}

}  // namespace offload::tiny_golden_test
