// Costs worked out by hand, and what planning counts and does not do.
#include <doctest/doctest.h>

#include <vector>

#include "cpu/ref_ops.h"

namespace offload::op_cost_test {

namespace {

// A tensor whose data must not be touched.
Tensor shaped(DType dtype, std::initializer_list<int64_t> shape) {
  return Tensor(reinterpret_cast<void*>(256), dtype, shape);
}

void check_cost(const Cost& cost, int64_t bytes_read, int64_t bytes_written, int64_t flops) {
  CHECK(cost.bytes_read == bytes_read);
  CHECK(cost.bytes_written == bytes_written);
  CHECK(cost.flops == flops);
}

}  // namespace

TEST_CASE("linear_reads_the_weights_once_and_costs_two_flops_per_product") {
  const auto linear = [](int64_t rows) {
    return cost(LinearArgs{.x = shaped(DType::bf16, {rows, 2560}),
                           .w = shaped(DType::bf16, {512, 2560}),
                           .out = shaped(DType::f32, {rows, 512})});
  };
  check_cost(linear(3), 3 * 2560 * 2 + 512 * 2560 * 2, 3 * 512 * 4, 2LL * 3 * 512 * 2560);
  check_cost(linear(0), 0, 0, 0);
}

TEST_CASE("an_expert_costs_its_weights_once_per_run_and_nothing_without_tokens") {
  const int weights = 0;
  const std::vector<ExpertRun> runs = {{.gate_up = &weights, .down = &weights, .begin = 0, .count = 1},
                                       {.gate_up = &weights, .down = &weights, .begin = 1, .count = 0},
                                       {.gate_up = &weights, .down = &weights, .begin = 1, .count = 3}};
  const std::vector<int32_t> rows = {0, 1, 2, 0};
  const Cost total = cost(SwigluExpertsArgs{.x = shaped(DType::bf16, {3, 2560}),
                                            .out = shaped(DType::f32, {4, 2560}),
                                            .runs = runs,
                                            .rows = rows,
                                            .out_rows = rows,
                                            .intermediate = 640});
  // One published expert is 9,830,400 bytes; two runs have tokens, four rows in all.
  check_cost(total, 2 * 9830400 + 4 * 2560 * 2, 4 * 2560 * 4, 4 * (2LL * 3 * 640 * 2560 + 5 * 640));
}

TEST_CASE("dense_attention_reads_the_visible_positions_once") {
  // Rows 10 and 11 see 11 and 12 positions: 23 pairs; 12 positions of K and of V are read.
  const Cost total = cost(AttentionArgs{.q = shaped(DType::bf16, {2, 24, 256}),
                                        .k = shaped(DType::bf16, {50, 2, 256}),
                                        .v = shaped(DType::bf16, {50, 2, 256}),
                                        .out = shaped(DType::bf16, {2, 24, 256}),
                                        .blocks = {},
                                        .counts = {},
                                        .first = 10});
  check_cost(total, 2 * 24 * 256 * 2 + 2 * 12 * 2 * 256 * 2, 2 * 24 * 256 * 2, 23LL * 24 * (4 * 256 + 5));
}

TEST_CASE("sparse_attention_reads_selected_blocks_and_the_tail") {
  // One row at position 102 sees 103: 25 complete blocks of which 8 are read, and a tail of 3.
  const Cost total = cost(AttentionArgs{.q = shaped(DType::f32, {1, 4, 16}),
                                        .k = shaped(DType::f32, {200, 2, 16}),
                                        .v = shaped(DType::f32, {200, 2, 16}),
                                        .out = shaped(DType::f32, {1, 4, 16}),
                                        .blocks = shaped(DType::i32, {1, 8}),
                                        .counts = shaped(DType::i32, {1}),
                                        .first = 102,
                                        .ratio = 4});
  check_cost(total, 4 * 16 * 4 + 2 * 35 * 2 * 16 * 4, 4 * 16 * 4, 35LL * 4 * (4 * 16 + 5));
}

TEST_CASE("optional_tensors_cost_only_when_given") {
  MoeCombineArgs args{.parts = shaped(DType::bf16, {20, 8}),
                      .weights = shaped(DType::f32, {2, 10}),
                      .present = {},
                      .shared = {},
                      .gate = {},
                      .out = shaped(DType::bf16, {2, 8})};
  check_cost(cost(args), 20 * 8 * 2 + 2 * 10 * 4, 2 * 8 * 2, 2 * 20 * 8);
  args.shared = shaped(DType::bf16, {2, 8});
  args.present = shaped(DType::u8, {2, 10});
  check_cost(cost(args), 20 * 8 * 2 + 2 * 10 * 4 + 2 * 8 * 2 + 20, 2 * 8 * 2, 2 * 20 * 8);
}

TEST_CASE("planning_adds_up_costs_and_touches_no_memory") {
  cpu::RefOps ops;
  const AddArgs add{
      .x = shaped(DType::f32, {3, 5}), .y = shaped(DType::f32, {3, 5}), .out = shaped(DType::f32, {3, 5})};
  ops.set_planning(true);
  ops(add);  // would fault
  ops(add);
  CHECK(ops.planning());
  check_cost(ops.total_cost(), 2 * 2 * 60, 2 * 60, 2 * 15);
  CHECK(ops.scratch_peak_bytes() == 0);
  ops.reset_cost();
  check_cost(ops.total_cost(), 0, 0, 0);

  ops.set_planning(false);
  std::vector<float> x(15, 1), y(15, 2), out(15, 0);
  ops(AddArgs{.x = Tensor(x.data(), DType::f32, {3, 5}),
              .y = Tensor(y.data(), DType::f32, {3, 5}),
              .out = Tensor(out.data(), DType::f32, {3, 5})});
  CHECK(out == std::vector<float>(15, 3));
  check_cost(ops.total_cost(), 120, 60, 15);
}

TEST_CASE("every_op_has_its_name") {
  std::vector<std::string_view> names;
#define OFL_NAME(Args, name) names.push_back(op_name(static_cast<const Args*>(nullptr)));
  OFL_FOR_EACH_OP(OFL_NAME)
#undef OFL_NAME
  CHECK(names.size() == 26);
  CHECK(names.front() == "copy");
  CHECK(names.back() == "topk");
}

}  // namespace offload::op_cost_test
