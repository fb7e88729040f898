#include "core/dtype.h"

#include <cmath>

namespace offload {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::boolean:
      return "BOOL";
    case DType::u8:
      return "U8";
    case DType::i8:
      return "I8";
    case DType::f8_e4m3:
      return "F8_E4M3";
    case DType::f8_e5m2:
      return "F8_E5M2";
    case DType::f8_e8m0:
      return "F8_E8M0";
    case DType::u16:
      return "U16";
    case DType::i16:
      return "I16";
    case DType::f16:
      return "F16";
    case DType::bf16:
      return "BF16";
    case DType::u32:
      return "U32";
    case DType::i32:
      return "I32";
    case DType::f32:
      return "F32";
    case DType::u64:
      return "U64";
    case DType::i64:
      return "I64";
    case DType::f64:
      return "F64";
  }
  return "";
}

std::optional<DType> parse_dtype(std::string_view name) {
  for (int i = 0; i < kDTypes; ++i)
    if (dtype_name(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  return std::nullopt;
}

float to_float_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;  // one step towards zero, also from infinity
  return std::bit_cast<float>(bits | 1u);
}

}  // namespace offload
