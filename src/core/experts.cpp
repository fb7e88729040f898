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
                                       int64_t expert, ExpertSlice slice) {
  OFL_ASSERT(expert >= 0 && expert < shape.experts);
  OFL_ASSERT(slice.count >= 1 && slice.index >= 0 && slice.index < slice.count);
  OFL_ASSERT(shape.intermediate % slice.count == 0);
  const int64_t matrix_bytes = shape.intermediate * shape.hidden * dtype_bytes(shape.dtype);
  const int64_t part_bytes = matrix_bytes / slice.count;
  const int64_t row_bytes = shape.intermediate * dtype_bytes(shape.dtype);  // of down
  const int64_t rows_begin = slice.index * part_bytes;
  const int64_t columns_begin = slice.index * (row_bytes / slice.count);
  const auto pieces = [&](TensorEntry gate, int64_t gate_at, TensorEntry up, int64_t up_at, TensorEntry down,
                          int64_t down_at) -> std::vector<ExpertPiece> {
    ExpertPiece columns{std::move(down), down_at + columns_begin, part_bytes, 2 * part_bytes};
    if (slice.count > 1) {
      columns.rows = shape.hidden;
      columns.row_bytes = row_bytes / slice.count;
      columns.tensor_stride = row_bytes;
    }
    return {{std::move(gate), gate_at + rows_begin, part_bytes, 0},
            {std::move(up), up_at + rows_begin, part_bytes, part_bytes},
            std::move(columns)};
  };
  if (is_fused(source, layer)) {
    const int64_t gate_up[] = {shape.experts, 2 * shape.intermediate, shape.hidden};
    const int64_t down[] = {shape.experts, shape.hidden, shape.intermediate};
    const TensorEntry in = require_typed(source, layer.prefix + ".gate_up_proj", gate_up, shape.dtype);
    const int64_t in_at = expert * 2 * matrix_bytes;
    return pieces(in, in_at, in, in_at + matrix_bytes,
                  require_typed(source, layer.prefix + ".down_proj", down, shape.dtype), expert * matrix_bytes);
  }
  const int64_t in[] = {shape.intermediate, shape.hidden};
  const int64_t out[] = {shape.hidden, shape.intermediate};
  const std::string stem = fmt::format("{}.{}.", layer.prefix, expert);
  TensorEntry gate = require_typed(source, stem + "gate_proj.weight", in, shape.dtype);
  TensorEntry up = require_typed(source, stem + "up_proj.weight", in, shape.dtype);
  TensorEntry down = require_typed(source, stem + "down_proj.weight", out, shape.dtype);
  return pieces(std::move(gate), 0, std::move(up), 0, std::move(down), 0);
}

}  // namespace offload
