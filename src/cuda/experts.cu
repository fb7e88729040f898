// swiglu_experts: gated FFNs of gathered rows, one weight pair per run of rows.
//
// Runs of up to canonical_run_rows() rows: two canonical kernels per batch of runs, whose lists travel as kernel
// arguments. Longer runs: two grouped products per batch; their lists are pulled from page-locked memory. The
// intermediate rows of all runs lie one run after another in scratch.
#include <algorithm>
#include <vector>

#include "cuda/cuda_ops.h"
#include "cuda/experts.cuh"
#include "cuda/gemm_launch.h"

namespace offload::cuda {
namespace {

// --- canonical ---

constexpr int kBatchRuns = 48;
constexpr int kBatchRows = 96;

// Up to kBatchRuns runs with kBatchRows rows in all; an argument of kernels, so below 4 KiB.
struct CanonicalBatch {
  static constexpr bool kAllCounts = true;
  const void* gate_up[kBatchRuns];
  const void* down[kBatchRuns];
  int32_t x_rows[kBatchRows], out_rows[kBatchRows];
  int16_t first[kBatchRuns + 1];  // of each run in the lists above
  int16_t runs;

  __device__ int size() const { return runs; }
  __device__ CanonicalRun at(int run) const {
    return {.gate_up = gate_up[run],
            .down = down[run],
            .x_rows = x_rows + first[run],
            .out_rows = out_rows + first[run],
            .h_row = first[run],
            .count = first[run + 1] - first[run]};
  }
  __device__ void mark(int) const {}
};

bool is_aligned(const void* data, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}

bool inputs_aligned(const SwigluExpertsArgs& a) {
  const int64_t hidden = a.x.dim(1);
  bool aligned =
      is_aligned(a.x.data(), a.x.stride(0) * dtype_bytes(a.x.dtype())) && hidden % 8 == 0 && a.intermediate % 8 == 0;
  for (const ExpertRun& run : a.runs) aligned = aligned && is_aligned(run.gate_up, 0) && is_aligned(run.down, 0);
  return aligned;
}

// The most rows that a run of the batch has.
int rows_most(const CanonicalBatch& batch) {
  int most = 0;
  for (int run = 0; run < batch.runs; ++run) most = std::max(most, batch.first[run + 1] - batch.first[run]);
  return most;
}

void run_canonical(const SwigluExpertsArgs& a, const CanonicalBatch& batch, bool aligned, int multiprocessors, float* h,
                   const Queue& queue) {
  const ExpertShapes shapes{.x = a.x,
                            .out = a.out,
                            .intermediate = a.intermediate,
                            .weights = a.weight_dtype,
                            .multiprocessors = multiprocessors};
  launch_canonical(batch, batch.runs, rows_most(batch), shapes, a.rounding, aligned, h, queue);
}

// The runs of up to `rows_canonical` rows, in batches.
void run_short(const SwigluExpertsArgs& a, int64_t rows_canonical, bool aligned, int multiprocessors, float* h,
               const Queue& queue) {
  const auto rows_max = std::min<int64_t>(static_cast<int64_t>(a.rows.size()), kBatchRows);
  CanonicalBatch batch;
  batch.runs = batch.first[0] = 0;
  const auto flush = [&] {
    if (batch.runs > 0) run_canonical(a, batch, aligned, multiprocessors, h, queue);
    batch.runs = 0;
  };
  for (const ExpertRun& run : a.runs) {
    if (run.count == 0 || run.count > rows_canonical) continue;
    if (batch.runs == kBatchRuns || batch.first[batch.runs] + run.count > rows_max) flush();
    const int first = batch.first[batch.runs];
    batch.gate_up[batch.runs] = run.gate_up;
    batch.down[batch.runs] = run.down;
    for (int64_t i = 0; i < run.count; ++i) {
      batch.x_rows[first + i] = a.rows[static_cast<size_t>(run.begin + i)];
      batch.out_rows[first + i] = a.out_rows[static_cast<size_t>(run.begin + i)];
    }
    batch.first[++batch.runs] = static_cast<int16_t>(first + run.count);
  }
  flush();
}

// --- grouped products ---

constexpr int64_t kGemmBatchRuns = 256;

// The lists of one batch in one block: gate_up runs, down runs, x rows, out rows, tiles. The device has a copy with the
// same offsets.
struct GemmLists {
  int64_t runs = 0, rows = 0, tiles = 0;

  int64_t bytes() const { return runs_bytes() + 2 * 4 * rows + tiles * static_cast<int64_t>(sizeof(GemmTile)); }
  GemmRun* gate_up(std::byte* block) const { return reinterpret_cast<GemmRun*>(block); }
  GemmRun* down(std::byte* block) const { return gate_up(block) + runs; }
  int32_t* x_rows(std::byte* block) const { return reinterpret_cast<int32_t*>(block + runs_bytes()); }
  int32_t* out_rows(std::byte* block) const { return x_rows(block) + rows; }
  GemmTile* tile_list(std::byte* block) const { return reinterpret_cast<GemmTile*>(out_rows(block) + rows); }

 private:
  int64_t runs_bytes() const { return 2 * runs * static_cast<int64_t>(sizeof(GemmRun)); }
};

int64_t tiles_of(int64_t rows, int64_t tile_rows) {
  return (rows + tile_rows - 1) / tile_rows;
}

// Of runs of more than kCanonicalRowsMax rows.
Math math_of(const SwigluExpertsArgs& a) {
  return product_math(a.math, a.x.dtype(), a.weight_dtype, kCanonicalRowsMax + 1);
}

// What one batch of long runs needs on the device: room for any mix of runs of so many rows in all.
struct GemmScratch {
  Tensor lists, h, x_scaled, x_exponents, h_exponents, gate_up_exponents, down_exponents;

  GemmScratch(Arena& arena, const SwigluExpertsArgs& a, int64_t rows, GemmKernel kernel) {
    const GemmLists most{kGemmBatchRuns, rows, kGemmBatchRuns + rows / 64};
    lists = arena.take(DType::u8, {most.bytes()});
    h = arena.take(a.x.dtype(), {rows, a.intermediate});
    if (prepares_x(kernel, math_of(a))) {
      x_exponents = arena.take(DType::i32, {a.x.dim(0)});
      h_exponents = arena.take(DType::i32, {rows});
    }
    if (kernel == GemmKernel::mma_scaled) x_scaled = arena.take(DType::f16, {std::min(rows, a.x.dim(0)), a.x.dim(1)});
    if (!needs_exponents(kernel, math_of(a))) return;
    gate_up_exponents = arena.take(DType::i32, {kGemmBatchRuns, 2 * a.intermediate});
    down_exponents = arena.take(DType::i32, {kGemmBatchRuns, a.x.dim(1)});
  }
};

GemmKernel kernel_of(const SwigluExpertsArgs& a, bool aligned, const DeviceCaps& caps) {
  return plan_gemm({.m = kCanonicalRowsMax + 1,
                    .n = a.intermediate,
                    .k = a.x.dim(1),
                    .x = a.x.dtype(),
                    .w = a.weight_dtype,
                    .out = a.out.dtype(),
                    .math = math_of(a),
                    .aligned = aligned,
                    .grouped = true},
                   caps);
}

// The runs of `batch` into `block`, and as many scaled weights as they have.
GemmLists fill_lists(const SwigluExpertsArgs& a, std::span<const ExpertRun> batch, int64_t rows_canonical,
                     int64_t tile_rows, const GemmScratch& scratch, std::vector<std::byte>& block) {
  GemmLists lists;
  for (const ExpertRun& run : batch) {
    if (run.count <= rows_canonical) continue;
    ++lists.runs;
    lists.rows += run.count;
    lists.tiles += tiles_of(run.count, tile_rows);
  }
  OFL_ASSERT(lists.bytes() <= scratch.lists.bytes());
  if (static_cast<int64_t>(block.size()) < lists.bytes()) block.resize(static_cast<size_t>(lists.bytes()));
  std::byte* to = block.data();
  int32_t index = 0, row = 0;
  GemmTile* tile = lists.tile_list(to);
  for (const ExpertRun& run : batch) {
    if (run.count <= rows_canonical) continue;
    const auto count = static_cast<int32_t>(run.count);
    GemmRun& gate_up = lists.gate_up(to)[index];
    GemmRun& down = lists.down(to)[index];
    gate_up = {.w = run.gate_up, .w_exponents = nullptr, .first = row, .count = count};
    down = {.w = run.down, .w_exponents = nullptr, .first = row, .count = count};
    if (scratch.gate_up_exponents) {
      gate_up.w_exponents = scratch.gate_up_exponents.row<int32_t>(index);
      down.w_exponents = scratch.down_exponents.row<int32_t>(index);
    }
    std::copy_n(a.rows.data() + run.begin, run.count, lists.x_rows(to) + row);
    std::copy_n(a.out_rows.data() + run.begin, run.count, lists.out_rows(to) + row);
    for (int64_t at = 0; at < run.count; at += tile_rows) *tile++ = {index, static_cast<int32_t>(at)};
    ++index;
    row += count;
  }
  return lists;
}

void run_grouped(const SwigluExpertsArgs& a, GemmKernel kernel, const GemmLists& lists, const GemmTileShape& shape,
                 const GemmScratch& scratch, cudaStream_t stream) {
  const int64_t hidden = a.x.dim(1), inter = a.intermediate;
  auto* block = data_of<std::byte>(scratch.lists);
  GroupedGemm p{.x = a.x.data(),
                .x_stride = a.x.stride(0),
                .x_rows = lists.x_rows(block),
                .runs = lists.gate_up(block),
                .tiles = lists.tile_list(block),
                .n = inter,
                .k = hidden,
                .out = scratch.h.data(),
                .out_stride = inter,
                .rounding = a.rounding,
                .math = math_of(a)};
  const bool converts = needs_exponents(kernel, p.math);
  prepare_x(p, kernel, a.x.dim(0), lists.rows, data_of<int32_t>(scratch.x_exponents), data_of<void>(scratch.x_scaled),
            stream);
  if (converts) {
    launch_run_exponents(p.runs, lists.runs, 2 * inter, hidden, p.math, scratch.gate_up_exponents.as<int32_t>(),
                         2 * inter, stream);
  }
  launch_grouped(p, kernel, {a.x.dtype(), a.weight_dtype, a.x.dtype(), true}, lists.tiles, shape, stream);

  p.x = scratch.h.data();
  p.x_stride = p.k = inter;
  p.x_rows = nullptr;
  p.runs = lists.down(block);
  p.n = hidden;
  p.out = a.out.data();
  p.out_stride = a.out.stride(0);
  p.out_rows = lists.out_rows(block);
  prepare_x(p, kernel, lists.rows, lists.rows, data_of<int32_t>(scratch.h_exponents), scratch.h.data(), stream);
  if (converts) {
    launch_run_exponents(p.runs, lists.runs, hidden, inter, p.math, scratch.down_exponents.as<int32_t>(), hidden,
                         stream);
  }
  launch_grouped(p, kernel, {a.x.dtype(), a.weight_dtype, a.out.dtype(), false}, lists.tiles, shape, stream);
}

}  // namespace

int64_t CudaOps::scratch_bytes(const SwigluExpertsArgs& a) const {
  const auto rows = static_cast<int64_t>(a.rows.size());
  Arena arena;
  arena.take(DType::f32, {std::min<int64_t>(rows, kBatchRows), a.intermediate});
  if (a.x.dim(0) > kCanonicalRowsMax || rows > kCanonicalRowsMax) {
    // The plan does not know the pointers: whichever kernel needs more.
    for (const bool aligned : {false, true}) {
      const ArenaScope scope(arena);
      GemmScratch(arena, a, rows, kernel_of(a, aligned, caps_));
    }
  }
  return arena.peak_bytes();
}

void CudaOps::execute(const SwigluExpertsArgs& a) {
  const auto rows = static_cast<int64_t>(a.rows.size());
  if (rows == 0 || a.runs.empty()) return;
  const bool aligned = inputs_aligned(a);
  Arena arena = scratch_arena();
  auto* h = static_cast<float*>(arena.take(DType::f32, {std::min<int64_t>(rows, kBatchRows), a.intermediate}).data());
  const GemmKernel kernel = kernel_of(a, aligned, caps_);
  const int64_t rows_canonical = canonical_run_rows(kernel, math_of(a), a.x.dim(0));
  run_short(a, rows_canonical, aligned, caps_.multiprocessors, h, stream_);
  if (std::none_of(a.runs.begin(), a.runs.end(), [&](const ExpertRun& run) { return run.count > rows_canonical; }))
    return;

  const GemmScratch scratch(arena, a, rows, kernel);
  for (size_t begin = 0; begin < a.runs.size();) {
    int64_t batch_runs = 0, batch_rows = 0;  // of long runs; runs may overlap, so their rows are bounded by scratch
    size_t end = begin;
    for (; end < a.runs.size(); ++end) {
      if (a.runs[end].count <= rows_canonical) continue;
      if (batch_runs == kGemmBatchRuns || batch_rows + a.runs[end].count > rows) break;
      ++batch_runs;
      batch_rows += a.runs[end].count;
    }
    if (batch_runs > 0) {
      const GemmTileShape shape = plan_tile(kernel, batch_rows / batch_runs, caps_);
      const GemmLists lists =
          fill_lists(a, a.runs.subspan(begin, end - begin), rows_canonical, shape.rows, scratch, lists_);
      staging_.pull_in(std::span(lists_).first(static_cast<size_t>(lists.bytes())), scratch.lists.data(), stream_);
      run_grouped(a, kernel, lists, shape, scratch, stream_);
    }
    begin = end;
  }
}

}  // namespace offload::cuda
