#include "core/dtype.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace offload::dtype_test {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value of a 16-bit float from its fields, by the definition of binary interchange formats.
double defined_value(uint32_t code, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
  double magnitude = 0;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
  return code & 0x8000u ? -magnitude : magnitude;
}

struct Bf16 {
  using Type = bf16;
  static constexpr int kExponentBits = 8;
  static constexpr uint32_t kInfinityCode = 0x7f80;
  static bf16 round(float value) { return to_bf16(value); }
};
struct Fp16 {
  using Type = fp16;
  static constexpr int kExponentBits = 5;
  static constexpr uint32_t kInfinityCode = 0x7c00;
  static fp16 round(float value) { return to_fp16(value); }
};

template <typename Format>
float decode(uint32_t code) {
  return to_float(typename Format::Type{static_cast<uint16_t>(code)});
}

// Nearest code by search over all of them, ties to the even code; the place of infinity is 2^emax+1, as IEEE 754
// rounds.
template <typename Format>
uint32_t nearest_code(double value) {
  const double magnitude = std::fabs(value);
  uint32_t low = 0, high = Format::kInfinityCode;
  const auto place = [](uint32_t code) {
    return code == Format::kInfinityCode ? std::ldexp(1.0, 1 << (Format::kExponentBits - 1))
                                         : defined_value(code, Format::kExponentBits);
  };
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (place(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - place(low), above = place(high) - magnitude;
  const uint32_t code = below < above ? low : above < below ? high : (low % 2 == 0 ? low : high);
  return code | (std::signbit(value) ? 0x8000u : 0u);
}

}  // namespace

static_assert(to_bf16(1.0f).bits == 0x3f80 && to_fp16(1.0f).bits == 0x3c00);
static_assert(to_float(bf16{0xc000}) == -2.0f && to_float(fp16{0x0001}) == 0x1p-24f);

TEST_CASE("every_dtype_has_a_size_and_a_name_that_parses_back_and_no_other_text_parses") {
  const std::vector<std::pair<std::string, int>> spelled = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2},
      {"F16", 2},  {"BF16", 2}, {"U32", 4}, {"I32", 4},     {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  REQUIRE(spelled.size() == static_cast<size_t>(kDTypes));
  for (int i = 0; i < kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK(dtype_name(dtype) == spelled[static_cast<size_t>(i)].first);
    CHECK(dtype_bytes(dtype) == spelled[static_cast<size_t>(i)].second);
    CHECK(parse_dtype(dtype_name(dtype)) == dtype);
  }
  for (const char* text : {"", "f32", "F32 ", "F4", "F6_E2M3", "F6_E3M2", "BF1", "BF166", "I128", "C64"})
    CHECK_FALSE(parse_dtype(text).has_value());
}

TEST_CASE_TEMPLATE("all_65536_codes_decode_exactly_and_round_back_to_themselves", Format, Bf16, Fp16) {
  int64_t nan_codes = 0;
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = decode<Format>(code);
    const uint32_t back = Format::round(value).bits;
    if ((code & 0x7fffu) > Format::kInfinityCode) {
      ++nan_codes;
      const uint32_t quiet = 1u << (14 - Format::kExponentBits);
      REQUIRE(std::isnan(value));
      REQUIRE(std::signbit(value) == ((code & 0x8000u) != 0));
      REQUIRE(back == (code | quiet));
      continue;
    }
    REQUIRE(static_cast<double>(value) == defined_value(code, Format::kExponentBits));
    REQUIRE(std::signbit(value) == ((code & 0x8000u) != 0));
    REQUIRE(back == code);
  }
  CHECK(nan_codes == 2 * ((1 << (15 - Format::kExponentBits)) - 1));
}

TEST_CASE_TEMPLATE("every_midpoint_goes_to_the_even_code_and_its_float_neighbours_to_the_nearer_one", Format, Bf16,
                   Fp16) {
  for (uint32_t code = 0; code < Format::kInfinityCode; ++code) {
    const double low = defined_value(code, Format::kExponentBits);
    // Above the largest finite value the next step would be 2^(emax+1); its half-way point is where infinity begins.
    const double high = code + 1 == Format::kInfinityCode ? std::ldexp(1.0, 1 << (Format::kExponentBits - 1))
                                                          : defined_value(code + 1, Format::kExponentBits);
    const auto middle = static_cast<float>((low + high) / 2);
    REQUIRE(static_cast<double>(middle) == (low + high) / 2);
    const uint32_t even = code % 2 == 0 ? code : code + 1;
    REQUIRE(Format::round(middle).bits == even);
    REQUIRE(Format::round(-middle).bits == (even | 0x8000u));
    REQUIRE(Format::round(std::nextafter(middle, 0.0f)).bits == code);
    REQUIRE(Format::round(std::nextafter(middle, kInfinity)).bits == code + 1);
    REQUIRE(Format::round(-std::nextafter(middle, kInfinity)).bits == ((code + 1) | 0x8000u));
  }
}

TEST_CASE_TEMPLATE("floats_of_all_magnitudes_round_to_the_nearest_code", Format, Bf16, Fp16) {
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 9973) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    REQUIRE(Format::round(value).bits == nearest_code<Format>(static_cast<double>(value)));
  }
  CHECK(Format::round(kInfinity).bits == Format::kInfinityCode);
  CHECK(Format::round(-kInfinity).bits == (Format::kInfinityCode | 0x8000u));
  CHECK(Format::round(std::numeric_limits<float>::max()).bits == Format::kInfinityCode);
  CHECK(Format::round(-0.0f).bits == 0x8000u);
  // A NaN whose payload lies only in the bits that are cut must not become infinity.
  CHECK(std::isnan(decode<Format>(Format::round(std::bit_cast<float>(0x7f800001u)).bits)));
  CHECK(Format::round(std::bit_cast<float>(0xffffffffu)).bits == 0xffffu);
}

TEST_CASE("a_double_through_to_float_odd_rounds_once") {
  // 1 + 2^-8 is the tie between two bf16 codes; with 2^-40 added it lies above, which a float cannot show.
  const double above_tie = 1.0 + 0x1p-8 + 0x1p-40;
  CHECK(to_bf16(static_cast<float>(above_tie)).bits == 0x3f80);
  CHECK(to_bf16(to_float_odd(above_tie)).bits == 0x3f81);
  CHECK(to_float_odd(0.5) == 0.5f);
  CHECK(to_bf16(to_float_odd(1e300)).bits == 0x7f80);
  CHECK(to_bf16(to_float_odd(-1e-300)).bits == 0x8000);
  CHECK(std::isnan(to_float_odd(std::nan(""))));
  CHECK(to_float_odd(HUGE_VAL) == kInfinity);
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double value =
        std::ldexp(1.0 + std::ldexp(static_cast<double>(random() >> 12), -52), static_cast<int>(random() % 300) - 150) *
        (random() % 2 ? 1 : -1);
    CAPTURE(value);
    REQUIRE(to_bf16(to_float_odd(value)).bits == nearest_code<Bf16>(value));
    REQUIRE(to_fp16(to_float_odd(value)).bits == nearest_code<Fp16>(value));
  }
}

}  // namespace offload::dtype_test
