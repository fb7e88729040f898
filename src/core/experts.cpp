#include "core/experts.h"

namespace offload {
namespace {

bool is_fused(const WeightSource& source, const ExpertLayer& layer) {
  return source.tensors() == nullptr || source.tensors()->find(layer.prefix + ".gate_up_proj") != nullptr;
}

TensorEntry require_typed(const WeightSource& source, const std::string& name, std::span<const int64_t> shape,
                          DType dtype) {
  TensorEntry entry = source.require(name, shape);
  if (entry.dtype != dtype)
    throw_error(ErrorCode::input, "tensor {} has type {}, the other experts have {}", printable(entry.name),
                dtype_name(entry.dtype), dtype_name(dtype));
  return entry;
}

}  // namespace

DType expert_dtype(const WeightSource& source, const ExpertLayer& layer) {
  if (source.tensors() == nullptr) return DType::bf16;
  const TensorEntry& entry =
      source.tensors()->at(layer.prefix + (is_fused(source, layer) ? ".gate_up_proj" : ".0.gate_proj.weight"));
  if (entry.dtype != DType::bf16 && entry.dtype != DType::f32)
    throw_error(ErrorCode::input, "{}: tensor {} has type {}; experts are supported as BF16 or F32",
                source.tensors()->origin(), printable(entry.name), dtype_name(entry.dtype));
  return entry.dtype;
}

std::vector<ExpertPiece> expert_pieces(const WeightSource& source, const ExpertLayer& layer, const ExpertShape& shape,
                                       int64_t expert) {
  OFL_ASSERT(expert >= 0 && expert < shape.experts);
  const int64_t matrix_bytes = shape.intermediate * shape.hidden * dtype_bytes(shape.dtype);
  if (is_fused(source, layer)) {
    const int64_t gate_up[] = {shape.experts, 2 * shape.intermediate, shape.hidden};
    const int64_t down[] = {shape.experts, shape.hidden, shape.intermediate};
    return {{require_typed(source, layer.prefix + ".gate_up_proj", gate_up, shape.dtype), expert * 2 * matrix_bytes,
             2 * matrix_bytes, 0},
            {require_typed(source, layer.prefix + ".down_proj", down, shape.dtype), expert * matrix_bytes, matrix_bytes,
             2 * matrix_bytes}};
  }
  const int64_t in[] = {shape.intermediate, shape.hidden};
  const int64_t out[] = {shape.hidden, shape.intermediate};
  const std::string stem = fmt::format("{}.{}.", layer.prefix, expert);
  return {{require_typed(source, stem + "gate_proj.weight", in, shape.dtype), 0, matrix_bytes, 0},
          {require_typed(source, stem + "up_proj.weight", in, shape.dtype), 0, matrix_bytes, matrix_bytes},
          {require_typed(source, stem + "down_proj.weight", out, shape.dtype), 0, matrix_bytes, 2 * matrix_bytes}};
}

}  // namespace offload
