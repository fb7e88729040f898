#include "offload/cost_model.h"

#include <doctest/doctest.h>

#include "simulation_cases.h"

namespace offload::cost_model_test {

namespace {

Machine plain_machine() {
  Machine machine;
  machine.name = "plain";
  machine.device = {.kind = "",
                    .count = 4,
                    .memory_bytes = int64_t{8} << 30,
                    .memory_bytes_per_s = 1e11,
                    .gemm_flops = {1e12, 4e12},
                    .compute_units = 10,
                    .tile_rows = 64,
                    .tile_columns = 64,
                    .gemv_efficiency = 0.5,
                    .launch_gap_s = 2e-6};
  machine.link = {.h2d_bytes_per_s = 1e10, .additive = 0.5};
  machine.host = {.cores = 4, .dram_bytes_per_s = 2e10};
  machine.collective = {{1000, 1e-5}, {2000, 3e-5}};
  return machine;
}

StepOp product(int64_t m, int64_t n, int64_t k) {
  return {"linear", {2 * (m * k + n * k), 2 * m * n, 2 * m * n * k}, m, n, k};
}

}  // namespace

TEST_CASE("elementwise_ops_take_their_bytes_and_a_launch") {
  const CostModel costs(plain_machine(), GemmMath::bf16, 1);
  CHECK(costs.op_ns({"add", {600000, 400000, 1000}}) == 2000 + 10000);
  CHECK(costs.op_ns({"add", {0, 0, 0}}) == 2000);
}

TEST_CASE("products_of_few_rows_stream_their_weights_at_the_gemv_rate") {
  const CostModel costs(plain_machine(), GemmMath::bf16, 1);
  const StepOp op = product(1, 1000, 1000);
  CHECK(costs.op_ns(op) == 2000 + 2 * (op.cost.bytes_read + op.cost.bytes_written) / 100);
}

TEST_CASE("products_of_many_rows_fill_whole_waves_of_tiles") {
  // 10 units and tiles of 64 x 64: [64, 640] is one full wave, [65, 640] needs two.
  const CostModel bf16(plain_machine(), GemmMath::bf16, 1), fp16(plain_machine(), GemmMath::fp16, 1);
  const int64_t k = 10000, wave_ns = 2 * 10 * 64 * 64 * k / 1000;
  CHECK(bf16.op_ns(product(64, 640, k)) == 2000 + wave_ns);
  CHECK(bf16.op_ns(product(65, 640, k)) == 2000 + 2 * wave_ns);
  CHECK(bf16.op_ns(product(64, 64, k)) == 2000 + wave_ns);
  CHECK(bf16.op_ns(product(16, 640, k)) == 2000 + wave_ns / 4);  // a smaller tile
  CHECK(fp16.op_ns(product(64, 640, k)) == 2000 + wave_ns / 4);
}

TEST_CASE("links_that_copy_at_once_share_what_is_not_additive") {
  const auto copy_ns = [](int64_t world) { return CostModel(plain_machine(), GemmMath::bf16, world).copy_ns(1000000); };
  CHECK(copy_ns(1) == 100000);
  CHECK(copy_ns(2) == 133333);  // 1e10 x 1.5 / 2
  CHECK(copy_ns(4) == 160000);  // 1e10 x 2.5 / 4
  Machine machine = plain_machine();
  machine.link = {};
  CHECK(CostModel(machine, GemmMath::bf16, 1).copy_ns(1000000) == 0);
}

TEST_CASE("an_all_reduce_is_interpolated_and_free_for_one_rank") {
  const CostModel one(plain_machine(), GemmMath::bf16, 1), four(plain_machine(), GemmMath::bf16, 4);
  CHECK(one.all_reduce_ns(1500) == 0);
  CHECK(four.all_reduce_ns(1) == 10000);
  CHECK(four.all_reduce_ns(1500) == 20000);
  CHECK(four.all_reduce_ns(3000) == 50000);
}

TEST_CASE("an_expert_is_fastest_in_device_memory_then_by_whoever_reads_it_faster") {
  const CostModel costs(plain_machine(), GemmMath::bf16, 1);
  const ExpertShape shape{.experts = 8, .hidden = 512, .intermediate = 256};
  CHECK(costs.expert_ns(shape, 1) < costs.expert_host_ns(shape, 1));
  CHECK(costs.expert_host_ns(shape, 1) < costs.expert_zero_copy_ns(shape, 1));  // 20 against 9.2 GB/s
}

TEST_CASE("only_the_first_run_of_a_batch_takes_its_two_launches") {
  const CostModel costs(plain_machine(), GemmMath::bf16, 1);
  CHECK(costs.batch_ns(1) == 2 * 2000);
  CHECK(costs.batch_ns(100) == 2 * 2000);
  const ExpertShape shape{.experts = 8, .hidden = 512, .intermediate = 256};
  CHECK(costs.expert_ns(shape, 1) - costs.batch_ns(1) > 2 * shape.block_bytes() / 100);
  // Published runs were measured one by one.
  const StepProgrammer programmer(published_model(), 4, 65536);
  CostModel calibrated(published_machine(), GemmMath::bf16, 4);
  REQUIRE(calibrated.calibrate(programmer));
  CHECK(calibrated.batch_ns(1) == 0);
}

TEST_CASE("more_ranks_than_devices_are_refused") {
  CHECK_THROWS_WITH_AS(CostModel(plain_machine(), GemmMath::bf16, 5), "5 ranks: the machine \"plain\" has 4 device(s)",
                       Error);
}

TEST_CASE("the_step_of_the_published_model_has_the_published_weights") {
  // spec 5: 2.78 GiB per rank of four without embedding and lm_head, 1.18 GiB each: the embedding whole on every rank,
  // lm_head by rows (vectors are FP32 here).
  const StepProgrammer programmer(published_model(), 4, 65536);
  CHECK(is_near(static_cast<double>(programmer.weight_bytes()) / kGibibyte, 2.78 + 1.25 * 1.184, 0.01));
  const StepProgram step = programmer.program(1, 8192);
  CHECK(step.layers.size() == 48);
  CHECK(step.reduce_bytes == 2560 * 2);
  int64_t dense_bytes = 0;
  for (const LayerProgram& layer : step.layers) {
    CHECK(layer.mixer.size() > 5);
    CHECK(layer.router.back().name == "router_topk");
    CHECK(layer.combine.size() == 1);
    CHECK(layer.write.size() == 1);
    for (const StepOps* ops : {&layer.mixer, &layer.router, &layer.shared})
      for (const StepOp& op : *ops) dense_bytes += op.k > 0 ? 2 * op.n * op.k : 0;
  }
  CHECK(is_near(static_cast<double>(dense_bytes) / kGibibyte, 2.78, 0.02));
}

TEST_CASE("the_roofs_alone_come_near_the_published_decode_parts") {
  const StepProgrammer programmer(published_model(), 4, 65536);
  const CostModel costs(published_machine(), GemmMath::bf16, 4);
  const StepParts parts = costs.parts_ns(programmer.program(1, 8192));
  const auto ms = [](int64_t ns) { return static_cast<double>(ns) * 1e-6; };
  MESSAGE("dense " << ms(parts.dense) << " attention " << ms(parts.attention) << " lm_head " << ms(parts.lm_head)
                   << " collectives " << ms(parts.collectives));
  CHECK(is_near(ms(parts.dense), 11.2, 0.2));
  CHECK(is_near(ms(parts.collectives), 8.8, 0.01));
}

TEST_CASE("hyper_connections_take_the_published_fifth_of_the_kernel_time_of_an_8k_prefill") {
  // Nothing was fitted to this: the machine's BF16 rate, tile and DRAM rate, and the ops' own flops and bytes. Experts
  // as in the published count: 4652 of 6144, 8192 x 10 / 4 rows per layer and rank.
  const StepProgrammer programmer(published_model(), 4, 65536);
  const CostModel costs(published_machine(), GemmMath::bf16, 4);
  const StepProgram step = programmer.program(8192, 0);
  const StepParts parts = costs.parts_ns(step);
  const int64_t rows = 8192 * 10 / 4 * 48 / 4652;
  const int64_t experts = 4652 * costs.expert_ns(programmer.expert_shape(), rows);
  int64_t hyper = 0;
  for (const LayerProgram& layer : step.layers)
    for (const StepOps* ops : {&layer.mixer, &layer.router, &layer.write})
      for (const StepOp& op : *ops) {
        const bool is_gate = op.k == 320 || (op.k == 10240 && op.n <= 330);
        if (is_gate || op.name == "stream_mix" || op.name == "stream_write") hyper += costs.op_ns(op);
      }
  const double share =
      static_cast<double>(hyper) / static_cast<double>(parts.dense + parts.attention + parts.collectives + experts);
  MESSAGE("share " << share);
  CHECK(is_near(share, 0.20, 0.2));
}

TEST_CASE("a_calibration_gives_the_measured_sums_and_only_for_its_model_and_ranks") {
  const StepProgrammer four(published_model(), 4, 65536), two(published_model(), 2, 65536);
  CostModel costs(published_machine(), GemmMath::bf16, 4), other(published_machine(), GemmMath::bf16, 2);
  CHECK_FALSE(other.calibrate(two));
  REQUIRE(costs.calibrate(four));
  const StepTimes step = costs.step_ns(four.program(1, 8192));
  int64_t sum = step.prologue + step.epilogue;
  for (const LayerTimes& layer : step.layers)
    sum += layer.mixer + layer.router + layer.shared + layer.combine + layer.write;
  CHECK(is_near(static_cast<double>(sum) * 1e-6, 11.2 + 8.8, 1e-4));
  CHECK(is_near(static_cast<double>(step.head) * 1e-6, 1.8, 1e-4));
  CHECK(is_near(static_cast<double>(120 * costs.expert_ns(four.expert_shape(), 1)) * 1e-6, 4.4, 1e-4));
}

TEST_CASE("the_h200_file_gives_what_was_measured_there") {
  const Machine machine = read_machine(OFFLOAD_SOURCE_DIR "/configs/machines/h200.json");
  const CostModel costs(machine, GemmMath::bf16, 1);
  const ExpertShape shape{.experts = 512, .hidden = 2560, .intermediate = 640};
  // Ten experts of 9.375 MiB: 1.80 ms by the copy engine, 0.035 ms out of device memory less the launches.
  CHECK(is_near(static_cast<double>(10 * costs.copy_ns(shape.block_bytes())) * 1e-6, 1.80, 0.01));
  const double launches_ms = 20 * 3.3e-3;
  CHECK(is_near(static_cast<double>(10 * costs.expert_ns(shape, 1)) * 1e-6 - launches_ms, 0.035, 0.05));
  const double tflops =
      2.0 * 160 * 1280 * 2560 / static_cast<double>(costs.op_ns(product(160, 1280, 2560)) - 3300) * 1e-3;
  CHECK(is_near(tflops, 102, 0.25));
}

TEST_CASE("ranks_that_do_not_divide_the_model_are_refused") {
  CHECK_THROWS_AS(StepProgrammer(published_model(), 3, 1024), Error);
  CHECK_THROWS_AS(StepProgrammer(published_model(), 16, 1024), Error);
  CHECK_THROWS_AS(StepProgrammer(published_model(), 0, 1024), Error);
  CHECK_THROWS_AS(StepProgrammer(published_model(), 1, 0), Error);
  for (const int64_t world : {1, 2, 4, 8}) CHECK(StepProgrammer(published_model(), world, 1024).world() == world);
}

}  // namespace offload::cost_model_test
