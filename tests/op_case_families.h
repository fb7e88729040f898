// What the files of the case list share: builders of tensors and the frozen tolerances. Private to op_cases*.cpp.
#ifndef OFFLOAD_TESTS_OP_CASE_FAMILIES_H_
#define OFFLOAD_TESTS_OP_CASE_FAMILIES_H_

#include <fmt/format.h>

#include "core/arm.h"
#include "op_cases.h"

namespace offload {

namespace tolerances {

// Figures: u = 2^-24 is half an FP32 step, relative; a BF16 step is 2^-8 to 2^-7 relative.
//
// No arithmetic, or arithmetic that every implementation must round alike.
inline constexpr Tolerance exact{"exact"};
// A chain of up to 10 FP32 operations (10 u = 6e-7), exp and rsqrt to 2e-7, exp's argument to |t| u with |t| <= 30
// (2e-6); the sums inside norms cancel nothing. One BF16 rounding may fall to the other side.
inline constexpr Tolerance pointwise{"pointwise", 4e-6, 1e-6, 1, 0};
// The same with inner BF16 roundings: each of two may flip and costs up to two steps of the result behind a product;
// behind a sum that cancels, or silu's tail, half a step at the tensor's scale.
inline constexpr Tolerance pointwise_rounded{"pointwise_rounded", 4e-6, 1e-6, 3, 0.5};
// Sum of k <= 4096 products of N(0,1) and N(0,1/k): sequential FP32 errs by sqrt(k) u / 2.8 = 1.4e-6 of the result's
// spread (a random walk of roundings), 7 spreads are allowed.
inline constexpr Tolerance sum{"sum", 2e-6, 1e-5, 1, 0};
// Two such sums with a nonlinearity between them, whose BF16 store may flip in a few of k elements.
inline constexpr Tolerance sum_of_sums{"sum_of_sums", 4e-6, 2e-5, 1, 0.25};
// The same with the gate and up sums rounded as well.
inline constexpr Tolerance sum_of_sums_rounded{"sum_of_sums_rounded", 4e-6, 2e-5, 2, 0.5};
// BF16 flips between two sums, where the second one is stored as F32: as much as sum_of_sums allows of its BF16 store.
inline constexpr Tolerance sum_of_sums_in_f32{"sum_of_sums_in_f32", 4e-6, 2e-3, 0, 0};
// A sum that is rounded to FP16 and may fall to the other side: one FP16 step, 2^-10 relative.
inline constexpr Tolerance half_sum{"half_sum", 0x1p-10, 1e-5, 1, 0};
// Two such sums: a gate or up that falls to the other side may flip the BF16 store of one of 13 or more elements
// between, each a quarter or less of the output's scale: 2^-8 / 4 = 1e-3 of it.
inline constexpr Tolerance half_sum_of_sums{"half_sum_of_sums", 0x1p-10, 1e-3, 1, 0.5};
// The gated delta rule over <= 130 rows: the chunked form in FP32 is within 4.5e-6 of the recurrence for values of
// order 1 (section 9.5 of the model's specification), times the spread of a state after repeated near-equal keys.
inline constexpr Tolerance recurrence{"recurrence", 4e-6, 3e-5, 1, 0.25};
// Scores of magnitude <= 30 err by 30 u * sqrt(n) / 2.8 = 1e-5, the exponential of them by as much, relative.
inline constexpr Tolerance attention{"attention", 4e-6, 2e-5, 1, 0.25};
// A score that flips by one BF16 step (0.25 of 32, times the scale) moves a probability by up to 2 %.
inline constexpr Tolerance attention_rounded{"attention_rounded", 4e-6, 2e-5, 2, 1};
// A BF16 rounding stored as FP32: one BF16 step.
inline constexpr Tolerance bf16_in_f32{"bf16_in_f32", 0x1p-7, 1e-6, 0, 0};
// sqrt(max(|s|, 1e-6)) at its floor multiplies the error of s (1e-7) by 500, sigmoid divides it by 4.
inline constexpr Tolerance signed_root{"signed_root", 4e-6, 2e-5, 3, 0.5};

}  // namespace tolerances

inline constexpr int64_t kCaseRows[] = {0, 1, 2, 7, 8, 9, 64, 65, 130};
inline constexpr DType kActivations[] = {DType::f32, DType::bf16};
inline constexpr Rounding kRoundings[] = {Rounding::fused, Rounding::reference};

inline constexpr Math kOtherMaths[] = {Math::scaled_fp16, Math::fp16, Math::fp16_out, Math::reordered};

inline std::string_view label(Rounding rounding) {
  return rounding == Rounding::fused ? "fused" : "reference";
}
inline std::string_view label(DType dtype) {
  return dtype == DType::bf16 ? "bf16" : "f32";
}

inline CaseTensor input(std::string name, DType dtype, std::vector<int64_t> shape, Fill fill = normal()) {
  return {std::move(name), dtype, std::move(shape), Role::input, std::move(fill)};
}
inline CaseTensor inout(std::string name, DType dtype, std::vector<int64_t> shape, Fill fill = normal()) {
  return {std::move(name), dtype, std::move(shape), Role::inout, std::move(fill)};
}
inline CaseTensor output(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {std::move(name), dtype, std::move(shape), Role::output, {}};
}
// The same tensor as a view of rows that are `extra` elements longer.
inline CaseTensor padded(CaseTensor tensor, int64_t extra) {
  if (extra == 0) return tensor;
  tensor.storage = tensor.shape;
  tensor.storage.back() += extra;
  return tensor;
}

void append_pointwise_cases(std::vector<OpCase>& cases);
void append_stream_cases(std::vector<OpCase>& cases);
void append_matrix_cases(std::vector<OpCase>& cases);
void append_moe_cases(std::vector<OpCase>& cases);
void append_recurrent_cases(std::vector<OpCase>& cases);
void append_attention_cases(std::vector<OpCase>& cases);

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_CASE_FAMILIES_H_
