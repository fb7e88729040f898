// Cases of causal_conv_silu and gated_delta.
#include <cmath>

#include "op_case_families.h"

namespace offload {
namespace {

using Tensors = std::span<const Tensor>;

struct ConvShape {
  int64_t rows, channels, taps, dilation, pad;
};

void append_convs(std::vector<OpCase>& cases, DType a, DType w, Rounding rounding) {
  std::vector<ConvShape> shapes = {
      {3, 1280, 4, 1, 0}, {5, 77, 4, 1, 3}, {20, 64, 4, 3, 8}, {4, 40, 2, 1, 0}, {6, 40, 1, 1, 0}};
  shapes.push_back({40, 300, 4, 20, 8});  // many rows, and a history that is longer still
  for (const int64_t rows : kCaseRows) {
    shapes.push_back({rows, 40, 4, 1, 0});  // rows 0, 1, 2 are shorter than the history of 3
    shapes.push_back({rows, 24, 4, 3, 0});  // and up to 8 than that of 9
  }
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  for (const ConvShape& s : shapes)
    cases.push_back(
        {"causal_conv_silu",
         fmt::format("causal_conv_silu/x={},w={},{}/rows={},channels={},taps={},dilation={},pad={}", label(a), label(w),
                     label(rounding), s.rows, s.channels, s.taps, s.dilation, s.pad),
         {padded(input("x", a, {s.rows, s.channels}), s.pad), input("w", w, {s.channels, s.taps}, normal(0.5)),
          inout("history", a, {s.dilation * (s.taps - 1), s.channels}),
          padded(output("out", a, {s.rows, s.channels}), s.pad)},
         [=](Ops& ops, Tensors t) {
           ops(CausalConvSiluArgs{
               .x = t[0], .w = t[1], .history = t[2], .out = t[3], .dilation = s.dilation, .rounding = rounding});
         },
         rounded ? tolerances::pointwise_rounded : tolerances::pointwise});
}

// Logits of beta ~ N(0, 1) whose sigmoid is no near-tie between two BF16 values: a flip of beta would move the FP32
// state by far more than its tolerance.
void fill_beta_logits(CaseRandom& random, std::span<double> values) {
  for (double& value : values) {
    double distance = 0;
    while (distance < 1e-3) {
      value = static_cast<double>(to_float(to_bf16(static_cast<float>(random.normal()))));
      const double units = std::ldexp(1.0 / (1.0 + std::exp(-value)), 16);
      const double steps = units / std::ldexp(1.0, std::ilogb(units) - 7);  // in BF16 steps
      distance = std::abs(steps - std::floor(steps) - 0.5);
    }
  }
}

struct DeltaShape {
  std::string_view kind;
  int64_t rows, key_heads, heads, key_dim, value_dim;
  int64_t pad = 0;
  double a_log = 0;      // added to a_log ~ U(-2, 1.5)
  double key_scale = 1;  // of every fifth row's keys; above 1 of the next row's queries, too
  double state_scale = 0.5;
  double gate = 0;  // added to a ~ N(0, 1) of every seventh row
};

void append_delta(std::vector<OpCase>& cases, DType a, Rounding rounding, const DeltaShape& s, int64_t chunk_rows) {
  const int64_t keys = s.key_heads * s.key_dim, width = 2 * keys + s.heads * s.value_dim;
  const Fill qkv = [=](CaseRandom& random, std::span<double> values) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t row = i / width, at = i % width;
      const bool is_key = at >= keys && at < 2 * keys, is_query = at < keys;
      const bool scales = (is_key && row % 5 == 0) || (is_query && row % 5 == 1 && s.key_scale > 1);
      values[static_cast<size_t>(i)] = random.normal() * (scales ? s.key_scale : 1.0);
    }
  };
  const Fill gates = [=](CaseRandom& random, std::span<double> values) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = random.normal() + (static_cast<int64_t>(i) / s.heads % 7 == 3 ? s.gate : 0.0);
  };
  const auto uniform = [](double low, double high) -> Fill {
    return [=](CaseRandom& random, std::span<double> values) {
      for (double& value : values) value = low + (high - low) * random.uniform();
    };
  };
  cases.push_back(
      {"gated_delta",
       fmt::format("gated_delta/{},{}/{},rows={},heads={}:{},dims={}x{},chunk={},pad={}", label(a), label(rounding),
                   s.kind, s.rows, s.key_heads, s.heads, s.key_dim, s.value_dim, chunk_rows, s.pad),
       {padded(input("qkv", a, {s.rows, width}, qkv), s.pad), padded(input("a", a, {s.rows, s.heads}, gates), s.pad),
        padded(input("b", a, {s.rows, s.heads}, fill_beta_logits), s.pad),
        input("a_log", DType::f32, {s.heads}, uniform(s.a_log - 2, s.a_log + 1.5)),
        input("dt_bias", DType::f32, {s.heads}, uniform(-4, 1)),
        inout("state", DType::f32, {s.heads, s.key_dim, s.value_dim}, normal(s.state_scale)),
        padded(output("out", a, {s.rows, s.heads * s.value_dim}), s.pad)},
       [=](Ops& ops, Tensors t) {
         ops(GatedDeltaArgs{.qkv = t[0],
                            .a = t[1],
                            .b = t[2],
                            .a_log = t[3],
                            .dt_bias = t[4],
                            .state = t[5],
                            .out = t[6],
                            .key_heads = s.key_heads,
                            .chunk_rows = chunk_rows,
                            .rounding = rounding});
       },
       tolerances::recurrence});
}

void append_deltas(std::vector<OpCase>& cases, DType a, Rounding rounding) {
  std::vector<DeltaShape> shapes = {
      {"zero_state", 65, 2, 6, 16, 16, 0, 0, 1, 0},
      {"strong_decay", 130, 2, 6, 16, 16, 0, 6},    // g down to -1e3: exp(-G) would overflow
      {"weak_decay", 130, 2, 6, 16, 16, 0, -6},     // nothing is forgotten
      {"tiny_keys", 70, 2, 6, 16, 16, 0, 0, 1e-4},  // comparable with the 1e-6 inside the root
      {"zero_keys", 70, 2, 2, 16, 16, 0, 0, 0},
      {"huge_keys", 70, 2, 6, 16, 16, 0, 0, 5e37, 8},          // sums of squares overflow, and products with the state
      {"closed_gates", 70, 2, 6, 16, 16, 0, 0, 1, 0.5, 1e38},  // g down to -inf, and rows after it that remember
      {"shut_gates", 70, 2, 6, 16, 16, 0, 0, 1, 0.5, 2e4},     // g some -1e4: of no row before, and no infinity
      {"dims_differ", 66, 1, 3, 20, 12, 4},
      {"published_dims", 70, 1, 3, 128, 128},
  };
  for (const int64_t rows : {0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 130})
    shapes.push_back({"length", rows, 2, 6, 16, 16});
  for (const DeltaShape& shape : shapes)
    for (const int64_t chunk_rows : {0, 64}) append_delta(cases, a, rounding, shape, chunk_rows);
  append_delta(cases, a, rounding, {"short_chunks", 130, 2, 4, 16, 24}, 16);
  append_delta(cases, a, rounding, {"many_chunks", 300, 1, 6, 24, 72}, 4);
}

}  // namespace

void append_recurrent_cases(std::vector<OpCase>& cases) {
  for (const DType a : kActivations)
    for (const Rounding rounding : kRoundings) {
      for (const DType w : kActivations) append_convs(cases, a, w, rounding);
      append_deltas(cases, a, rounding);
    }
}

}  // namespace offload
