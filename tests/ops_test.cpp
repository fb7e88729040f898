// The suite's machinery, the reference on every case, on values worked out by hand, and on the handed files.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "cpu/ref_ops.h"
#include "op_handed.h"
#include "op_suite.h"

namespace offload::ops_test {

namespace {

// The reference with one fault in copy.
class FaultyOps final : public Ops {
 public:
  enum class Fault { none, skips, off_by_one_step, writes_input, overruns, writes_padding };
  explicit FaultyOps(Fault fault) : fault_(fault) {}

 private:
#define OFL_DELEGATE(Args, name)            \
  void execute(const Args& args) override { \
    if (!skipped(args)) reference_(args);   \
    damage(args);                           \
  }
  OFL_FOR_EACH_OP(OFL_DELEGATE)
#undef OFL_DELEGATE

  template <typename Args>
  bool skipped(const Args&) const {
    return fault_ == Fault::skips;
  }
  template <typename Args>
  void damage(const Args&) {}
  void damage(const CopyArgs& a) {
    auto* out = a.out.as<float>();
    switch (fault_) {
      case Fault::none:
      case Fault::skips:
        return;
      case Fault::off_by_one_step:
        *out = std::nextafterf(*out, 1e9f);
        return;
      case Fault::writes_input:
        *a.x.as<float>() += 1;
        return;
      case Fault::overruns:
        a.out.row<float>(a.out.dim(0))[0] = 0;
        return;
      case Fault::writes_padding:
        out[a.out.dim(1)] = 0;
        return;
    }
  }

  cpu::RefOps reference_;
  Fault fault_;
};

std::string failure_of(const OpCase& test, FaultyOps::Fault fault) {
  FaultyOps ops(fault);
  HostMirror mirror;
  return run_case(test, ops, mirror).failure;
}

OpCase case_named(std::string_view op, std::string_view name) {
  for (const OpCase& test : op_cases(op))
    if (test.name == name) return test;
  throw_error(ErrorCode::internal, "no case {}", name);
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("the_reference_agrees_with_itself_on_every_case") {
  cpu::RefOps ops;
  HostMirror mirror;
  for (const OpCase& test : all_op_cases()) {
    const CaseResult result = run_case(test, ops, mirror);
    CHECK_MESSAGE(result.passed(), result.failure);
    CHECK(result.error_over_bound == 0);
  }
}

TEST_CASE("case_names_are_unique_and_every_op_has_cases") {
  std::vector<std::string> names;
  for (const OpCase& test : all_op_cases()) names.push_back(test.name);
  std::sort(names.begin(), names.end());
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
#define OFL_HAS_CASES(Args, name) CHECK_MESSAGE(!op_cases(#name).empty(), #name);
  OFL_FOR_EACH_OP(OFL_HAS_CASES)
#undef OFL_HAS_CASES
  CHECK(op_cases("no_such_op").empty());
}

TEST_CASE("the_suite_names_each_kind_of_fault") {
  using Fault = FaultyOps::Fault;
  const OpCase padded = case_named("copy", "copy/f32_to_f32/rows=9,n=77,pad=3");
  CHECK(failure_of(padded, Fault::none) == "");
  CHECK(contains(failure_of(padded, Fault::skips), "out element 0 of 693: "));
  CHECK(contains(failure_of(padded, Fault::skips), "an element was not written"));
  CHECK(contains(failure_of(padded, Fault::off_by_one_step), "exceeds 0 (tolerance exact)"));
  CHECK(contains(failure_of(padded, Fault::writes_input), "input x or the words around it were changed"));
  CHECK(contains(failure_of(padded, Fault::overruns), "guard words or stride padding of out were written"));
  CHECK(contains(failure_of(padded, Fault::writes_padding), "guard words or stride padding of out were written"));
}

TEST_CASE("the_suite_sees_a_write_that_the_contract_forbids") {
  OpCase partial = case_named("copy", "copy/f32_to_f32/rows=9,n=77,pad=0");
  const auto whole = partial.run;
  // The candidate runs the case as given, the reference (whose run comes first) leaves the last row out.
  int runs = 0;
  partial.run = [&runs, whole](Ops& ops, std::span<const Tensor> t) {
    const bool reference = runs++ < 2;  // planned, then executed
    if (reference)
      ops(CopyArgs{.x = t[0].narrow(0, 0, 8), .out = t[1].narrow(0, 0, 8)});
    else
      whole(ops, t);
  };
  cpu::RefOps ops;
  HostMirror mirror;
  CHECK(contains(run_case(partial, ops, mirror).failure, "an element that the contract leaves alone was written"));
}

TEST_CASE("values_depend_on_the_case_name_alone") {
  HostMirror mirror;
  const OpCase test = case_named("add", "add/f32/rows=1,n=77,pad=0,out=own");
  const std::vector<Tensor> first = upload_case(test, mirror), second = upload_case(test, mirror);
  CHECK(std::memcmp(first[0].data(), second[0].data(), 77 * sizeof(float)) == 0);
  CHECK(std::memcmp(first[0].data(), first[1].data(), 77 * sizeof(float)) != 0);
}

// Inputs whose fused and rounded results differ. Expected values: numpy 64-bit with ml_dtypes.bfloat16 roundings.
TEST_CASE("the_reference_rounds_once_when_fused_and_at_each_rnd_otherwise") {
  cpu::RefOps ops;
  HostMirror mirror;
  OpValues v(ops, mirror);
  for (const Rounding rounding : {Rounding::fused, Rounding::reference}) {
    const auto first = [&](const auto& args) {
      v.run(args);
      return v.take(args.out)[0];
    };
    const auto either = [&](double fused, double rounded) { return rounding == Rounding::fused ? fused : rounded; };
    CHECK(
        first(SwigluArgs{.x = v.put(kBf16, {1, 2}, {1.5, 1.5}), .out = v.blank(kBf16, {1, 1}), .rounding = rounding}) ==
        either(1.8359375, 1.84375));
    CHECK(first(MulSigmoidArgs{.x = v.put(kBf16, {1, 1, 1}, {3}),
                               .gate = v.put(kBf16, {1, 1, 1}, {0.5}),
                               .out = v.blank(kBf16, {1, 1, 1}),
                               .rounding = rounding}) == either(1.8671875, 1.859375));
    CHECK(first(ScaledSiluArgs{.x = v.put(kBf16, {1, 1}, {5}),
                               .out = v.blank(kBf16, {1, 1}),
                               .scale = 0.5f / 3.0f,
                               .rounding = rounding}) == either(0.58203125, 0.578125));
    CHECK(first(GatedNormArgs{.x = v.put(kBf16, {1, 1, 2}, {1.5, 0.5}),
                              .z = v.put(kBf16, {1, 1, 2}, {1, 1}),
                              .w = v.put(kF32, {2}, {1.3, 1.3}),
                              .out = v.blank(kBf16, {1, 1, 2}),
                              .rounding = rounding}) == either(1.2734375, 1.28125));
    CHECK(first(RmsNormArgs{.x = v.put(kBf16, {1, 1, 2}, {1, 2}),
                            .w = v.put(kF32, {1, 2}, {1.3, 1.3}),
                            .out = v.blank(kBf16, {1, 1, 2}),
                            .weight = NormWeight::plain,
                            .rounding = rounding}) == either(0.8203125, 0.82421875));
    CHECK(first(NormRopeArgs{.x = v.put(kBf16, {1, 1, 2}, {1, 3}),
                             .w = {},
                             .table = v.put(kF32, {1, 1, 2}, {0.6, 0.8}),
                             .out = v.blank(kBf16, {1, 1, 2}),
                             .rounding = rounding}) == either(-1.796875, -1.8046875));
    CHECK(first(CausalConvSiluArgs{.x = v.put(kBf16, {1, 1}, {2}),
                                   .w = v.put(kBf16, {1, 2}, {1.3, 1.3}),
                                   .history = v.put(kBf16, {1, 1}, {1.5}),
                                   .out = v.blank(kBf16, {1, 1}),
                                   .rounding = rounding}) == either(4.5, 4.46875));
    CHECK(first(StreamMixArgs{.x = v.put(kBf16, {1, 2}, {1, 0.5}),
                              .u = v.put(kBf16, {1, 2}, {0.5, 1}),
                              .out = v.blank(kBf16, {1, 1}),
                              .streams = 2,
                              .rounding = rounding}) == either(0.494140625, 0.4921875));
    CHECK(first(MoeCombineArgs{.parts = v.put(kBf16, {1, 1}, {1}),
                               .weights = v.put(kF32, {1, 1}, {0.3}),
                               .present = {},
                               .shared = v.put(kBf16, {1, 1}, {1.5}),
                               .gate = v.put(kBf16, {1, 1}, {1.5}),
                               .out = v.blank(kBf16, {1, 1}),
                               .rounding = rounding}) == either(1.5234375, 1.53125));
    CHECK(first(AttentionArgs{.q = v.put(kBf16, {1, 1, 1}, {1}),
                              .k = v.put(kBf16, {2, 1, 1}, {1, 2}),
                              .v = v.put(kBf16, {2, 1, 1}, {1, 3}),
                              .out = v.blank(kBf16, {1, 1, 1}),
                              .blocks = {},
                              .counts = {},
                              .first = 1,
                              .scale = 0.5f,
                              .rounding = rounding}) == either(2.25, 2.234375));
    const Tensor stack = v.put(kBf16, {1, 2}, {1, 1});
    v.run(StreamWriteArgs{.stack = stack,
                          .y = v.put(kBf16, {1, 1}, {1}),
                          .logits = v.put(kBf16, {1, 2}, {3, 3}),
                          .streams = 2,
                          .rounding = rounding});
    CHECK(v.take(stack)[0] == either(2.640625, 2.625));
  }
}

TEST_CASE("the_reference_rounds_a_double_to_bf16_once") {
  cpu::RefOps ops;
  HostMirror mirror;
  OpValues v(ops, mirror);
  // Just above the middle of 1 and 1 + 2^-7; by way of FP32 the 2^-40 is lost and the middle would tie to 1.
  const Tensor out = v.blank(DType::bf16, {1, 1});
  v.run(LinearArgs{
      .x = v.put(DType::bf16, {1, 3}, {1, 1, 1}), .w = v.put(DType::bf16, {1, 3}, {1, 0x1p-8, 0x1p-40}), .out = out});
  CHECK(v.take(out)[0] == 1 + 0x1p-7);
}

// Formulas on numbers small enough to check on paper.
TEST_CASE("the_reference_matches_values_worked_out_by_hand") {
  cpu::RefOps ops;
  HostMirror mirror;
  OpValues v(ops, mirror);
  const auto result = [&](const auto& args) {
    v.run(args);
    return v.take(args.out);
  };
  CHECK(result(LinearArgs{.x = v.put(kF32, {2, 3}, {1, 2, 3, -1, 0, 4}),
                          .w = v.put(kF32, {2, 3}, {1, 1, 1, 2, 0, -1}),
                          .out = v.blank(kF32, {2, 2})}) == std::vector<double>{6, -1, 3, -6});
  // Mean square of (1, 7) is 25.
  CHECK(max_difference(result(RmsNormArgs{.x = v.put(kF32, {1, 1, 2}, {1, 7}),
                                          .w = v.put(kF32, {1, 2}, {0, 1}),
                                          .out = v.blank(kF32, {1, 1, 2}),
                                          .eps = 0}),
                       {0.2, 2.8}) < 1e-6);
  CHECK(max_difference(result(RmsNormArgs{.x = v.put(kF32, {1, 1, 2}, {1, 7}),
                                          .w = v.put(kF32, {1, 2}, {0, 1}),
                                          .out = v.blank(kF32, {1, 1, 2}),
                                          .eps = 11,  // sqrt(36)
                                          .weight = NormWeight::plain}),
                       {0, 7.0 / 6}) < 1e-6);
  CHECK(max_difference(result(GatedNormArgs{.x = v.put(kF32, {1, 1, 2}, {1, 7}),
                                            .z = v.put(kF32, {1, 1, 2}, {0, 1}),
                                            .w = v.put(kF32, {2}, {1, 2}),
                                            .out = v.blank(kF32, {1, 1, 2}),
                                            .eps = 0,
                                            .gate = Gate::silu}),
                       {0, 2.8 * 0.7310585786300049}) < 1e-6);
  CHECK(result(MeanPoolArgs{
            .x = v.put(kF32, {4, 2}, {1, 2, 3, 6, -1, 0, 1, 1}), .out = v.blank(kF32, {2, 2}), .pool = 2}) ==
        std::vector<double>{2, 4, 0, 0.5});
  // The norm gives (0.2, 2.8); a quarter turn of it is (-2.8, 0.2).
  CHECK(max_difference(result(NormRopeArgs{.x = v.put(kF32, {1, 1, 2}, {1, 7}),
                                           .w = v.put(kF32, {2}, {0, 1}),
                                           .table = v.put(kF32, {1, 1, 2}, {0, 1}),
                                           .out = v.blank(kF32, {1, 1, 2}),
                                           .eps = 0}),
                       {-2.8, 0.2}) < 1e-6);
  // The float nearest to 262143 * 0.60429639 is 158412.0625; the exact product is 158412.0676.
  CHECK(
      max_difference(result(RopeTableArgs{
                         .inv_freq = v.put(kF32, {1}, {0.60429639}), .out = v.blank(kF32, {1, 1, 2}), .first = 262143}),
                     {0.9231752511357505, 0.38437931225606314}) < 1e-6);
  // sum of key * query = 8, over sqrt(4) = 4, root 2, sigmoid(2); and the negative.
  CHECK(max_difference(result(SignedRootGateArgs{.key = v.put(kF32, {1, 2, 4}, {2, 2, 2, 2, -2, -2, -2, -2}),
                                                 .query = v.fill(kF32, {1, 2, 4}, 1),
                                                 .value = v.fill(kF32, {1, 4}, 1),
                                                 .out = v.blank(kF32, {1, 2, 4})}),
                       {0.8807970779778823, 0.8807970779778823, 0.8807970779778823, 0.8807970779778823,
                        0.11920292202211755, 0.11920292202211755, 0.11920292202211755, 0.11920292202211755}) < 1e-6);
  // Block 0 is not selected and holds NaN; equal scores average 3 and 5 of block 1 and the tail's 7.
  CHECK(max_difference(result(AttentionArgs{.q = v.fill(kF32, {1, 2, 1}, 1),
                                            .k = v.put(kF32, {5, 1, 1}, {NAN, NAN, 2, 2, 2}),
                                            .v = v.put(kF32, {5, 1, 1}, {NAN, NAN, 3, 5, 7}),
                                            .out = v.blank(kF32, {1, 2, 1}),
                                            .blocks = v.put(DType::i32, {1, 1}, {1}),
                                            .counts = v.put(DType::i32, {1}, {1}),
                                            .first = 4,
                                            .ratio = 2}),
                       {5, 5}) < 1e-6);
}

#define OFL_HANDED_TEST(name)     \
  TEST_CASE(#name) {              \
    cpu::RefOps ops;              \
    HostMirror mirror;            \
    OpValues values(ops, mirror); \
    name(values);                 \
  }
OFL_FOR_EACH_HANDED_CASE(OFL_HANDED_TEST)

}  // namespace offload::ops_test
