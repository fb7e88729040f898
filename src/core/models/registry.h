// Which model types exist, and from a checkpoint's config.json to its ModelSpec.
#ifndef OFFLOAD_CORE_MODELS_REGISTRY_H_
#define OFFLOAD_CORE_MODELS_REGISTRY_H_

#include <string>
#include <string_view>

#include "core/json.h"
#include "core/model_spec.h"

namespace offload {

// Throws Error{input} naming the model type found and those supported.
ModelSpec model_spec(const Json& config, std::string_view origin);

// Reads `model`/config.json, or `model` itself when its name ends in ".json". Throws Error{input}.
ModelSpec load_model_spec(const std::string& model);

}  // namespace offload

#endif  // OFFLOAD_CORE_MODELS_REGISTRY_H_
