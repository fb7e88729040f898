// The two canonical kernels of a gated FFN over runs of up to kCanonicalRowsMax rows, for any source of the runs.
//
// A source of runs is a kernel argument with size(), at(run) and mark(run), which the first thread of a run calls once.
// kAllCounts: worth kernels for 2 and 4 rows.
#ifndef OFFLOAD_CUDA_EXPERTS_CUH_
#define OFFLOAD_CUDA_EXPERTS_CUH_

#include "cuda/canonical.cuh"
#include "cuda/gemm.cuh"

namespace offload::cuda {

struct CanonicalRun {
  const void* gate_up = nullptr;
  const void* down = nullptr;
  const int32_t* x_rows = nullptr;    // null: every row is `row` of x
  const int32_t* out_rows = nullptr;  // null: h_row + m
  int32_t row = 0;
  int32_t h_row = 0;  // of the intermediate rows
  int32_t count = 0;  // 0: nothing to do

  __device__ int64_t x_row(int m) const { return x_rows == nullptr ? row : x_rows[m]; }
  __device__ int64_t out_row(int m) const { return out_rows == nullptr ? h_row + m : out_rows[m]; }
};

// Calls function(run) for the runs of this row of blocks: one, or several where the device alone knows how many there
// are. REQUIRES: one where the threads of a block wait for each other.
template <typename Runs, typename Function>
__device__ inline void for_each_run(const Runs& runs, const Function& function) {
  for (int run = static_cast<int>(blockIdx.y); run < runs.size(); run += static_cast<int>(gridDim.y)) function(run);
}

// Calls function(std::integral_constant) with a number of rows that holds `count`: of kRows' a run may use fewer.
template <int kRows, typename Function>
__device__ inline void with_rows_of(int count, const Function& function) {
  if constexpr (kRows == 8) {
    if (count <= 2) return function(std::integral_constant<int, 2>{});
    if (count <= 4) return function(std::integral_constant<int, 4>{});
  }
  function(std::integral_constant<int, kRows>{});
}

// Warps of a multiprocessor that the kernels below have there for single rows, at most.
constexpr int kUpWarps = 16, kDownWarps = 28;

// Groups of kRowLanes in a block.
__device__ inline int block_groups() {
  return static_cast<int>(blockDim.x) / kRowLanes;
}
// The first column of this group, which has `turns` of them.
__device__ inline int first_column(int turns) {
  return static_cast<int>(blockIdx.x) * block_groups() * turns + static_cast<int>(threadIdx.x) / kRowLanes;
}

// h [rows][inter] F32 = swiglu, values of type TX. Grid (inter / columns of a block, runs or fewer); a group of lanes
// has `turns` columns if kRows is 1, else one. Shared memory: x, if kRows is 1.
template <bool kVector, int kRows, typename TX, typename TW, typename Runs>
__global__ void __launch_bounds__(kCanonicalThreads)
    canonical_swiglu_kernel(const __grid_constant__ Runs runs, const TX* x, int64_t x_stride, int64_t inter,
                            int64_t hidden, int turns, Rounding rounding, float* h) {
  after_previous();
  for_each_run(runs, [&](int i) {
    const CanonicalRun run = runs.at(i);
    if (blockIdx.x == 0 && threadIdx.x == 0) runs.mark(i);
    if (run.count == 0) return;
    const auto* gate = static_cast<const TW*>(run.gate_up);
    const TW* up = gate + inter * hidden;
    const auto value = [&](const float(&sums)[2]) {
      TX rounded;
      store_float(&rounded, swiglu_of<TX>(sums[0], sums[1], rounding));
      return load_float(&rounded);
    };
    if constexpr (kRows == 1) {
      extern __shared__ uint4 shared[];
      const RowTurns<2, TW> rows{.w = {gate, up},
                                 .rows = static_cast<int>(inter),
                                 .first = first_column(turns),
                                 .step = block_groups(),
                                 .turns = turns};
      RowSums<2, 4, TX, TW> row(rows, static_cast<int>(hidden));
      auto* staged = reinterpret_cast<TX*>(shared);
      stage_row(x + run.x_row(0) * x_stride, static_cast<int>(hidden), staged);
      row.finish(staged, [&](int column, const float(&sums)[2]) {
        if (column < inter && threadIdx.x % kRowLanes == 0) h[run.h_row * inter + column] = value(sums);
      });
    } else {
      const int64_t column = first_column(1), at = min(column, inter - 1) * hidden;
      const TW* ws[2] = {gate + at, up + at};
      float sums[kRows][2];
      with_rows_of<kRows>(run.count, [&](auto rows) {
        constexpr int kRun = decltype(rows)::value;
        const TX* xs[kRun];
#pragma unroll
        for (int m = 0; m < kRun; ++m) xs[m] = x + run.x_row(min(m, run.count - 1)) * x_stride;
        float own[kRun][2];
        canonical_sums<kVector, kRun, 2, 2>(xs, ws, hidden, own);
#pragma unroll
        for (int m = 0; m < kRun; ++m) sums[m][0] = own[m][0], sums[m][1] = own[m][1];
      });
      const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
      if (column >= inter || lane >= run.count) return;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const float own = value(sums[m]);
        if (m == lane) h[(run.h_row + m) * inter + column] = own;
      }
    }
  });
}

// out[out rows] = h down^T. Grid and turns as above. Shared memory: h, if kRows is 1.
template <bool kVector, int kRows, typename TW, typename TOut, typename Runs>
__global__ void __launch_bounds__(kCanonicalThreads, kRows == 1 ? kDownWarps * kWarp / kCanonicalThreads : 1)
    canonical_down_kernel(const __grid_constant__ Runs runs, const float* h, int64_t inter, int64_t hidden, int turns,
                          TOut* out, int64_t out_stride) {
  if constexpr (kRows > 1) after_previous();
  for_each_run(runs, [&](int i) {
    const CanonicalRun run = runs.at(i);
    if (run.count == 0) return;
    const auto* w = static_cast<const TW*>(run.down);
    if constexpr (kRows == 1) {
      extern __shared__ uint4 shared[];
      const RowTurns<1, TW> rows{.w = {w},
                                 .rows = static_cast<int>(hidden),
                                 .first = first_column(turns),
                                 .step = block_groups(),
                                 .turns = turns};
      RowSums<1, 5, float, TW> row(rows, static_cast<int>(inter));
      after_previous();  // which made h; what the runs are was known before
      auto* staged = reinterpret_cast<float*>(shared);
      stage_row(h + run.h_row * inter, static_cast<int>(inter), staged);
      row.finish(staged, [&](int column, const float(&sums)[1]) {
        if (column < hidden && threadIdx.x % kRowLanes == 0)
          store_float(out + run.out_row(0) * out_stride + column, sums[0]);
      });
    } else {
      const int64_t column = first_column(1);
      const TW* ws[1] = {w + min(column, hidden - 1) * inter};
      float sums[kRows][1];
      with_rows_of<kRows>(run.count, [&](auto rows) {
        constexpr int kRun = decltype(rows)::value;
        const float* hs[kRun];
#pragma unroll
        for (int m = 0; m < kRun; ++m) hs[m] = h + (run.h_row + min(m, run.count - 1)) * inter;
        float own[kRun][1];
        canonical_sums<kVector, kRun, 1, 4>(hs, ws, inter, own);
#pragma unroll
        for (int m = 0; m < kRun; ++m) sums[m][0] = own[m][0];
      });
      const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
      if (column >= hidden || lane >= run.count) return;
#pragma unroll
      for (int m = 0; m < kRows; ++m)
        if (m == lane) store_float(out + run.out_row(m) * out_stride + column, sums[m][0]);
    }
  });
  if constexpr (kRows == 1) after_previous();  // also where a block has no run
}

struct ExpertShapes {
  const Tensor& x;    // [*, hidden]
  const Tensor& out;  // [*, hidden]
  int64_t intermediate = 0;
  DType weights = DType::bf16;
  int multiprocessors = 1;
};

// Both kernels for `count` runs, or so many at a time, of at most `rows_most` rows; h: F32 [h rows, intermediate].
template <typename Runs>
void launch_canonical(const Runs& runs, int64_t count, int64_t rows_most, const ExpertShapes& shapes, Rounding rounding,
                      bool aligned, float* h, const Queue& queue) {
  const int64_t hidden = shapes.x.dim(1), inter = shapes.intermediate;
  const auto run_count = static_cast<unsigned>(count);
  const auto go = [&](auto vector, auto rows, auto tx, auto tw) {
    constexpr bool kVector = decltype(vector)::value;
    constexpr int kRows = decltype(rows)::value;
    using TX = decltype(tx);
    using TW = decltype(tw);
    const int up_threads = canonical_threads(inter * count), down_threads = canonical_threads(hidden * count);
    const auto turns = [&](int64_t columns, int warps) {
      return kRows == 1 ? row_turns(columns, count, warps, shapes.multiprocessors) : 1;
    };
    const int up_turns = turns(inter, kUpWarps), down_turns = turns(hidden, kDownWarps);
    launch_early(canonical_swiglu_kernel<kVector, kRows, TX, TW, Runs>,
                 dim3(blocks_for(inter, int64_t{up_threads} / kRowLanes * up_turns), run_count),
                 static_cast<unsigned>(up_threads), kRows == 1 ? staged_row_bytes<TX>(hidden) : 0, queue, runs,
                 data_of<const TX>(shapes.x), shapes.x.stride(0), inter, hidden, up_turns, rounding, h);
    with_float_type(shapes.out.dtype(), [&](auto out) {
      using TOut = decltype(out);
      launch_early(canonical_down_kernel<kVector, kRows, TW, TOut, Runs>,
                   dim3(blocks_for(hidden, int64_t{down_threads} / kRowLanes * down_turns), run_count),
                   static_cast<unsigned>(down_threads), kRows == 1 ? staged_row_bytes<float>(inter) : 0, queue, runs, h,
                   inter, hidden, down_turns, data_of<TOut>(shapes.out), shapes.out.stride(0));
    });
  };
  with_float_type(shapes.x.dtype(), [&](auto tx) {
    with_float_type(shapes.weights, [&](auto tw) {
      using TX = decltype(tx);
      const bool fits =
          staged_row_bytes<TX>(hidden) <= kStagedBytesMost && staged_row_bytes<float>(inter) <= kStagedBytesMost;
      if (aligned && rows_most == 1 && fits) return go(std::true_type{}, std::integral_constant<int, 1>{}, tx, tw);
      with_canonical_shape<Runs::kAllCounts && is_bf16_product<TX, decltype(tw)>()>(
          aligned, rows_most, [&](auto vector, auto rows) { go(vector, rows, tx, tw); });
    });
  });
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_EXPERTS_CUH_
