// Cases of the hyper-connections and the n-gram gate: stream_mix, stream_write, hyper_read, signed_root_gate.
#include <cmath>

#include "op_case_families.h"

namespace offload {
namespace {

using Tensors = std::span<const Tensor>;

struct StreamShape {
  int64_t rows, streams, n, pad;
};

void append_mix_and_write(std::vector<OpCase>& cases, DType a, Rounding rounding, const StreamShape& s) {
  const std::string suffix =
      fmt::format("{},{}/rows={},streams={},n={},pad={}", label(a), label(rounding), s.rows, s.streams, s.n, s.pad);
  const int64_t width = s.streams * s.n;
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  const Tolerance tolerance = rounded ? tolerances::pointwise_rounded : tolerances::pointwise;
  cases.push_back({"stream_mix",
                   "stream_mix/" + suffix,
                   {padded(input("x", a, {s.rows, width}), s.pad), padded(input("u", a, {s.rows, width}), s.pad),
                    padded(output("out", a, {s.rows, s.n}), s.pad)},
                   [=](Ops& ops, Tensors t) {
                     ops(StreamMixArgs{.x = t[0], .u = t[1], .out = t[2], .streams = s.streams, .rounding = rounding});
                   },
                   tolerance});
  for (const DType logits : kActivations) {
    if (logits == DType::bf16 && a == DType::f32) continue;  // logits are A or F32
    cases.push_back(
        {"stream_write",
         fmt::format("stream_write/logits={},{}", label(logits), suffix),
         {padded(inout("stack", a, {s.rows, width}, normal(4)), s.pad), padded(input("y", a, {s.rows, s.n}), s.pad),
          padded(input("logits", logits, {s.rows, s.streams}, normal(3)), s.pad)},
         [=](Ops& ops, Tensors t) {
           ops(StreamWriteArgs{.stack = t[0], .y = t[1], .logits = t[2], .streams = s.streams, .rounding = rounding});
         },
         tolerance});
  }
}

struct HyperShape {
  int64_t rows, streams, n, lowrank, pad;
  bool injects;
};

void append_hyper_read(std::vector<OpCase>& cases, DType a, DType w, DType logits, Rounding rounding,
                       const HyperShape& s) {
  const int64_t width = s.streams * s.n;
  const auto spread = [](int64_t k) { return normal(1.0 / std::sqrt(static_cast<double>(k))); };
  std::vector<CaseTensor> tensors = {
      padded(input("stack", a, {s.rows, width}, normal(4)), s.pad),
      input("norm", DType::f32, {s.streams, s.n}, normal(0.1)), input("down", w, {s.lowrank, width}, spread(width)),
      input("up", w, {width, s.lowrank}, spread(s.lowrank)), padded(output("out", a, {s.rows, s.n}), s.pad)};
  if (s.injects) {
    tensors.push_back(input("inject", w, {s.streams, width}, spread(width)));
    tensors.push_back(padded(output("logits", logits, {s.rows, s.streams}), s.pad));
  }
  const bool rounded = a == DType::bf16 && rounding == Rounding::reference;
  cases.push_back(
      {"hyper_read",
       fmt::format("hyper_read/x={},w={},logits={},{}/rows={},streams={},n={},lowrank={},pad={},injects={}", label(a),
                   label(w), label(logits), label(rounding), s.rows, s.streams, s.n, s.lowrank, s.pad, s.injects),
       tensors,
       [=](Ops& ops, Tensors t) {
         ops(HyperReadArgs{.stack = t[0],
                           .norm = t[1],
                           .down = t[2],
                           .up = t[3],
                           .inject = s.injects ? t[5] : Tensor{},
                           .out = t[4],
                           .logits = s.injects ? t[6] : Tensor{},
                           .streams = s.streams,
                           .rounding = rounding});
       },
       rounded ? tolerances::sum_of_sums_rounded : tolerances::sum_of_sums});
}

void append_hyper_reads(std::vector<OpCase>& cases) {
  const HyperShape shapes[] = {{1, 4, 2560, 320, 0, true}, {1, 4, 2560, 320, 0, false}, {1, 4, 80, 24, 8, true},
                               {1, 4, 1032, 40, 8, true},  {1, 4, 74, 26, 0, true},     {1, 4, 1, 1, 0, true},
                               {1, 2, 128, 16, 0, true},   {3, 4, 64, 40, 3, true},     {8, 3, 37, 9, 0, true},
                               {0, 4, 64, 8, 0, true}};
  for (const DType a : kActivations)
    for (const DType w : kActivations)
      for (const DType logits : kActivations)
        for (const Rounding rounding : kRoundings) {
          if (a == DType::f32 && (logits == DType::bf16 || rounding == Rounding::reference)) continue;
          for (const HyperShape& shape : shapes) append_hyper_read(cases, a, w, logits, rounding, shape);
        }
}

void append_signed_root(std::vector<OpCase>& cases, DType a, Rounding rounding, const StreamShape& s) {
  for (const double query_scale : {1.0, 0.0, 1e-8})  // 0: sign(0) = 0; 1e-8: below the floor
    cases.push_back(
        {"signed_root_gate",
         fmt::format("signed_root_gate/{},{}/rows={},streams={},n={},pad={},query={}", label(a), label(rounding),
                     s.rows, s.streams, s.n, s.pad, query_scale),
         {padded(input("key", a, {s.rows, s.streams, s.n}), s.pad),
          padded(input("query", a, {s.rows, s.streams, s.n}, normal(query_scale)), s.pad),
          padded(input("value", a, {s.rows, s.n}), s.pad), padded(output("out", a, {s.rows, s.streams, s.n}), s.pad)},
         [=](Ops& ops, Tensors t) {
           ops(SignedRootGateArgs{.key = t[0], .query = t[1], .value = t[2], .out = t[3], .rounding = rounding});
         },
         tolerances::signed_root});
}

}  // namespace

void append_stream_cases(std::vector<OpCase>& cases) {
  std::vector<StreamShape> shapes = {{2, 4, 2560, 0}, {3, 2, 77, 3}, {3, 3, 64, 8}, {2, 1, 9, 0}};
  for (const int64_t rows : kCaseRows) shapes.push_back({rows, 4, 37, rows == 8 ? 4 : 0});
  for (const DType a : kActivations)
    for (const Rounding rounding : kRoundings)
      for (const StreamShape& shape : shapes) {
        append_mix_and_write(cases, a, rounding, shape);
        append_signed_root(cases, a, rounding, shape);
      }
  append_hyper_reads(cases);
}

}  // namespace offload
