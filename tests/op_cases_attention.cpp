// Cases of rope_table, norm_rope, mean_pool, block_scores, block_topk, attention.
#include <algorithm>
#include <cmath>

#include "op_case_families.h"

namespace offload {
namespace {

using Tensors = std::span<const Tensor>;

// 1 / theta^(2 i / (2 half)) with theta = 1e7.
double inverse_frequency(int64_t i, int64_t half) {
  return std::pow(1e7, -static_cast<double>(i) / static_cast<double>(half));
}

void append_rope_tables(std::vector<OpCase>& cases) {
  const Fill frequencies = [](CaseRandom&, std::span<double> values) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = inverse_frequency(static_cast<int64_t>(i), static_cast<int64_t>(values.size()));
  };
  struct Shape {
    int64_t rows, half, first, step;
    float scale;
  };
  std::vector<Shape> shapes = {{1, 32, 262143, 1, 1.0f},
                               {9, 32, 262135, 1, 1.0f},
                               {65, 32, 261884, 4, 1.0f},
                               {8, 32, 999992, 1, 1.1386294f},
                               {5, 3, 12, 4, 1.0f}};
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 32, 0, 1, 1.0f});
  for (const DType round_to : kActivations)
    for (const Shape& s : shapes)
      cases.push_back(
          {"rope_table",
           fmt::format("rope_table/{}/rows={},half={},first={},step={},scale={}", label(round_to), s.rows, s.half,
                       s.first, s.step, s.scale),
           {input("inv_freq", DType::f32, {s.half}, frequencies), output("out", DType::f32, {s.rows, s.half, 2})},
           [=](Ops& ops, Tensors t) {
             ops(RopeTableArgs{.inv_freq = t[0],
                               .out = t[1],
                               .first = s.first,
                               .step = s.step,
                               .scale = s.scale,
                               .round_to = round_to});
           },
           round_to == DType::bf16 ? tolerances::bf16_in_f32 : tolerances::pointwise});
}

// cos, sin of position first + r, rounded as the table of a BF16 model is.
Fill rotations(int64_t half, int64_t first) {
  return [=](CaseRandom&, std::span<double> values) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const double angle = static_cast<double>(first + i / 2 / half) * inverse_frequency(i / 2 % half, half);
      const double value = i % 2 == 0 ? std::cos(angle) : std::sin(angle);
      values[static_cast<size_t>(i)] = static_cast<double>(to_float(to_bf16(static_cast<float>(value))));
    }
  };
}

void append_norm_ropes(std::vector<OpCase>& cases, DType a, Rounding rounding) {
  struct Shape {
    int64_t rows, heads, n, half, first, pad;
  };
  std::vector<Shape> shapes = {{3, 6, 256, 32, 262141, 256},  // queries between gates, at the last position
                               {5, 4, 128, 32, 3, 0},
                               {3, 2, 16, 8, 5, 8},  // the whole head rotates
                               {4, 3, 21, 5, 7, 3}};
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 2, 32, 4, 100, 0});
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  for (const Shape& s : shapes)
    for (const bool norm : {false, true})
      for (const bool in_place : {false, true}) {
        std::vector<CaseTensor> tensors = {padded(input("x", a, {s.rows, s.heads, s.n}), s.pad),
                                           input("table", DType::f32, {s.rows, s.half, 2}, rotations(s.half, s.first))};
        if (norm) tensors.push_back(input("w", DType::f32, {s.n}, normal(0.3)));
        if (in_place)
          tensors[0].role = Role::inout;
        else
          tensors.push_back(output("out", a, {s.rows, s.heads, s.n}));
        cases.push_back(
            {"norm_rope",
             fmt::format("norm_rope/{},{}/rows={},heads={},n={},half={},first={},pad={},norm={},in_place={}", label(a),
                         label(rounding), s.rows, s.heads, s.n, s.half, s.first, s.pad, norm, in_place),
             tensors,
             [=](Ops& ops, Tensors t) {
               ops(NormRopeArgs{.x = t[0],
                                .w = norm ? t[2] : Tensor(),
                                .table = t[1],
                                .out = in_place ? t[0] : t.back(),
                                .eps = 1e-6f,
                                .rounding = rounding});
             },
             rounded ? tolerances::pointwise_rounded : tolerances::pointwise});
      }
}

void append_pools_and_scores(std::vector<OpCase>& cases, DType a) {
  for (const int64_t blocks : {0, 1, 2, 7, 33})
    for (const int64_t pool : {1, 3, 4})
      for (const int64_t pad : {0, 8})
        cases.push_back({"mean_pool",
                         fmt::format("mean_pool/{}/blocks={},pool={},n=40,pad={}", label(a), blocks, pool, pad),
                         {padded(input("x", a, {blocks * pool, 40}), pad), padded(output("out", a, {blocks, 40}), pad)},
                         [=](Ops& ops, Tensors t) { ops(MeanPoolArgs{.x = t[0], .out = t[1], .pool = pool}); },
                         tolerances::pointwise});
  struct Shape {
    int64_t rows, heads, n, first, ratio, spare;
  };
  std::vector<Shape> shapes = {{5, 4, 128, 2047, 4, 3}, {3, 1, 77, 0, 1, 0}, {6, 2, 16, 10, 3, 1}};
  for (const int64_t rows : kCaseRows) {
    shapes.push_back({rows, 4, 16, 0, 4, 2});
    shapes.push_back({rows, 4, 16, 37, 4, 0});
  }
  for (const Shape& s : shapes) {
    const int64_t complete = (s.first + s.rows) / s.ratio;
    const Fill keys = [=](CaseRandom& random, std::span<double> values) {  // incomplete blocks hold NaN
      for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
        values[static_cast<size_t>(i)] = i / s.n < complete ? random.normal() : NAN;
    };
    cases.push_back({"block_scores",
                     fmt::format("block_scores/{}/rows={},heads={},n={},first={},ratio={}", label(a), s.rows, s.heads,
                                 s.n, s.first, s.ratio),
                     {padded(input("q", a, {s.rows, s.heads, s.n}), s.spare * 8),
                      padded(input("keys", a, {complete + s.spare, s.n}, keys), s.spare),
                      padded(output("out", DType::f32, {s.rows, complete + s.spare}), s.spare)},
                     [=](Ops& ops, Tensors t) {
                       ops(BlockScoresArgs{.q = t[0],
                                           .keys = t[1],
                                           .out = t[2],
                                           .first = s.first,
                                           .ratio = s.ratio,
                                           .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.n)))});
                     },
                     tolerances::sum});
  }
}

void append_topks(std::vector<OpCase>& cases) {
  struct Shape {
    int64_t rows, budget, first, ratio, spare;
  };
  std::vector<Shape> shapes = {{9, 512, 2044, 4, 0},  // the rows around the published budget
                               {3, 512, 8190, 4, 5},
                               {1, 512, 262143, 4, 0},  // 65,536 blocks
                               {6, 1, 0, 1, 0},
                               {40, 7, 3, 3, 2}};
  for (const int64_t rows : kCaseRows) {
    shapes.push_back({rows, 4, 0, 4, 1});
    shapes.push_back({rows, 24, 300, 4, 0});
  }
  for (const Shape& s : shapes)
    for (const int levels : {0, 1, 3}) {  // 0: distinct scores; else so many values, ReLU's zero among them
      const int64_t blocks_max = (s.first + s.rows) / s.ratio + s.spare;
      const Fill scores = [=](CaseRandom& random, std::span<double> values) {
        for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
          const int64_t complete = (s.first + i / blocks_max + 1) / s.ratio;
          const bool read = complete > s.budget && i % blocks_max < complete;
          const double score = levels == 0 ? std::abs(random.normal()) : static_cast<double>(random.below(levels));
          values[static_cast<size_t>(i)] = read ? score : NAN;
        }
      };
      cases.push_back(
          {"block_topk",
           fmt::format("block_topk/rows={},budget={},first={},ratio={},levels={}", s.rows, s.budget, s.first, s.ratio,
                       levels),
           {padded(input("scores", DType::f32, {s.rows, blocks_max}, scores), s.spare),
            padded(output("blocks", DType::i32, {s.rows, s.budget}), s.spare), output("counts", DType::i32, {s.rows})},
           [=](Ops& ops, Tensors t) {
             ops(BlockTopkArgs{.scores = t[0], .blocks = t[1], .counts = t[2], .first = s.first, .ratio = s.ratio});
           },
           tolerances::exact});
    }
}

struct AttentionShape {
  int64_t rows, heads, kv_heads, n, first;
  int64_t budget = 0, ratio = 0;  // budget 0: dense
  int64_t spare = 0;              // positions behind the last visible one, NaN
  int64_t pad = 0;
};

// An ascending choice of min(budget, nb) of the complete blocks of each row; entries behind it are poison.
Fill chosen_blocks(const AttentionShape& s) {
  return [=](CaseRandom& random, std::span<double> values) {
    std::fill(values.begin(), values.end(), NAN);
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t complete = (s.first + r + 1) / s.ratio;
      int64_t wanted = std::min(s.budget, complete), at = r * s.budget;
      for (int64_t b = 0; b < complete && wanted > 0; ++b)
        if (random.below(complete - b) < wanted) {
          values[static_cast<size_t>(at++)] = static_cast<double>(b);
          --wanted;
        }
    }
  };
}

void append_attention(std::vector<OpCase>& cases, DType a, Rounding rounding, const AttentionShape& s) {
  const int64_t visible = s.first + s.rows;
  const Fill kv = [=](CaseRandom& random, std::span<double> values) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
      values[static_cast<size_t>(i)] = i / (s.kv_heads * s.n) < visible ? random.normal() : NAN;
  };
  const Fill counts = [=](CaseRandom&, std::span<double> values) {
    for (int64_t r = 0; r < s.rows; ++r)
      values[static_cast<size_t>(r)] = static_cast<double>(std::min(s.budget, (s.first + r + 1) / s.ratio));
  };
  std::vector<CaseTensor> tensors = {padded(input("q", a, {s.rows, s.heads, s.n}), s.pad),
                                     padded(input("k", a, {visible + s.spare, s.kv_heads, s.n}, kv), s.pad),
                                     padded(input("v", a, {visible + s.spare, s.kv_heads, s.n}, kv), s.pad),
                                     padded(output("out", a, {s.rows, s.heads, s.n}), s.pad)};
  if (s.budget > 0) {
    tensors.push_back(padded(input("blocks", DType::i32, {s.rows, s.budget}, chosen_blocks(s)), s.spare));
    tensors.push_back(input("counts", DType::i32, {s.rows}, counts));
  }
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  cases.push_back({"attention",
                   fmt::format("attention/{},{}/rows={},heads={}:{},n={},first={},budget={},ratio={},pad={}", label(a),
                               label(rounding), s.rows, s.heads, s.kv_heads, s.n, s.first, s.budget, s.ratio, s.pad),
                   tensors,
                   [=](Ops& ops, Tensors t) {
                     ops(AttentionArgs{.q = t[0],
                                       .k = t[1],
                                       .v = t[2],
                                       .out = t[3],
                                       .blocks = s.budget > 0 ? t[4] : Tensor(),
                                       .counts = s.budget > 0 ? t[5] : Tensor(),
                                       .first = s.first,
                                       .ratio = s.ratio,
                                       .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.n))),
                                       .rounding = rounding});
                   },
                   rounded ? tolerances::attention_rounded : tolerances::attention});
}

void append_attentions(std::vector<OpCase>& cases, DType a, Rounding rounding) {
  std::vector<AttentionShape> shapes = {
      {3, 24, 2, 256, 50},                // published head shape, 12 queries a key
      {3, 24, 2, 256, 50, 8, 4, 1, 256},  // queries between gates
      {5, 3, 3, 20, 11, 0, 0, 2, 4},      // no grouping
      {4, 4, 1, 21, 6, 2, 3, 1, 3},       // blocks of three
      {1, 4, 2, 32, 1023, 16, 4},         // decode
      {1, 4, 2, 32, 1023},
  };
  for (const int64_t rows : kCaseRows) {
    shapes.push_back({rows, 4, 2, 16, 0});
    shapes.push_back({rows, 4, 2, 16, 37, 0, 0, 3});
    shapes.push_back({rows, 4, 2, 16, 0, 4, 4});        // rows of the tail alone, then blocks, then a budget
    shapes.push_back({rows, 4, 2, 16, 37, 100, 4, 3});  // the budget is never reached
  }
  for (const AttentionShape& shape : shapes) append_attention(cases, a, rounding, shape);
}

}  // namespace

void append_attention_cases(std::vector<OpCase>& cases) {
  append_rope_tables(cases);
  append_topks(cases);
  for (const DType a : kActivations) {
    append_pools_and_scores(cases, a);
    for (const Rounding rounding : kRoundings) {
      append_norm_ropes(cases, a, rounding);
      append_attentions(cases, a, rounding);
    }
  }
}

}  // namespace offload
