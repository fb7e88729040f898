// qwen4_exp (Qwen3.8-Flash-Next): config.json -> ModelSpec.
#ifndef OFFLOAD_CORE_MODELS_QWEN4_EXP_H_
#define OFFLOAD_CORE_MODELS_QWEN4_EXP_H_

#include <string_view>

#include "core/json.h"
#include "core/model_spec.h"

namespace offload {

// `config`: the whole document, composite or text-only. `origin` opens every message. Throws Error{input} naming the
// field, its value and what is supported.
ModelSpec qwen4_exp_spec(const Json& config, std::string_view origin);

}  // namespace offload

#endif  // OFFLOAD_CORE_MODELS_QWEN4_EXP_H_
