// Which matrix kernel a shape gets on which card: decided on the host, so tested without one.
#include "cuda/gemm_plan.h"

#include <doctest/doctest.h>

using namespace offload;
using namespace offload::cuda;

namespace {

DeviceCaps card(int sm) {
  DeviceCaps caps;
  caps.sm = sm;
  return caps;
}

GemmKernel plan(int sm, GemmShape shape) {
  return plan_gemm(shape, card(sm));
}

}  // namespace

TEST_CASE("up_to_eight_rows_take_the_canonical_order_on_every_card") {
  for (const int sm : {75, 80, 86, 89, 90, 120})
    for (int64_t m = 1; m <= 8; ++m)
      for (const DType type : {DType::bf16, DType::f32})
        CHECK(plan(sm, {.m = m, .n = 64, .k = 64, .x = type, .w = type}) == GemmKernel::canonical);
}

TEST_CASE("no_turing_plan_has_bf16_matrix_units") {
  for (const int64_t m : {9, 64, 127, 128, 8192})
    for (const bool grouped : {false, true}) {
      const GemmKernel kernel = plan(75, {.m = m, .n = 2560, .k = 2560, .grouped = grouped});
      CHECK(kernel != GemmKernel::mma_bf16);
      CHECK(kernel != GemmKernel::blas_bf16);
    }
  CHECK(plan(75, {.m = 8192, .n = 2560, .k = 2560}) == GemmKernel::blas_scaled);
  CHECK(plan(75, {.m = 64, .n = 2560, .k = 2560}) == GemmKernel::mma_scaled);
  CHECK(plan(75, {.m = 8192, .n = 2560, .k = 2560, .grouped = true}) == GemmKernel::mma_scaled);
}

TEST_CASE("newer_cards_multiply_bf16_as_it_is") {
  for (const int sm : {80, 86, 89, 90}) {
    CHECK(plan(sm, {.m = 9, .n = 2560, .k = 2560}) == GemmKernel::blas_bf16);
    CHECK(plan(sm, {.m = 160, .n = 640, .k = 2560, .grouped = true}) == GemmKernel::mma_bf16);
  }
}

TEST_CASE("fp32_and_odd_alignment_run_on_the_ordinary_units") {
  for (const int sm : {75, 90}) {
    CHECK(plan(sm, {.m = 9, .n = 8, .k = 8, .x = DType::f32}) == GemmKernel::simt);
    CHECK(plan(sm, {.m = 9, .n = 8, .k = 8, .w = DType::f32}) == GemmKernel::simt);
    CHECK(plan(sm, {.m = 9, .n = 8, .k = 7, .aligned = false}) == GemmKernel::simt);
  }
}

TEST_CASE("tiles_waste_no_more_rows_than_they_must_and_are_wide_where_shared_memory_holds_them") {
  DeviceCaps small, large;
  small.shared_bytes = 99 << 10;
  large.shared_bytes = 227 << 10;
  const auto rows = [&](int64_t average) { return plan_tile(GemmKernel::mma_bf16, average, small).rows; };
  CHECK(rows(9) == 64);
  CHECK(rows(64) == 64);
  CHECK(rows(128) == 64);
  CHECK(rows(160) == 64);  // 3 x 64 instead of 2 x 128
  CHECK(rows(250) == 128);
  CHECK(rows(8192) == 128);
  CHECK(plan_tile(GemmKernel::mma_bf16, 160, small).columns == 128);
  CHECK(plan_tile(GemmKernel::mma_bf16, 160, large).columns == 256);
  CHECK(plan_tile(GemmKernel::mma_bf16, 9, large).columns == 128);
  for (const int64_t average : {9, 64, 65, 160, 8192}) {
    CHECK(plan_tile(GemmKernel::mma_scaled, average, large).rows == (average <= 64 ? 64 : kScaledRows));
    CHECK(plan_tile(GemmKernel::mma_scaled, average, large).columns == 128);
  }
  CHECK(plan_tile(GemmKernel::simt, 8192, large).rows == 64);
}

TEST_CASE("only_products_that_convert_themselves_want_exponents_of_weights") {
  for (const Math math : {Math::native, Math::scaled_fp16, Math::fp16, Math::fp16_out, Math::reordered}) {
    CHECK(needs_exponents(GemmKernel::simt, math) == (math == Math::scaled_fp16));
    CHECK(!needs_exponents(GemmKernel::mma_scaled, math));
    CHECK(!needs_exponents(GemmKernel::mma_bf16, math));
  }
}

TEST_CASE("a_forced_generation_takes_capabilities_away_and_adds_none") {
  DeviceCaps h200;
  h200.sm = h200.device_sm = 90;
  h200.shared_bytes = 227 << 10;
  const DeviceCaps turing = forced_to(h200, 75);
  CHECK(turing.sm == 75);
  CHECK(turing.shared_bytes == 64 << 10);
  CHECK(!turing.has_bf16_mma());
  CHECK(turing.device_sm == 90);
  CHECK(forced_to(turing, 90).sm == 75);
  CHECK(forced_to(h200, 120).sm == 90);
}
