// Cases of the mixture of experts: router_topk, swiglu_experts, swiglu_routed, moe_combine.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "op_case_families.h"

namespace offload {
namespace {

using Tensors = std::span<const Tensor>;

void append_router(std::vector<OpCase>& cases, DType logits, int64_t rows, int64_t experts, int64_t k, int64_t pad,
                   std::string_view kind, const Fill& fill) {
  for (const bool normalise : {true, false})
    for (const DType round_to : kActivations)
      cases.push_back(
          {"router_topk",
           fmt::format("router_topk/{},{}/rows={},experts={},k={},normalise={},round_to={},pad={}", label(logits), kind,
                       rows, experts, k, normalise, label(round_to), pad),
           {padded(input("logits", logits, {rows, experts}, fill), pad),
            padded(output("ids", DType::i32, {rows, k}), pad), padded(output("weights", DType::f32, {rows, k}), pad)},
           [=](Ops& ops, Tensors t) {
             ops(RouterTopkArgs{
                 .logits = t[0], .ids = t[1], .weights = t[2], .normalise = normalise, .round_to = round_to});
           },
           round_to == DType::bf16 ? tolerances::bf16_in_f32 : tolerances::pointwise});
}

void append_routers(std::vector<OpCase>& cases) {
  // Values on a grid of 1/4: most rows have ties, at the cut-off too.
  const Fill tied = [](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = static_cast<double>(random.below(16)) / 4;
  };
  for (const DType logits : kActivations) {
    for (const int64_t rows : kCaseRows) append_router(cases, logits, rows, 512, 10, 0, "normal", normal());
    for (const int64_t experts : {8, 16, 24, 32, 60, 64, 128, 256, 512})
      for (const int64_t k : {1, 2, 4, 6, 8, 10, 16})
        if (k <= experts) append_router(cases, logits, 3, experts, k, 0, "normal", normal());
    for (const int64_t experts : {8, 128, 512}) {
      append_router(cases, logits, 9, experts, 8, 5, "tied", tied);
      append_router(cases, logits, 2, experts, 8, 0, "equal", constant(-3));
    }
    append_router(cases, logits, 9, 128, 8, 0, "normal_spread", normal(3));
    append_router(cases, logits, 3, 32, 32, 0, "k_is_all", normal());
    append_router(cases, logits, 3, 512, 512, 0, "k_is_all", normal());
    append_router(cases, logits, 2, 1, 1, 0, "one_expert", normal());
    append_router(cases, logits, 3, 64, 8, 0, "huge", normal(3e4));  // all but one probability underflow
  }
}

// An expert case: tokens of run e are drawn at random, slots are a permutation of more slots than rows.
struct ExpertShape {
  std::string_view kind;
  int64_t hidden, intermediate, tokens;
  std::vector<int64_t> counts;
  int64_t pad = 0;
};

void append_experts(std::vector<OpCase>& cases, DType a, DType w, DType out, Rounding rounding, const ExpertShape& s,
                    Math math = Math::native) {
  const std::string name = fmt::format("swiglu_experts/{}x={},w={},out={},{}/{},hidden={},intermediate={}",
                                       math == Math::native ? "" : fmt::format("{}/", math_name(math)), label(a),
                                       label(w), label(out), label(rounding), s.kind, s.hidden, s.intermediate);
  const auto experts = static_cast<int64_t>(s.counts.size());
  const int64_t total = std::accumulate(s.counts.begin(), s.counts.end(), int64_t{0});
  const int64_t slots = total + 3;  // three rows that no run names
  CaseRandom random(name);
  std::vector<int32_t> rows, permuted(static_cast<size_t>(slots));
  for (int64_t i = 0; i < total; ++i) rows.push_back(static_cast<int32_t>(random.below(s.tokens)));
  std::iota(permuted.begin(), permuted.end(), 0);
  for (int64_t i = slots - 1; i > 0; --i)
    std::swap(permuted[static_cast<size_t>(i)], permuted[static_cast<size_t>(random.below(i + 1))]);
  permuted.resize(static_cast<size_t>(total));

  const auto run = [=, counts = s.counts, inter = s.intermediate](Ops& ops, Tensors t) {
    std::vector<ExpertRun> runs;
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = counts[static_cast<size_t>(e)];
      runs.push_back({.gate_up = t[2].narrow(0, e, 1).data(),
                      .down = t[3].narrow(0, e, 1).data(),
                      .begin = begin,
                      .count = count});
      begin += count;
    }
    ops(SwigluExpertsArgs{.x = t[0],
                          .out = t[1],
                          .runs = runs,
                          .rows = rows,
                          .out_rows = permuted,
                          .intermediate = inter,
                          .weight_dtype = w,
                          .rounding = rounding,
                          .math = math});
  };
  const auto inverse_root = [](int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); };
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  cases.push_back(
      {"swiglu_experts",
       name,
       {padded(input("x", a, {s.tokens, s.hidden}), s.pad), padded(output("out", out, {slots, s.hidden}), s.pad),
        input("gate_up", w, {experts, 2 * s.intermediate, s.hidden}, normal(inverse_root(s.hidden))),
        input("down", w, {experts, s.hidden, s.intermediate}, normal(inverse_root(s.intermediate)))},
       run,
       math == Math::fp16_out ? tolerances::half_sum_of_sums
       : rounded              ? tolerances::sum_of_sums_rounded
                              : tolerances::sum_of_sums});
}

void append_all_experts(std::vector<OpCase>& cases) {
  const ExpertShape shapes[] = {
      {"no_runs", 64, 24, 3, {}},
      {"all_counts_zero", 64, 24, 3, {0, 0}},
      {"counts_0_1_8_9", 72, 24, 20, {0, 1, 0, 8, 9, 0}},
      {"counts_2_7", 77, 13, 9, {2, 7}, 3},
      {"one_run_with_all_tokens", 64, 40, 65, {0, 65, 0}},
      {"counts_64_130", 70, 24, 130, {64, 130}},
      {"published_decode", 2560, 640, 1, {1}},
      {"published_slice", 2560, 160, 8, {1, 2, 0, 1}},
      {"published_width", 256, 640, 9, {8, 9}, 64},
      {"tiny", 3, 2, 4, {1, 3}},
  };
  for (const DType a : kActivations)
    for (const DType w : kActivations)
      for (const DType out : kActivations)
        for (const Rounding rounding : kRoundings) {
          if (out == DType::bf16 && a == DType::f32) continue;               // out is A or F32
          if (a == DType::f32 && rounding == Rounding::reference) continue;  // the same computation
          for (const ExpertShape& shape : shapes) append_experts(cases, a, w, out, rounding, shape);
        }
  const ExpertShape few_and_many{"counts_0_1_8_9_64", 72, 24, 20, {0, 1, 8, 9, 64}};
  const ExpertShape odd{"counts_130", 77, 13, 40, {130}, 3};
  const ExpertShape tall{
      "counts_161_8_321", 72, 40, 40, {161, 8, 321}};  // two tiles and three, of a device's tall ones
  append_experts(cases, DType::bf16, DType::bf16, DType::bf16, Rounding::fused, tall);
  for (const Math math : kOtherMaths) {
    for (const DType out : kActivations)
      for (const Rounding rounding : kRoundings)
        for (const ExpertShape& shape : {few_and_many, odd, tall})
          append_experts(cases, DType::bf16, DType::bf16, out, rounding, shape, math);
    append_experts(cases, DType::f32, DType::bf16, DType::f32, Rounding::fused, odd, math);  // native
    append_experts(cases, DType::bf16, DType::f32, DType::bf16, Rounding::fused, odd, math);
  }
}

// `skew`: of the rows that choose expert 0 first; the others choose at random. `absent`: every third expert is in no
// row of the slab, whose rows are in another order than the experts and two more than needed.
struct RoutedShape {
  int64_t rows, k, experts, hidden, intermediate;
  double skew = 0;
  bool absent = false;
  int64_t pad = 0;
};

void append_routed(std::vector<OpCase>& cases, DType a, DType w, DType out, Rounding rounding, const RoutedShape& s,
                   Math math = Math::native) {
  const Fill ids = [=](CaseRandom& random, std::span<double> values) {
    for (size_t r = 0; r < static_cast<size_t>(s.rows); ++r) {
      const std::span row = values.subspan(r * static_cast<size_t>(s.k), static_cast<size_t>(s.k));
      for (size_t i = 0; i < row.size(); ++i) {
        do row[i] = i == 0 && random.uniform() < s.skew ? 0 : static_cast<double>(random.below(s.experts));
        while (std::find(row.begin(), row.begin() + static_cast<std::ptrdiff_t>(i), row[i]) !=
               row.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  };
  std::vector<double> slots;
  for (int64_t e = 0; e < s.experts; ++e)
    slots.push_back(s.absent && e % 3 == 1 ? -1.0 : static_cast<double>(s.experts + 1 - e));
  const int64_t elements = 3 * s.intermediate * s.hidden;
  const auto spread = normal(1.0 / std::sqrt(static_cast<double>(s.hidden)));
  const bool flips_show = a == DType::bf16 && out == DType::f32;
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  cases.push_back(
      {"swiglu_routed",
       fmt::format("swiglu_routed/{}x={},w={},out={},{}/rows={},k={},experts={},hidden={},intermediate={},"
                   "skew={},absent={},pad={}",
                   math == Math::native ? "" : fmt::format("{}/", math_name(math)), label(a), label(w), label(out),
                   label(rounding), s.rows, s.k, s.experts, s.hidden, s.intermediate, s.skew, s.absent, s.pad),
       {padded(input("x", a, {s.rows, s.hidden}), s.pad), input("ids", DType::i32, {s.rows, s.k}, ids),
        padded(input("slab", w, {s.experts + 2, elements}, spread), s.pad),
        input("slots", DType::i32, {s.experts}, literal(slots)),
        padded(output("out", out, {s.rows * s.k, s.hidden}), s.pad), output("present", DType::u8, {s.rows, s.k})},
       [=](Ops& ops, Tensors t) {
         ops(SwigluRoutedArgs{.x = t[0],
                              .ids = t[1],
                              .slab = t[2],
                              .slots = t[3],
                              .out = t[4],
                              .present = t[5],
                              .intermediate = s.intermediate,
                              .rounding = rounding,
                              .math = math});
       },
       math == Math::fp16_out ? tolerances::half_sum_of_sums
       : flips_show           ? tolerances::sum_of_sums_in_f32
       : rounded              ? tolerances::sum_of_sums_rounded
                              : tolerances::sum_of_sums});
}

void append_all_routed(std::vector<OpCase>& cases) {
  const RoutedShape shapes[] = {
      {0, 2, 4, 64, 24},
      {1, 10, 16, 256, 64},
      {1, 3, 9, 77, 13, 0, true, 3},
      {8, 4, 6, 64, 40, 0.5, true},
      {9, 2, 12, 72, 24},
      {64, 3, 5, 70, 24, 0, true},
      {130, 2, 7, 64, 40, 0.9, true, 8},
      {300, 4, 16, 128, 64},
      {40, 1, 1100, 16, 8, 0, true},
  };
  for (const DType a : kActivations)
    for (const DType w : kActivations)
      for (const DType out : kActivations)
        for (const Rounding rounding : kRoundings) {
          if (a == DType::f32 && (out == DType::bf16 || rounding == Rounding::reference)) continue;
          for (const RoutedShape& shape : shapes) append_routed(cases, a, w, out, rounding, shape);
        }
  // Runs of short and long tiles, of several tiles, and of none.
  const RoutedShape tall{400, 2, 5, 72, 40, 0.9, true}, low{40, 3, 9, 72, 24};
  for (const Math math : kOtherMaths)
    for (const DType out : kActivations) {
      // Intermediates that round the other way behind FP16 show in F32.
      if (math == Math::fp16_out && out == DType::f32) continue;
      for (const RoutedShape& shape : {tall, low})
        append_routed(cases, DType::bf16, DType::bf16, out, Rounding::fused, shape, math);
    }
}

// Slots present in a case: row 2 has none, the others lack about a quarter.
bool is_present(int64_t row, int64_t slot) {
  return row != 2 && (row * 7 + slot * 3) % 4 != 0;
}

enum class Shared : uint8_t { none, plain, gated };

struct CombineShape {
  int64_t rows, k, n, pad;
  bool masked;
  Shared shared;
};

// `local`: the dtype of shared and gate, which is that of out, or BF16 beside an F32 partial sum.
void append_combine(std::vector<OpCase>& cases, DType parts, DType out, DType local, Rounding rounding,
                    const CombineShape& s) {
  const Fill poison_absent = [=](CaseRandom& random, std::span<double> values) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t slot = i / s.n;
      values[static_cast<size_t>(i)] = is_present(slot / s.k, slot % s.k) ? random.normal() : NAN;
    }
  };
  const Fill mask = [=](CaseRandom&, std::span<double> values) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
      values[static_cast<size_t>(i)] = is_present(i / s.k, i % s.k) ? 1 : 0;
  };
  const Fill weights = [=](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = 2 * random.uniform() / static_cast<double>(s.k);
  };
  std::vector<CaseTensor> tensors = {
      padded(input("parts", parts, {s.rows * s.k, s.n}, s.masked ? poison_absent : normal()), s.pad),
      padded(input("weights", DType::f32, {s.rows, s.k}, weights), s.pad),
      padded(output("out", out, {s.rows, s.n}), s.pad)};
  if (s.masked) tensors.push_back(padded(input("present", DType::u8, {s.rows, s.k}, mask), s.pad));
  if (s.shared != Shared::none) tensors.push_back(padded(input("shared", local, {s.rows, s.n}), s.pad));
  if (s.shared == Shared::gated) tensors.push_back(padded(input("gate", local, {s.rows, 1}, normal(2)), s.pad));
  const bool rounded = out == DType::bf16 && rounding == Rounding::reference;
  cases.push_back({"moe_combine",
                   fmt::format("moe_combine/parts={},out={},{}/rows={},k={},n={},pad={},masked={},shared={}{}",
                               label(parts), label(out), label(rounding), s.rows, s.k, s.n, s.pad, s.masked,
                               static_cast<int>(s.shared), local == out ? "" : ":bf16"),
                   tensors,
                   [=](Ops& ops, Tensors t) {
                     MoeCombineArgs args{.parts = t[0],
                                         .weights = t[1],
                                         .present = {},
                                         .shared = {},
                                         .gate = {},
                                         .out = t[2],
                                         .rounding = rounding};
                     size_t next = 3;
                     if (s.masked) args.present = t[next++];
                     if (s.shared != Shared::none) args.shared = t[next++];
                     if (s.shared == Shared::gated) args.gate = t[next++];
                     ops(args);
                   },
                   rounded ? tolerances::pointwise_rounded : tolerances::pointwise});
}

void append_combines(std::vector<OpCase>& cases) {
  std::vector<CombineShape> shapes = {{2, 10, 2560, 0, false, Shared::gated}, {3, 1, 64, 0, true, Shared::none}};
  for (const bool masked : {false, true})
    for (const Shared shared : {Shared::none, Shared::plain, Shared::gated}) {
      shapes.push_back({9, 4, 77, 3, masked, shared});
      shapes.push_back({7, 10, 64, 0, masked, shared});
    }
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 8, 33, 0, true, Shared::gated});
  for (const DType parts : kActivations)
    for (const DType out : kActivations)
      for (const Rounding rounding : kRoundings)
        for (const CombineShape& shape : shapes) {
          append_combine(cases, parts, out, out, rounding, shape);
          if (out == DType::f32 && shape.shared != Shared::none)
            append_combine(cases, parts, out, DType::bf16, rounding, shape);
        }
}

}  // namespace

void append_moe_cases(std::vector<OpCase>& cases) {
  append_routers(cases);
  append_all_experts(cases);
  append_all_routed(cases);
  append_combines(cases);
}

}  // namespace offload
