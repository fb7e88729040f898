// linear: the canonical product for up to kCanonicalRowsMax rows, else what plan_gemm() chooses.
#include "cuda/blas.h"
#include "cuda/canonical.cuh"
#include "cuda/cuda_ops.h"
#include "cuda/gemm.cuh"
#include "cuda/gemm_launch.h"

namespace offload::cuda {
namespace {

// FP32 sums that blas_scaled leaves behind before they are unscaled, at most.
constexpr int64_t kSumsBytes = int64_t{64} << 20;

// --- canonical ---

// Up to here a warp per column serves one row of x better than eight lanes; and up to where small blocks that have all
// of a row under way at once do better than many warps of short rounds, whose additions hide each other's loads.
constexpr int64_t kNarrowColumns = 4096, kPairedColumns = 1024;
// Of narrow_linear_kernel: warps of a block, 16-byte loads of w that a lane has under way, blocks of a multiprocessor.
struct Paired {
  static constexpr int kWarps = 2, kLoads = 16, kBlocks = 10;
};
struct Narrow {
  static constexpr int kWarps = 8, kLoads = 6, kBlocks = 3;
};
template <typename Shape>
constexpr int64_t narrow_bytes(int64_t k) {  // of shared memory: x, then each warp's
  return staged_row_bytes<bf16>(k) + Shape::kWarps * kNarrowWarpBytes<Shape::kLoads>;
}
// Blocks of 64 elements of w that a lane has in each of its two batches.
constexpr int kLinearDepth = 8;
constexpr int kLinearWarps = 16;  // of a multiprocessor at once

// out[column] for `turns` columns of each group of eight lanes. Grid (n / columns of a block); shared memory: x.
template <typename TX, typename TW, typename TOut>
__global__ void __launch_bounds__(kCanonicalThreads,
                                  is_bf16_product<TX, TW>() ? kLinearWarps* kWarp / kCanonicalThreads : 1)
    row_linear_kernel(const TX* x, const TW* w, int n, int k, int turns, TOut* out) {
  extern __shared__ uint4 shared[];
  const int groups = static_cast<int>(blockDim.x) / kRowLanes;
  const int first = static_cast<int>(blockIdx.x) * groups * turns + static_cast<int>(threadIdx.x) / kRowLanes;
  RowSums<1, kLinearDepth, TX, TW> row({.w = {w}, .rows = n, .first = first, .step = groups, .turns = turns}, k);
  auto* staged = reinterpret_cast<TX*>(shared);
  after_previous();
  stage_row(x, k, staged);
  row.finish(staged, [&](int column, const float(&sums)[1]) {
    if (column < n && threadIdx.x % kRowLanes == 0) store_float(out + column, sums[0]);
  });
}

// out[column] for the column of each warp. Grid (n / warps); shared memory: narrow_bytes().
template <typename Shape, typename TOut>
__global__ void __launch_bounds__(Shape::kWarps* kWarp, Shape::kBlocks)
    narrow_linear_kernel(const bf16* x, const bf16* w, int n, int k, TOut* out) {
  extern __shared__ uint4 shared[];
  constexpr int kLoads = Shape::kLoads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int column = static_cast<int>(blockIdx.x) * Shape::kWarps + warp;
  auto* staged = reinterpret_cast<bf16*>(shared);
  bf16* own = staged + staged_row_bytes<bf16>(k) / 2 + warp * kNarrowRound<kLoads>;
  const float sum = narrow_sum<kLoads>(w + int64_t{min(column, n - 1)} * k, k, staged, own, [&] {
    after_previous();
    stage_narrow_row(x, k, staged);
  });
  if (column < n && threadIdx.x % kWarp == 0) store_float(out + column, sum);
}

// out[m][column] for the column of each group of eight lanes; grid (columns / (blockDim.x / kRowLanes)).
template <bool kVector, int kRows, typename TX, typename TW, typename TOut>
__global__ void __launch_bounds__(kCanonicalThreads)
    canonical_linear_kernel(const TX* x, int64_t x_stride, int rows, const TW* w, int64_t n, int64_t k, TOut* out,
                            int64_t out_stride) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kRowLanes;
  const TX* xs[kRows];
#pragma unroll
  for (int m = 0; m < kRows; ++m) xs[m] = x + min(m, rows - 1) * x_stride;
  const TW* ws[1] = {w + min(column, n - 1) * k};
  float sums[kRows][1];
  canonical_sums<kVector, kRows, 1, kRows == 2 ? 8 : 4>(xs, ws, k, sums);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  if (column >= n || lane >= rows) return;
#pragma unroll
  for (int m = 0; m < kRows; ++m)
    if (m == lane) store_float(out + m * out_stride + column, sums[m][0]);
}

bool rows_aligned(const Tensor& t) {
  const int64_t bytes = dtype_bytes(t.dtype());
  return reinterpret_cast<uintptr_t>(t.data()) % 16 == 0 && t.stride(0) * bytes % 16 == 0 && t.dim(1) % 8 == 0;
}
bool inputs_aligned(const LinearArgs& a) {
  return rows_aligned(a.x) && rows_aligned(a.w);
}

// One row of x.
template <typename TX, typename TW, typename TOut>
void row_linear(const LinearArgs& a, int multiprocessors, const Queue& queue) {
  const auto n = static_cast<int>(a.w.dim(0)), k = static_cast<int>(a.x.dim(1));
  if constexpr (is_bf16_product<TX, TW>()) {
    const auto narrow = [&](auto shape) {
      using Shape = decltype(shape);
      launch_early(narrow_linear_kernel<Shape, TOut>, blocks_for(n, Shape::kWarps), Shape::kWarps * kWarp,
                   narrow_bytes<Shape>(k), queue, data_of<const bf16>(a.x), data_of<const bf16>(a.w), n, k,
                   data_of<TOut>(a.out));
    };
    if (n <= kPairedColumns) return narrow(Paired{});
    // Eight warps' memory beside a long x would leave a Turing multiprocessor no room.
    if (n <= kNarrowColumns && narrow_bytes<Narrow>(k) <= (64 << 10)) return narrow(Narrow{});
  }
  const int threads = canonical_threads(n), turns = row_turns(n, 1, kLinearWarps, multiprocessors);
  launch_early(row_linear_kernel<TX, TW, TOut>, blocks_for(n, int64_t{threads} / kRowLanes * turns),
               static_cast<unsigned>(threads), staged_row_bytes<TX>(k), queue, data_of<const TX>(a.x),
               data_of<const TW>(a.w), n, k, turns, data_of<TOut>(a.out));
}

void canonical_linear(const LinearArgs& a, int multiprocessors, const Queue& queue) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  const int threads = canonical_threads(n);
  const bool aligned = inputs_aligned(a);
  const auto with_types = [&](auto tx, auto tw, auto out) {
    using TX = decltype(tx);
    using TW = decltype(tw);
    using TOut = decltype(out);
    if (aligned && m == 1 && staged_row_bytes<TX>(k) <= kStagedBytesMost)
      return row_linear<TX, TW, TOut>(a, multiprocessors, queue);
    with_canonical_shape<is_bf16_product<TX, TW>()>(aligned, m, [&](auto vector, auto rows) {
      launch(canonical_linear_kernel<decltype(vector)::value, decltype(rows)::value, TX, TW, TOut>,
             blocks_for(n, threads / kRowLanes), static_cast<unsigned>(threads), 0, queue, data_of<const TX>(a.x),
             a.x.stride(0), static_cast<int>(m), data_of<const TW>(a.w), n, k, data_of<TOut>(a.out), a.out.stride(0));
    });
  };
  with_float_type(a.x.dtype(), [&](auto tx) {
    with_float_type(a.w.dtype(), [&](auto tw) {
      if (a.out.dtype() == DType::f32)
        with_types(tx, tw, float{});
      else
        with_types(tx, tw, tx);
    });
  });
}

Math math_of(const LinearArgs& a) {
  return product_math(a.math, a.x.dtype(), a.w.dtype(), a.x.dim(0));
}

GemmKernel kernel_of(const LinearArgs& a, bool aligned, const DeviceCaps& caps) {
  return plan_gemm({.m = a.x.dim(0),
                    .n = a.w.dim(0),
                    .k = a.x.dim(1),
                    .x = a.x.dtype(),
                    .w = a.w.dtype(),
                    .out = a.out.dtype(),
                    .math = math_of(a),
                    .aligned = aligned},
                   caps);
}

// --- own tiles: one run of all rows ---

// Up to so many columns, the smallest tile wastes least.
constexpr int64_t kSlimColumns = 64;

GemmTileShape tile_of(const LinearArgs& a, GemmKernel kernel, const DeviceCaps& caps) {
  if (kernel == GemmKernel::mma_scaled) return kScaledAlone;
  return a.w.dim(0) <= kSlimColumns ? GemmTileShape{} : plan_tile(kernel, a.x.dim(0), caps);
}

struct TileScratch {
  Tensor run, tiles, x_scaled, x_exponents, w_exponents;
  GemmTileShape shape;
  int64_t count = 0;

  TileScratch(Arena& arena, const LinearArgs& a, GemmKernel kernel, const DeviceCaps& caps)
      : shape(tile_of(a, kernel, caps)) {
    const int64_t m = a.x.dim(0);
    count = (m + shape.rows - 1) / shape.rows;
    run = arena.take(DType::u8, {static_cast<int64_t>(sizeof(GemmRun))});
    tiles = arena.take(DType::u8, {count * static_cast<int64_t>(sizeof(GemmTile))});
    if (prepares_x(kernel, math_of(a))) x_exponents = arena.take(DType::i32, {m});
    if (kernel == GemmKernel::mma_scaled) x_scaled = arena.take(DType::f16, {m, a.x.dim(1)});
    if (needs_exponents(kernel, math_of(a))) w_exponents = arena.take(DType::i32, {a.w.dim(0)});
  }
};

// One thread per tile.
__global__ void one_run_kernel(GemmRun run, GemmRun* out, GemmTile* tiles, int count, int tile_rows) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i == 0) *out = run;
  if (i < count) tiles[i] = {0, i * tile_rows};
}

void tiled_linear(const LinearArgs& a, GemmKernel kernel, const TileScratch& scratch, cudaStream_t stream) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  GemmRun run{.w = a.w.data(), .w_exponents = nullptr, .first = 0, .count = static_cast<int32_t>(m)};
  const Math math = math_of(a);
  if (needs_exponents(kernel, math)) {
    launch_row_exponents(a.w.data(), k, n, k, math, scratch.w_exponents.as<int32_t>(), stream);
    run.w_exponents = scratch.w_exponents.as<int32_t>();
  }
  auto* runs = data_of<GemmRun>(scratch.run);
  auto* tiles = data_of<GemmTile>(scratch.tiles);
  launch(one_run_kernel, blocks_for(scratch.count, 256), 256, 0, stream, run, runs, tiles,
         static_cast<int>(scratch.count), static_cast<int>(scratch.shape.rows));
  GroupedGemm p{.x = a.x.data(),
                .x_stride = a.x.stride(0),
                .runs = runs,
                .tiles = tiles,
                .n = n,
                .k = k,
                .out = a.out.data(),
                .out_stride = a.out.stride(0),
                .math = math};
  prepare_x(p, kernel, m, m, data_of<int32_t>(scratch.x_exponents), data_of<void>(scratch.x_scaled), stream);
  launch_grouped(p, kernel, {a.x.dtype(), a.w.dtype(), a.out.dtype()}, scratch.count, scratch.shape, stream);
}

// --- cuBLAS ---

struct BlasScaledScratch {
  Tensor x, w, x_exponents, w_exponents, sums;
  int64_t rows = 0;  // of x at a time

  BlasScaledScratch(Arena& arena, const LinearArgs& a) {
    const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
    rows = std::min(m, std::max<int64_t>(kBlasScaledRowsMin, kSumsBytes / (4 * n) / 128 * 128));
    x = arena.take(DType::f16, {rows, k});
    w = arena.take(DType::f16, {n, k});
    x_exponents = arena.take(DType::i32, {rows});
    w_exponents = arena.take(DType::i32, {n});
    sums = arena.take(DType::f32, {rows, n});
  }
};

// out [m, n] of `out_type` = x [m, k] w [n, k]^T in `type`, FP32 sums; row-major seen as column-major transposes.
void blas_product(cublasHandle_t blas, int64_t m, int64_t n, int64_t k, cudaDataType type, const void* x,
                  int64_t x_stride, const void* w, void* out, int64_t out_stride, cudaDataType out_type) {
  const float one = 1.0f, zero = 0.0f;
  check_blas(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m), static_cast<int>(k),
                          &one, w, type, static_cast<int>(k), x, type, static_cast<int>(x_stride), &zero, out, out_type,
                          static_cast<int>(out_stride), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
             "a matrix product of cuBLAS");
}

constexpr int64_t kBlasColumns = 8;

LinearArgs columns_of(const LinearArgs& a, int64_t begin, int64_t count) {
  return {a.x, a.w.narrow(0, begin, count), a.out.narrow(1, begin, count)};
}

// How many columns cuBLAS has a fast kernel for: whole vectors. A few left over, as a gate's, are worth a launch.
int64_t columns_for_blas(const LinearArgs& a) {
  const int64_t n = a.w.dim(0), even = n / kBlasColumns * kBlasColumns;
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(a.out.data()) % 16 == 0 && a.out.stride(0) * dtype_bytes(a.out.dtype()) % 16 == 0;
  return even == 0 || !is_aligned ? n : even;
}

void blas_scaled_linear(const LinearArgs& a, cublasHandle_t blas, const BlasScaledScratch& scratch,
                        cudaStream_t stream) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  auto* x_exponents = scratch.x_exponents.as<int32_t>();
  auto* w_exponents = scratch.w_exponents.as<int32_t>();
  launch_scale_rows(a.w.data(), k, nullptr, n, k, a.math, w_exponents, scratch.w.data(), stream);
  for (int64_t first = 0; first < m; first += scratch.rows) {
    const int64_t rows = std::min(scratch.rows, m - first);
    const Tensor x = a.x.narrow(0, first, rows), out = a.out.narrow(0, first, rows);
    launch_scale_rows(x.data(), x.stride(0), nullptr, rows, k, a.math, x_exponents, scratch.x.data(), stream);
    blas_product(blas, rows, n, k, CUDA_R_16F, scratch.x.data(), k, scratch.w.data(), scratch.sums.data(), n,
                 CUDA_R_32F);
    launch_unscale(data_of<const float>(scratch.sums), rows, n, x_exponents, w_exponents, a.math, out.data(),
                   out.stride(0), out.dtype(), stream);
  }
}

}  // namespace

int64_t CudaOps::scratch_bytes(const LinearArgs& a) const {
  if (a.x.dim(0) == 0 || a.w.dim(0) == 0) return 0;
  Arena arena;
  // The plan does not know the pointers: whichever kernel needs more.
  for (const bool aligned : {false, true}) {
    const ArenaScope scope(arena);
    const GemmKernel kernel = kernel_of(a, aligned, caps_);
    if (kernel == GemmKernel::blas_scaled)
      BlasScaledScratch(arena, a);
    else if (kernel == GemmKernel::blas_bf16)
      TileScratch(arena, columns_of(a, 0, std::min<int64_t>(a.w.dim(0), kBlasColumns - 1)), GemmKernel::mma_bf16,
                  caps_);
    else if (kernel != GemmKernel::canonical)
      TileScratch(arena, a, kernel, caps_);
  }
  return arena.peak_bytes();
}

void CudaOps::execute(const LinearArgs& a) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  if (m == 0 || n == 0) return;
  const GemmKernel kernel = kernel_of(a, inputs_aligned(a), caps_);
  Arena arena = scratch_arena();
  switch (kernel) {
    case GemmKernel::canonical:
      return canonical_linear(a, caps_.multiprocessors, stream_);
    case GemmKernel::simt:
    case GemmKernel::mma_bf16:
    case GemmKernel::wgmma_bf16:
    case GemmKernel::mma_scaled:
      return tiled_linear(a, kernel, TileScratch(arena, a, kernel, caps_), stream_);
    case GemmKernel::blas_bf16: {
      const int64_t even = columns_for_blas(a);
      blas_product(blas_, m, even, k, CUDA_R_16BF, a.x.data(), a.x.stride(0), a.w.data(), a.out.data(), a.out.stride(0),
                   a.out.dtype() == DType::f32 ? CUDA_R_32F : CUDA_R_16BF);
      if (even == n) return;
      const LinearArgs rest = columns_of(a, even, n - even);
      return tiled_linear(rest, GemmKernel::mma_bf16, TileScratch(arena, rest, GemmKernel::mma_bf16, caps_), stream_);
    }
    case GemmKernel::blas_scaled:
      return blas_scaled_linear(a, blas_, BlasScaledScratch(arena, a), stream_);
  }
}

}  // namespace offload::cuda
