// Cases of copy, gather_rows, rms_norm, scaled_silu, swiglu, add, mul_sigmoid, gated_norm, topk.
#include <cmath>
#include <set>

#include "op_case_families.h"

namespace offload {
namespace {

using Tensors = std::span<const Tensor>;

Tolerance chain(DType a, Rounding rounding) {
  return a == DType::bf16 && rounding == Rounding::reference ? tolerances::pointwise_rounded : tolerances::pointwise;
}

void append_copies(std::vector<OpCase>& cases) {
  for (const DType from : kActivations)
    for (const DType to : kActivations)
      for (const int64_t rows : kCaseRows)
        for (const int64_t pad : {0, 3})
          cases.push_back({"copy",
                           fmt::format("copy/{}_to_{}/rows={},n=77,pad={}", label(from), label(to), rows, pad),
                           {padded(input("x", from, {rows, 77}), pad), padded(output("out", to, {rows, 77}), 2 * pad)},
                           [](Ops& ops, Tensors t) { ops(CopyArgs{.x = t[0], .out = t[1]}); },
                           tolerances::exact});
  for (const DType from : kActivations)
    for (const DType to : kActivations)
      for (const int64_t rows : kCaseRows)
        for (const int64_t copies : {1, 4})
          cases.push_back(
              {"gather_rows",
               fmt::format("gather_rows/{}_to_{}/rows={},n=40,copies={}", label(from), label(to), rows, copies),
               {input("table", from, {50, 40}),
                input("ids", DType::i32, {rows},
                      [](CaseRandom& random, std::span<double> ids) {
                        for (double& id : ids) id = static_cast<double>(random.below(50));
                        if (ids.size() > 1) ids[0] = 49, ids[1] = 0;  // both ends of the table
                      }),
                padded(output("out", to, {rows, copies * 40}), copies == 1 ? 8 : 0)},
               [=](Ops& ops, Tensors t) {
                 ops(GatherRowsArgs{.table = t[0], .ids = t[1], .out = t[2], .copies = copies});
               },
               tolerances::exact});
}

void append_norms(std::vector<OpCase>& cases, DType a, Rounding rounding) {
  struct Shape {
    int64_t rows, groups, n, weight_rows, pad;
  };
  std::vector<Shape> shapes = {{3, 1, 2560, 1, 0}, {2, 4, 640, 4, 0}, {5, 4, 640, 1, 0},  {4, 6, 128, 1, 128},
                               {3, 2, 1, 2, 0},    {9, 3, 77, 3, 3},  {2, 2, 10241, 2, 8}};
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 4, 70, 4, 0});
  for (const NormWeight weight : {NormWeight::one_plus, NormWeight::plain})
    for (const Shape& s : shapes)
      cases.push_back(
          {"rms_norm",
           fmt::format("rms_norm/{},{},{}/rows={},groups={},n={},weight_rows={},pad={}", label(a), label(rounding),
                       weight == NormWeight::plain ? "plain" : "one_plus", s.rows, s.groups, s.n, s.weight_rows, s.pad),
           {padded(input("x", a, {s.rows, s.groups, s.n}), s.pad),
            input("w", DType::f32, {s.weight_rows, s.n}, normal(0.3)),
            padded(output("out", a, {s.rows, s.groups, s.n}), s.pad)},
           [=](Ops& ops, Tensors t) {
             ops(RmsNormArgs{.x = t[0], .w = t[1], .out = t[2], .eps = 1e-6f, .weight = weight, .rounding = rounding});
           },
           weight == NormWeight::plain ? chain(a, rounding) : tolerances::pointwise});
  // A row of zeros must give zeros, not NaN; tiny rows are dominated by eps.
  for (const double scale : {0.0, 1e-5})
    cases.push_back({"rms_norm",
                     fmt::format("rms_norm/{},{}/scale={}", label(a), label(rounding), scale),
                     {inout("x", a, {2, 2, 70}, normal(scale)), input("w", DType::f32, {1, 70}, normal(0.3))},
                     [=](Ops& ops, Tensors t) {
                       ops(RmsNormArgs{.x = t[0], .w = t[1], .out = t[0], .eps = 1e-6f, .rounding = rounding});
                     },
                     tolerances::pointwise});
}

void append_gated_norms(std::vector<OpCase>& cases, DType a, Rounding rounding) {
  struct Shape {
    int64_t rows, heads, n, pad;
  };
  std::vector<Shape> shapes = {{3, 6, 128, 0}, {3, 6, 128, 8}, {2, 2, 77, 3}};
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 3, 16, 0});
  for (const Gate gate : {Gate::sigmoid, Gate::silu})
    for (const Shape& s : shapes)
      cases.push_back(
          {"gated_norm",
           fmt::format("gated_norm/{},{},{}/rows={},heads={},n={},pad={}", label(a), label(rounding),
                       gate == Gate::sigmoid ? "sigmoid" : "silu", s.rows, s.heads, s.n, s.pad),
           {padded(input("x", a, {s.rows, s.heads, s.n}), s.pad),
            padded(input("z", a, {s.rows, s.heads, s.n}, normal(2)), s.pad),
            input("w", DType::f32, {s.n}, normal(0.3, 1.0)), output("out", a, {s.rows, s.heads, s.n})},
           [=](Ops& ops, Tensors t) {
             ops(GatedNormArgs{
                 .x = t[0], .z = t[1], .w = t[2], .out = t[3], .eps = 1e-6f, .gate = gate, .rounding = rounding});
           },
           chain(a, rounding)});
}

void append_gates(std::vector<OpCase>& cases, DType a, Rounding rounding, int64_t rows, int64_t pad) {
  const std::string suffix = fmt::format("{},{}/rows={},n=77,pad={}", label(a), label(rounding), rows, pad);
  for (const float scale : {1.0f, 0.25f, 1.0f / 3.0f})
    cases.push_back({"scaled_silu",
                     fmt::format("scaled_silu/{},scale={}", suffix, scale),
                     {padded(input("x", a, {rows, 77}, normal(4)), pad), padded(output("out", a, {rows, 77}), pad)},
                     [=](Ops& ops, Tensors t) {
                       ops(ScaledSiluArgs{.x = t[0], .out = t[1], .scale = scale, .rounding = rounding});
                     },
                     chain(a, rounding)});
  for (const DType x : kActivations) {
    if (x == DType::bf16 && a == DType::f32) continue;  // x is A or F32
    cases.push_back({"swiglu",
                     fmt::format("swiglu/x={},{}", label(x), suffix),
                     {padded(input("x", x, {rows, 154}, normal(2)), pad), padded(output("out", a, {rows, 77}), pad)},
                     [=](Ops& ops, Tensors t) { ops(SwigluArgs{.x = t[0], .out = t[1], .rounding = rounding}); },
                     chain(a, rounding)});
  }
  for (const bool in_place : {false, true}) {
    std::vector<CaseTensor> tensors = {padded(input("x", a, {rows, 7, 11}), pad),
                                       padded(input("gate", a, {rows, 7, 11}, normal(3)), 11 + pad)};
    if (in_place)
      tensors[0].role = Role::inout;
    else
      tensors.push_back(padded(output("out", a, {rows, 7, 11}), pad));
    cases.push_back({"mul_sigmoid", fmt::format("mul_sigmoid/{},in_place={}", suffix, in_place), tensors,
                     [=](Ops& ops, Tensors t) {
                       ops(MulSigmoidArgs{.x = t[0], .gate = t[1], .out = t[in_place ? 0 : 2], .rounding = rounding});
                     },
                     chain(a, rounding)});
  }
}

void append_adds(std::vector<OpCase>& cases, DType a, int64_t rows, int64_t pad) {
  for (const int alias : {0, 1, 2}) {  // out is a tensor of its own, x, y
    std::vector<CaseTensor> tensors = {padded(input("x", a, {rows, 77}), pad), padded(input("y", a, {rows, 77}), pad)};
    if (alias == 0)
      tensors.push_back(padded(output("out", a, {rows, 77}), pad));
    else
      tensors[static_cast<size_t>(alias - 1)].role = Role::inout;
    cases.push_back({"add",
                     fmt::format("add/{}/rows={},n=77,pad={},out={}", label(a), rows, pad,
                                 alias == 0   ? "own"
                                 : alias == 1 ? "x"
                                              : "y"),
                     tensors,
                     [=](Ops& ops, Tensors t) {
                       ops(AddArgs{.x = t[0], .y = t[1], .out = t[alias == 0 ? 2 : static_cast<size_t>(alias - 1)]});
                     },
                     tolerances::exact});
  }
}

// On a grid of 1/4, so that the largest comes several times; some rows hold what no choice can be made of.
Fill choices(int64_t n) {
  return [n](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = static_cast<double>(random.below(40) - 60) / 4;
    const auto count = static_cast<size_t>(n);
    const auto row = [&](size_t r) {
      return values.size() >= (r + 1) * count ? values.subspan(r * count, count) : std::span<double>();
    };
    if (!row(3).empty()) row(3).back() = INFINITY;
    if (!row(4).empty()) std::fill(row(4).begin(), row(4).end(), -INFINITY);
    if (!row(5).empty()) row(5)[count / 2] = -INFINITY;
    if (!row(6).empty()) row(6)[count / 3] = NAN;
  };
}

void append_topk(std::vector<OpCase>& cases) {
  const auto add = [&](std::string_view values, int64_t rows, int64_t n, int64_t k, int64_t pad, const Fill& fill) {
    cases.push_back(
        {"topk",
         fmt::format("topk/{}/rows={},n={},k={},pad={}", values, rows, n, k, pad),
         {padded(input("x", DType::f32, {rows, n}, fill), pad), padded(output("values", DType::f32, {rows, k}), pad),
          padded(output("ids", DType::i32, {rows, k}), 2 * pad)},
         [](Ops& ops, Tensors t) { ops(TopkArgs{.x = t[0], .values = t[1], .ids = t[2]}); },
         tolerances::exact});
  };
  for (const int64_t rows : {0, 1, 7})
    for (const int64_t n : {1, 3, 64, 1000, 5003})
      for (const int64_t pad : {0, 1, 4})
        for (const int64_t k : std::set<int64_t>{1, std::min<int64_t>(n, 20), std::min(n, kTopkMax)})
          add("ties", rows, n, k, pad, choices(n));
  const Fill few = [](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = random.below(400) == 0 ? random.normal() : -INFINITY;
  };
  const Fill zeros = [](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = random.below(2) == 0 ? 0.0 : -0.0;
  };
  const Fill rising = [](CaseRandom&, std::span<double> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i) - 2000;
  };
  add("ties", 65537, 3, 2, 0, choices(3));  // more rows than a grid has blocks but along x
  // Lengths around what one block of threads takes, and so many that what is left of them is more than that.
  for (const int64_t n : {256, 4095, 4096, 4097, 70001}) {
    for (const int64_t k : {int64_t{1}, int64_t{33}, kTopkMax}) {
      add("normal", 1, n, k, 0, normal(3));
      add("equal", 1, n, k, 0, constant(-2.5));
      add("few", 1, n, k, 0, few);
      add("zeros", 1, n, k, 0, zeros);
      add("rising", 1, n, k, 0, rising);
    }
  }
}

}  // namespace

void append_pointwise_cases(std::vector<OpCase>& cases) {
  append_topk(cases);
  append_copies(cases);
  for (const DType a : kActivations) {
    for (const Rounding rounding : kRoundings) {
      append_norms(cases, a, rounding);
      append_gated_norms(cases, a, rounding);
      for (const int64_t rows : kCaseRows) append_gates(cases, a, rounding, rows, rows == 9 ? 3 : rows == 8 ? 8 : 0);
    }
    for (const int64_t rows : kCaseRows) append_adds(cases, a, rows, rows == 9 ? 3 : rows == 8 ? 8 : 0);
  }
}

}  // namespace offload
