// Cases of linear.
#include <cmath>

#include "op_case_families.h"

namespace offload {
namespace {

// Numbers of all magnitudes from 2^-span on: FP16 holds some, and makes infinities, subnormals and zeros of others.
Fill spread(int64_t span) {
  return [span](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = std::ldexp(random.normal(), static_cast<int>(random.below(2 * span) - span));
  };
}

// Rows of w whose numbers grow by 2^step with every 32 elements, or shrink: a scale that is found on the way moves.
// Every output is of numbers of one magnitude, 2^scale of the first ones' for the row's largest.
Fill growing(int64_t k, int step, int scale) {
  return [=](CaseRandom& random, std::span<double> values) {
    const int blocks = static_cast<int>((k + 31) / 32);
    for (size_t i = 0; i < values.size(); ++i) {
      const int block = static_cast<int>(static_cast<int64_t>(i) % k / 32);
      const int behind = step > 0 ? blocks - 1 - block : block;  // the largest
      values[i] = std::ldexp(random.normal(), scale - std::abs(step) * behind);
    }
  };
}

void append_math(std::vector<OpCase>& cases, Math math, DType x, DType w, DType out, int64_t m, int64_t n, int64_t k,
                 std::string_view kind, const Fill& x_fill, const Fill& w_fill) {
  cases.push_back({"linear",
                   fmt::format("linear/{}/x={},w={},out={},{}/m={},n={},k={}", math_name(math), label(x), label(w),
                               label(out), kind, m, n, k),
                   {input("x", x, {m, k}, x_fill), input("w", w, {n, k}, w_fill), output("out", out, {m, n})},
                   [math](Ops& ops, std::span<const Tensor> t) {
                     ops(LinearArgs{.x = t[0], .w = t[1], .out = t[2], .math = math});
                   },
                   math == Math::fp16_out ? tolerances::half_sum : tolerances::sum});
}

// Every math at row counts around the canonical limit and the tiles, for numbers that FP16 holds and for others.
void append_maths(std::vector<OpCase>& cases) {
  constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;
  for (const Math math : kOtherMaths) {
    for (const DType out : kActivations) {
      for (const int64_t m : {0, 1, 8, 9, 130}) {
        append_math(cases, math, kBf16, kBf16, out, m, 70, 130, "normal", normal(), normal(0.09));
        append_math(cases, math, kBf16, kBf16, out, m, 64, 64, "normal", normal(), normal(0.125));
      }
      append_math(cases, math, kBf16, kBf16, out, 65, 33, 577, "normal", normal(), normal(0.04));
      append_math(cases, math, kBf16, kBf16, out, 9, 256, 2560, "normal", normal(), normal(0.02));
      append_math(cases, math, kBf16, kBf16, out, 130, 40, 128, "spread_12", spread(12), spread(12));
      append_math(cases, math, kBf16, kBf16, out, 20, 17, 77, "spread_30", spread(30), spread(30));
      append_math(cases, math, kBf16, kBf16, out, 16, 16, 64, "zeros", constant(0), normal());
      append_math(cases, math, kBf16, kBf16, out, 16, 16, 64, "beyond_fp16", normal(1e6), normal(1e-6));
      for (const int64_t n : {67, 70})
        append_math(cases, math, kBf16, kBf16, out, 20, n, 72, "tail", normal(), normal());
      append_math(cases, math, kBf16, kBf16, out, 20, 12, 136, "grows", normal(), growing(136, 9, 3));
      append_math(cases, math, kBf16, kBf16, out, 20, 12, 136, "shrinks", normal(), growing(136, -9, 3));
      if (math == Math::scaled_fp16 || math == Math::reordered) {
        append_math(cases, math, kBf16, kBf16, out, 20, 12, 104, "grows_far", normal(), growing(104, 70, 100));
        append_math(cases, math, kBf16, kBf16, out, 20, 12, 104, "tiny", normal(), growing(104, 1, -128));
        append_math(cases, math, kBf16, kBf16, out, 20, 12, 104, "zero_weights", normal(), constant(0));
      }
    }
    append_math(cases, math, kF32, kBf16, kF32, 65, 40, 128, "asked_in_vain", spread(30), normal());
    append_math(cases, math, kBf16, kF32, kBf16, 65, 40, 128, "asked_in_vain", spread(30), normal());
  }
}

}  // namespace

void append_matrix_cases(std::vector<OpCase>& cases) {
  struct Shape {
    int64_t m, n, k, pad;
  };
  std::vector<Shape> shapes;
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 70, 130, 0});
  for (const int64_t rows : {1, 2, 8, 9, 65}) shapes.push_back({rows, 33, 77, 3});     // nothing is a multiple of 8
  for (const int64_t rows : {1, 7, 9, 64, 130}) shapes.push_back({rows, 64, 64, 64});  // everything is
  for (const int64_t rows : {1, 8, 9}) {
    shapes.push_back({rows, 4, 1024, 0});    // injection logits: C rows
    shapes.push_back({rows, 1, 320, 0});     // a shared expert's gate
    shapes.push_back({rows, 256, 2560, 0});  // a slice of a projection of the published size
    shapes.push_back({rows, 3, 1, 0});
    shapes.push_back({rows, 5, 7, 1});
    shapes.push_back({rows, 48, 65, 0});
  }
  for (const DType a : kActivations)
    for (const DType w : kActivations)
      for (const DType out : kActivations) {
        if (out == DType::bf16 && a == DType::f32) continue;  // out is A or F32
        for (const Shape& s : shapes)
          cases.push_back(
              {"linear",
               fmt::format("linear/x={},w={},out={}/m={},n={},k={},pad={}", label(a), label(w), label(out), s.m, s.n,
                           s.k, s.pad),
               {padded(input("x", a, {s.m, s.k}), s.pad),
                input("w", w, {s.n, s.k}, normal(1.0 / std::sqrt(static_cast<double>(s.k)))),
                padded(output("out", out, {s.m, s.n}), s.pad)},
               [](Ops& ops, std::span<const Tensor> t) { ops(LinearArgs{.x = t[0], .w = t[1], .out = t[2]}); },
               tolerances::sum});
      }
  append_maths(cases);
}

}  // namespace offload
