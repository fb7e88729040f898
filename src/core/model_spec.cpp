#include "core/model_spec.h"

#include <fmt/format.h>

namespace offload {
namespace {

bool splits(const GatedDeltaNetSpec& net, int world) {
  return net.key_heads % world == 0;
}

// A rank's query heads lie in one key/value group or are whole groups.
bool splits(const QsaSpec& qsa, int world) {
  if (qsa.query_heads % world != 0) return false;
  const int64_t heads = qsa.query_heads / world, group = qsa.query_heads / qsa.kv_heads;
  return heads % group == 0 || group % heads == 0;
}

}  // namespace

std::vector<int> tensor_parallel_worlds(const ModelSpec& spec, bool sliced_experts) {
  constexpr int kWorldMax = 64;
  std::vector<int> worlds;
  for (int world = 1; world <= kWorldMax; ++world) {
    bool fits = world <= spec.vocab;
    for (const LayerSpec& layer : spec.layers) {
      fits &= std::visit([&](const auto& mixer) { return splits(mixer, world); }, layer.mixer);
      fits &= layer.moe.shared_intermediate % world == 0;
      fits &= sliced_experts ? layer.moe.intermediate % world == 0 : world <= layer.moe.experts;
    }
    if (fits) worlds.push_back(world);
  }
  return worlds;
}

std::string tensor_parallel_obstacle(const ModelSpec& spec) {
  std::string text;
  const auto add = [&](int64_t count, const char* what) {
    const std::string part = fmt::format("{} {}", count, what);
    if (text.find(part) == std::string::npos) text += (text.empty() ? "" : ", ") + part;
  };
  for (const LayerSpec& layer : spec.layers) {
    if (const auto* net = std::get_if<GatedDeltaNetSpec>(&layer.mixer)) add(net->key_heads, "key heads");
    if (const auto* qsa = std::get_if<QsaSpec>(&layer.mixer)) add(qsa->query_heads, "query heads");
  }
  add(spec.layers.front().moe.shared_intermediate, "columns of the shared expert");
  return text;
}

}  // namespace offload
