// Cases of linear.
#include <cmath>

#include "op_case_families.h"

namespace offload {

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
}

}  // namespace offload
