// The CPU kernels: the op suite at each ISA level, the bits of the canonical order, and what the class promises beyond
// the contracts (threads change nothing, nothing is allocated, scratch grows with positions and not with their square).
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>

#include "core/canonical.h"
#include "counted_heap.h"
#include "cpu/cpu_ops.h"
#include "cpu/roofs.h"
#include "op_suite.h"

namespace offload::cpu_ops_test {
using cpu::CpuOps;
using cpu::Isa;

namespace {

// The levels that this machine runs, portable first.
std::vector<Isa> isa_levels() {
  std::vector<Isa> levels;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
    if (isa <= cpu::best_isa()) levels.push_back(isa);
  return levels;
}

struct Matrix {
  Matrix(DType dtype, int64_t rows, int64_t columns, std::string_view seed, double scale = 1.0)
      : bytes(static_cast<size_t>(rows * columns * dtype_bytes(dtype))), tensor(bytes.data(), dtype, {rows, columns}) {
    CaseRandom random(seed);
    for (int64_t i = 0; i < rows * columns; ++i) set(i, static_cast<float>(scale * random.normal()));
  }
  void set(int64_t i, float value) const {
    if (tensor.dtype() == DType::bf16)
      tensor.as<bf16>()[i] = to_bf16(value);
    else
      tensor.as<float>()[i] = value;
  }
  float get(int64_t i) const {
    return tensor.dtype() == DType::bf16 ? to_float(tensor.as<bf16>()[i]) : tensor.as<float>()[i];
  }
  float get(int64_t row, int64_t column) const { return get(row * tensor.dim(1) + column); }

  std::vector<std::byte> bytes;
  Tensor tensor;
};

// Plans and runs one call with scratch of the planned size.
template <typename Args>
void run(CpuOps& ops, const Args& args) {
  ops.set_planning(true);
  ops(args);
  ops.set_planning(false);
  std::vector<std::byte> block(static_cast<size_t>(ops.scratch_peak_bytes() + 64), std::byte{0xff});
  const auto address = reinterpret_cast<uintptr_t>(block.data());
  std::byte* aligned = block.data() + (64 - address % 64) % 64;
  ops.set_scratch(Tensor(aligned, DType::u8, {ops.scratch_peak_bytes()}));
  ops(args);
  ops.set_scratch({});
}

// core/canonical.h, written as it reads.
float canonical_sum(const std::vector<float>& x, const std::vector<float>& w) {
  float acc[kCanonicalAccumulators] = {};
  const auto count = static_cast<int64_t>(x.size());
  for (int64_t k = 0; k < (count + kCanonicalBlock - 1) / kCanonicalBlock * kCanonicalBlock; ++k) {
    const auto i = static_cast<size_t>(k);
    float& a = acc[canonical_accumulator(k)];
    a = std::fma(k < count ? x[i] : 0.0f, k < count ? w[i] : 0.0f, a);
  }
  for (int width = 16; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) acc[i] += acc[i + width];
  return acc[0];
}

std::vector<float> row_of(const Matrix& m, int64_t row) {
  std::vector<float> values;
  for (int64_t j = 0; j < m.tensor.dim(1); ++j) values.push_back(m.get(row, j));
  return values;
}

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

}  // namespace

TEST_CASE("every_case_passes_at_every_level_and_threads_do_not_change_the_best_levels_bits") {
  for (const Isa isa : {Isa::avx2, Isa::avx512})
    if (isa > cpu::best_isa()) MESSAGE("skipping ", std::string(cpu::isa_name(isa)), ": this processor lacks it");
  struct Worst {
    double error = 0;
    std::string name;
  };
  const std::vector<Isa> levels = isa_levels();
  std::vector<Worst> worst(levels.size());
  HostMirror mirror;
  for (const OpCase& test : all_op_cases()) {
    const PreparedCase prepared(test);
    for (size_t level = 0; level < levels.size(); ++level) {
      CAPTURE(std::string(cpu::isa_name(levels[level])));
      CpuOps one({.threads = 1, .isa = levels[level]});
      const CaseResult alone = prepared.run(one, mirror);
      CHECK_MESSAGE(alone.passed(), alone.failure);
      if (alone.error_over_bound > worst[level].error) worst[level] = {alone.error_over_bound, test.name};
      if (levels[level] != cpu::best_isa()) continue;
      for (const int threads : {2, 3}) {
        CpuOps several({.threads = threads, .isa = levels[level]});
        const CaseResult together = prepared.run(several, mirror);
        CHECK_MESSAGE(together.passed(), together.failure);
        CHECK_MESSAGE(together.output_hash == alone.output_hash, test.name, ": the thread count changed bits");
      }
    }
  }
  for (size_t level = 0; level < levels.size(); ++level)
    MESSAGE(std::string(cpu::isa_name(levels[level])), ": largest error is ", worst[level].error, " of its bound, in ",
            worst[level].name);
}

TEST_CASE("small_row_products_have_the_canonical_bits_at_every_level") {
  for (const DType activation : {DType::f32, DType::bf16}) {
    for (const DType weight : {DType::f32, DType::bf16}) {
      for (const int64_t k : {1, 3, 7, 8, 63, 64, 65, 100, 130, 512, 577, 1100}) {
        const Matrix x(activation, kCanonicalRowsMax, k, "x"), w(weight, 13, k, "w");
        for (const Isa isa : isa_levels()) {
          for (int64_t rows = 1; rows <= kCanonicalRowsMax; ++rows) {
            const Matrix out(DType::f32, rows, 13, "out");
            CpuOps ops({.threads = 2, .isa = isa});
            run(ops, LinearArgs{x.tensor.narrow(0, 0, rows), w.tensor, out.tensor});
            bool same = true;
            for (int64_t m = 0; m < rows; ++m)
              for (int64_t n = 0; n < 13; ++n)
                same = same && bits_of(out.get(m, n)) == bits_of(canonical_sum(row_of(x, m), row_of(w, n)));
            CHECK_MESSAGE(same, std::string(cpu::isa_name(isa)), " rows=", rows, " k=", k);
          }
        }
      }
    }
  }
}

TEST_CASE("small_expert_runs_have_the_canonical_bits_at_every_level") {
  constexpr int64_t kHidden = 200, kInter = 72, kTokens = 9;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Matrix x(dtype, kTokens, kHidden, "x");
    const Matrix gate_up(DType::bf16, 2 * kInter, kHidden, "gate_up", 0.1), down(DType::bf16, kHidden, kInter, "down");
    const std::vector<int32_t> rows = {8, 1, 2, 3, 4, 5, 6, 7, 0}, out_rows = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<ExpertRun> runs = {{gate_up.tensor.data(), down.tensor.data(), 0, 1},
                                         {gate_up.tensor.data(), down.tensor.data(), 1, 8}};
    for (const Isa isa : isa_levels()) {
      const Matrix out(DType::f32, kTokens, kHidden, "out");
      CpuOps ops({.threads = 2, .isa = isa});
      SwigluExpertsArgs args;
      args.x = x.tensor;
      args.out = out.tensor;
      args.runs = runs;
      args.rows = rows;
      args.out_rows = out_rows;
      args.intermediate = kInter;
      run(ops, args);
      bool same = true;
      for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<float> t = row_of(x, rows[i]);
        std::vector<float> h;
        for (int64_t j = 0; j < kInter; ++j) {
          const float gate = canonical_sum(t, row_of(gate_up, j)), up = canonical_sum(t, row_of(gate_up, kInter + j));
          const float value = canonical_silu(gate) * up;
          h.push_back(dtype == DType::bf16 ? to_float(to_bf16(value)) : value);
        }
        for (int64_t j = 0; j < kHidden; ++j)
          same = same && bits_of(out.get(out_rows[i], j)) == bits_of(canonical_sum(h, row_of(down, j)));
      }
      CHECK_MESSAGE(same, std::string(cpu::isa_name(isa)));
    }
  }
}

TEST_CASE("canonical_exp_is_within_2e_7_of_exp_and_never_overflows") {
  double worst = 0;
  for (double x = canonical::kExpMin; x <= canonical::kExpMax; x += 1.0 / 4096) {
    const auto narrow = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(narrow));
    worst = std::max(worst, std::abs(static_cast<double>(canonical_exp(narrow)) - exact) / exact);
  }
  MESSAGE("largest relative error ", worst);
  CHECK(worst < 2e-7);
  CHECK(std::isfinite(canonical_exp(INFINITY)));
  CHECK(canonical_exp(-INFINITY) > 0);
  CHECK(canonical_exp(0.0f) == 1.0f);
}

TEST_CASE("vector_silu_has_the_bits_of_canonical_silu_and_sigmoid_is_near_the_exact_one") {
  std::vector<float> values;
  for (float x = -120.0f; x < 120.0f; x += 0.0137f) values.push_back(x);
  for (const float x : {0.0f, -0.0f, 1e-30f, -1e-40f, 3e38f, -3e38f, INFINITY}) values.push_back(x);
  values.resize(static_cast<size_t>(cpu::round_to_lanes(static_cast<int64_t>(values.size()))), 0.5f);
  const auto count = static_cast<int64_t>(values.size());
  for (const Isa isa : isa_levels()) {
    const cpu::CpuKernels& kernels = cpu::cpu_kernels(isa);
    std::vector<float> silu = values, sigmoid = values;
    kernels.silu(silu.data(), count);
    kernels.sigmoid(sigmoid.data(), count);
    bool same = true;
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      same = same && bits_of(silu[i]) == bits_of(canonical_silu(values[i]));
      if (std::abs(values[i]) > 85) continue;
      const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(values[i])));
      worst = std::max(worst, std::abs(static_cast<double>(sigmoid[i]) - exact) / exact);
    }
    CHECK_MESSAGE(same, std::string(cpu::isa_name(isa)));
    CHECK(worst < 4e-7);
  }
}

TEST_CASE("bf16_conversions_equal_those_of_dtype_for_all_codes_and_ties") {
  for (const Isa isa : isa_levels()) {
    const cpu::CpuKernels& kernels = cpu::cpu_kernels(isa);
    std::vector<uint16_t> codes(65536);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(codes.size());
    kernels.widen(codes.data(), wide.data(), 65536);
    bool same = true;
    for (size_t i = 0; i < codes.size(); ++i) same = same && bits_of(wide[i]) == static_cast<uint32_t>(i) << 16;
    CHECK(same);
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      std::vector<float> x(codes.size());
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::bit_cast<float>(static_cast<uint32_t>(i) << 16 | low);
      std::vector<uint16_t> narrow(codes.size());
      kernels.narrow(x.data(), narrow.data(), 65536 - 3);  // a ragged end
      std::vector<float> rounded = x;
      kernels.round_bf16(rounded.data(), 65536);
      same = true;
      for (size_t i = 0; i < x.size(); ++i) {
        same = same && (i >= 65536 - 3 ? narrow[i] == 0 : narrow[i] == to_bf16(x[i]).bits);
        same = same && bits_of(rounded[i]) == static_cast<uint32_t>(to_bf16(x[i]).bits) << 16;
      }
      CHECK_MESSAGE(same, std::string(cpu::isa_name(isa)), " low bits ", low);
    }
  }
}

TEST_CASE("the_prefill_gemm_is_right_across_blocks_of_rows_columns_and_k") {
  constexpr int64_t kColumns = 70, kDepth = 600;
  const Matrix w(DType::bf16, kColumns, kDepth, "w"), wide(DType::f32, kColumns, kDepth, "wide");
  for (const int64_t rows : {9, 97, 588, 589, 1200}) {
    const Matrix x(DType::bf16, rows, kDepth, "x");
    for (const Matrix* weights : {&w, &wide}) {
      for (const Isa isa : isa_levels()) {
        const Matrix out(DType::f32, rows, kColumns, "out");
        CpuOps ops({.threads = 2, .isa = isa});
        run(ops, LinearArgs{x.tensor, weights->tensor, out.tensor});
        double worst = 0;
        for (int64_t m = 0; m<rows; m += rows> 100 ? 41 : 1) {
          for (int64_t n = 0; n < kColumns; ++n) {
            double exact = 0;
            for (int64_t k = 0; k < kDepth; ++k)
              exact += static_cast<double>(x.get(m, k)) * static_cast<double>(weights->get(n, k));
            worst = std::max(worst, std::abs(static_cast<double>(out.get(m, n)) - exact));
          }
        }
        CHECK_MESSAGE(worst < 2e-4, std::string(cpu::isa_name(isa)), " rows=", rows);  // |sum| is about 25
      }
    }
  }
}

TEST_CASE("executing_allocates_nothing") {
  constexpr int64_t kHidden = 256, kInter = 128, kRows = 40;
  const Matrix x(DType::bf16, kRows, kHidden, "x"), out(DType::bf16, kRows, kHidden, "out");
  const Matrix gate_up(DType::bf16, 2 * kInter, kHidden, "gate_up"), down(DType::bf16, kHidden, kInter, "down");
  const Matrix square(DType::bf16, kHidden, kHidden, "square");
  const Matrix cache(DType::bf16, kRows, kHidden, "cache"), state(DType::f32, 4 * 64, 64, "state");
  const Matrix qkv(DType::bf16, kRows, 4 * 64 * 3, "qkv"), gates(DType::bf16, kRows, 4, "gates");
  const Matrix logits(DType::f32, kRows, 64, "logits"), weights(DType::f32, kRows, 4, "weights");
  std::vector<int32_t> ids(kRows * 4), row_ids(kRows), blocks(kRows * 4), counts(kRows);
  std::vector<float> per_head(4, 0.1f);
  for (size_t i = 0; i < row_ids.size(); ++i) row_ids[i] = static_cast<int32_t>(i);
  const std::vector<ExpertRun> runs = {{gate_up.tensor.data(), down.tensor.data(), 0, 3},
                                       {gate_up.tensor.data(), down.tensor.data(), 3, 37}};
  SwigluExpertsArgs experts;
  experts.x = x.tensor;
  experts.out = out.tensor;
  experts.runs = runs;
  experts.rows = row_ids;
  experts.out_rows = row_ids;
  experts.intermediate = kInter;
  GatedDeltaArgs delta;
  delta.qkv = qkv.tensor;
  delta.a = delta.b = gates.tensor;
  delta.a_log = delta.dt_bias = Tensor(per_head.data(), DType::f32, {4});
  delta.state = state.tensor.reshaped({4, 64, 64});
  delta.out = out.tensor;
  delta.key_heads = 4;
  delta.chunk_rows = 16;
  AttentionArgs attention;
  attention.q = x.tensor.split_last(64);
  attention.k = attention.v = cache.tensor.split_last(64).narrow(1, 0, 2);
  attention.out = out.tensor.split_last(64);
  attention.scale = 0.125f;
  const BlockTopkArgs topk{logits.tensor, Tensor(blocks.data(), DType::i32, {kRows, 4}),
                           Tensor(counts.data(), DType::i32, {kRows}), 20, 1};
  const RouterTopkArgs router{logits.tensor, Tensor(ids.data(), DType::i32, {kRows, 4}), weights.tensor};
  const LinearArgs linear{x.tensor, square.tensor, out.tensor};

  for (const int threads : {1, 2}) {
    CpuOps ops({.threads = threads});
    const auto all = [&] {
      ops(linear);
      ops(LinearArgs{x.tensor.narrow(0, 0, 2), square.tensor, out.tensor.narrow(0, 0, 2)});
      ops(experts);
      ops(delta);
      ops(attention);
      ops(topk);
      ops(router);
      ops(AddArgs{x.tensor, x.tensor, out.tensor});
    };
    ops.set_planning(true);
    all();
    ops.set_planning(false);
    std::vector<std::byte> scratch(static_cast<size_t>(ops.scratch_peak_bytes()));
    ops.set_scratch(Tensor(scratch.data(), DType::u8, {ops.scratch_peak_bytes()}));
    all();  // OpenMP makes its team once
    const int64_t before = heap_allocations();
    all();
    CHECK(heap_allocations() == before);
  }
}

TEST_CASE("attention_scratch_grows_with_the_positions_that_are_seen_and_not_with_rows") {
  const auto scratch_of = [](int64_t rows, int64_t positions) {
    AttentionArgs args;
    args.q = args.out = Tensor(nullptr, DType::bf16, {rows, 16, 128});
    args.k = args.v = Tensor(nullptr, DType::bf16, {65536, 2, 128});
    args.first = positions - rows;
    CpuOps ops({.threads = 2});
    ops.set_planning(true);
    ops(args);
    return ops.scratch_peak_bytes();
  };
  CHECK(scratch_of(4096, 32768) == scratch_of(1, 32768));
  CHECK(scratch_of(4096, 32768) <= int64_t{2} * 8 * (32768 + 2 * 128) * 4 + 4096);
}

TEST_CASE("roofs_are_positive") {
  CHECK(cpu::measure_fma_flops_per_s(1, Isa::portable) > 1e6);
}

}  // namespace offload::cpu_ops_test
