// Scalar types of checkpoints and tensors, and the exact conversions between float and the 16-bit floats.
//
// Refuses block formats and sub-byte types (F4, F6_*): they are not scalars with an address. Thread-safe: no state.
#ifndef OFFLOAD_CORE_DTYPE_H_
#define OFFLOAD_CORE_DTYPE_H_

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace offload {

// The byte-sized types of the safetensors format. f8_e4m3 is E4M3FN (no infinity), f8_e8m0 a power-of-two scale.
enum class DType : uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64,
};

inline constexpr int kDTypes = static_cast<int>(DType::f64) + 1;

// Bytes of one element: 1, 2, 4 or 8.
constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::u8:
    case DType::i8:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::f8_e8m0:
      return 1;
    case DType::u16:
    case DType::i16:
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::u32:
    case DType::i32:
    case DType::f32:
      return 4;
    case DType::u64:
    case DType::i64:
    case DType::f64:
      return 8;
  }
  return 0;
}

// The name as safetensors spells it: "BF16", "F8_E4M3", "BOOL".
std::string_view dtype_name(DType dtype);

// The type that dtype_name() spells `name`, exactly; nothing for every other text.
std::optional<DType> parse_dtype(std::string_view name);

// Storage of one 16-bit float; arithmetic is done in float. Equal means equal bits.
struct bf16 {
  uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;
};
struct fp16 {
  uint16_t bits;
  friend constexpr bool operator==(fp16, fp16) = default;
};

// Exact.
constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Exact, subnormals included; a NaN keeps its sign and payload.
constexpr float to_float(fp16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // both factors and the product are exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Round to nearest, ties to even; overflow gives infinity; a NaN keeps its sign and becomes quiet.
constexpr bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Round to nearest, ties to even; overflow (from 65520 on) gives infinity; a NaN keeps its sign and becomes quiet.
constexpr fp16 to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const auto code = [sign](uint32_t rest) { return fp16{static_cast<uint16_t>(sign | rest)}; };
  if (magnitude > 0x7f800000u) return code(0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return code(0x7c00u);  // 65520, half-way from the largest finite value to the next
  if (magnitude >= 0x38800000u)                        // 2^-14, the smallest normal value
    return code((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
  // Subnormal result: count units of 2^-24 by hand, so that no rounding mode and no flush-to-zero can change it.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return code(0);  // below 2^-25, half of the smallest subnormal
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126 - exponent;  // 14..24
  const uint32_t units = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
  return code(units + (rest > half || (rest == half && (units & 1u)) ? 1u : 0u));
}

// `value` cut towards zero to a float, its last bit set when anything was cut (round to odd). Rounding that to nearest
// with to_bf16 or to_fp16 equals rounding `value` once, which rounding to nearest twice does not.
float to_float_odd(double value);

}  // namespace offload

#endif  // OFFLOAD_CORE_DTYPE_H_
