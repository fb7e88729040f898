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

constexpr int64_t kFewColumnsMax = 1024;

// Blocks of 64 elements under way per lane, for so many rows of x. A product with few columns keeps whole rows of w
// under way, as far as the registers go.
template <int kRows, bool kFewColumns>
constexpr int linear_unroll() {
  return kRows == 1 ? (kFewColumns ? 32 : 10) : kRows == 2 ? 8 : 4;
}

// out[m][column] for the column of each group of eight lanes; grid (columns / (blockDim.x / kRowLanes)).
template <bool kVector, int kRows, bool kFewColumns, typename TX, typename TW, typename TOut>
__global__ void __launch_bounds__(kCanonicalThreads)
    canonical_linear_kernel(const TX* x, int64_t x_stride, int rows, const TW* w, int64_t n, int64_t k, TOut* out,
                            int64_t out_stride) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kRowLanes;
  const TX* xs[kRows];
#pragma unroll
  for (int m = 0; m < kRows; ++m) xs[m] = x + min(m, rows - 1) * x_stride;
  const TW* ws[1] = {w + min(column, n - 1) * k};
  float sums[kRows][1];
  canonical_sums<kVector, kRows, 1, linear_unroll<kRows, kFewColumns>()>(xs, ws, k, sums);
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

void canonical_linear(const LinearArgs& a, cudaStream_t stream) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  const int threads = canonical_threads(n);
  const auto go = [&](auto vector, auto rows, auto few, auto tx, auto tw, auto out) {
    using TX = decltype(tx);
    using TW = decltype(tw);
    using TOut = decltype(out);
    launch(canonical_linear_kernel<decltype(vector)::value, decltype(rows)::value, decltype(few)::value, TX, TW, TOut>,
           blocks_for(n, threads / kRowLanes), static_cast<unsigned>(threads), 0, stream, data_of<const TX>(a.x),
           a.x.stride(0), static_cast<int>(m), data_of<const TW>(a.w), n, k, data_of<TOut>(a.out), a.out.stride(0));
  };
  const bool aligned = rows_aligned(a.x) && rows_aligned(a.w);
  with_float_type(a.x.dtype(), [&](auto tx) {
    with_float_type(a.w.dtype(), [&](auto tw) {
      constexpr bool kAllCounts = is_bf16_product<decltype(tx), decltype(tw)>();
      with_canonical_shape<kAllCounts>(aligned, m, [&](auto vector, auto rows) {
        const auto with_out = [&](auto few) {
          if (a.out.dtype() == DType::f32)
            go(vector, rows, few, tx, tw, float{});
          else
            go(vector, rows, few, tx, tw, tx);
        };
        if constexpr (kAllCounts && decltype(rows)::value == 1) {
          if (n <= kFewColumnsMax) return with_out(std::true_type{});
        }
        with_out(std::false_type{});
      });
    });
  });
}

GemmKernel kernel_of(const LinearArgs& a, const DeviceCaps& caps) {
  return plan_gemm({.m = a.x.dim(0),
                    .n = a.w.dim(0),
                    .k = a.x.dim(1),
                    .x = a.x.dtype(),
                    .w = a.w.dtype(),
                    .out = a.out.dtype(),
                    .aligned = rows_aligned(a.x) && rows_aligned(a.w)},
                   caps);
}

// --- own tiles: one run of all rows ---

struct TileScratch {
  Tensor run, tiles, x_exponents, w_exponents;
  int64_t tile_rows = 0, count = 0;

  TileScratch(Arena& arena, const LinearArgs& a, GemmKernel kernel) {
    const int64_t m = a.x.dim(0);
    tile_rows = tile_rows_of(kernel, m);
    count = (m + tile_rows - 1) / tile_rows;
    run = arena.take(DType::u8, {static_cast<int64_t>(sizeof(GemmRun))});
    tiles = arena.take(DType::u8, {count * static_cast<int64_t>(sizeof(GemmTile))});
    if (kernel != GemmKernel::mma_scaled) return;
    x_exponents = arena.take(DType::i32, {m});
    w_exponents = arena.take(DType::i32, {a.w.dim(0)});
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
  if (kernel == GemmKernel::mma_scaled) {
    launch_row_exponents(a.x.data(), a.x.stride(0), nullptr, m, k, scratch.x_exponents.as<int32_t>(), stream);
    launch_row_exponents(a.w.data(), k, nullptr, n, k, scratch.w_exponents.as<int32_t>(), stream);
    run.w_exponents = scratch.w_exponents.as<int32_t>();
  }
  auto* runs = data_of<GemmRun>(scratch.run);
  auto* tiles = data_of<GemmTile>(scratch.tiles);
  launch(one_run_kernel, blocks_for(scratch.count, 256), 256, 0, stream, run, runs, tiles,
         static_cast<int>(scratch.count), static_cast<int>(scratch.tile_rows));
  const GroupedGemm p{.x = a.x.data(),
                      .x_stride = a.x.stride(0),
                      .x_exponents = data_of<const int32_t>(scratch.x_exponents),
                      .runs = runs,
                      .tiles = tiles,
                      .n = n,
                      .k = k,
                      .out = a.out.data(),
                      .out_stride = a.out.stride(0)};
  launch_grouped(p, kernel, {a.x.dtype(), a.w.dtype(), a.out.dtype()}, scratch.count, scratch.tile_rows, stream);
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

void blas_scaled_linear(const LinearArgs& a, cublasHandle_t blas, const BlasScaledScratch& scratch,
                        cudaStream_t stream) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  auto* x_exponents = scratch.x_exponents.as<int32_t>();
  auto* w_exponents = scratch.w_exponents.as<int32_t>();
  launch_scale_rows(a.w.data(), k, n, k, w_exponents, scratch.w.data(), stream);
  for (int64_t first = 0; first < m; first += scratch.rows) {
    const int64_t rows = std::min(scratch.rows, m - first);
    const Tensor x = a.x.narrow(0, first, rows), out = a.out.narrow(0, first, rows);
    launch_scale_rows(x.data(), x.stride(0), rows, k, x_exponents, scratch.x.data(), stream);
    blas_product(blas, rows, n, k, CUDA_R_16F, scratch.x.data(), k, scratch.w.data(), scratch.sums.data(), n,
                 CUDA_R_32F);
    launch_unscale(data_of<const float>(scratch.sums), rows, n, x_exponents, w_exponents, out.data(), out.stride(0),
                   out.dtype(), stream);
  }
}

}  // namespace

int64_t CudaOps::scratch_bytes(const LinearArgs& a) const {
  if (a.x.dim(0) == 0 || a.w.dim(0) == 0) return 0;
  Arena arena;
  const GemmKernel kernel = kernel_of(a, caps_);
  if (kernel == GemmKernel::blas_scaled)
    BlasScaledScratch(arena, a);
  else if (kernel != GemmKernel::canonical && kernel != GemmKernel::blas_bf16)
    TileScratch(arena, a, kernel);
  return arena.peak_bytes();
}

void CudaOps::execute(const LinearArgs& a) {
  const int64_t m = a.x.dim(0), n = a.w.dim(0), k = a.x.dim(1);
  if (m == 0 || n == 0) return;
  const GemmKernel kernel = kernel_of(a, caps_);
  Arena arena = scratch_arena();
  switch (kernel) {
    case GemmKernel::canonical:
      return canonical_linear(a, stream_);
    case GemmKernel::simt:
    case GemmKernel::mma_bf16:
    case GemmKernel::mma_scaled:
      return tiled_linear(a, kernel, TileScratch(arena, a, kernel), stream_);
    case GemmKernel::blas_bf16:
      return blas_product(blas_, m, n, k, CUDA_R_16BF, a.x.data(), a.x.stride(0), a.w.data(), a.out.data(),
                          a.out.stride(0), a.out.dtype() == DType::f32 ? CUDA_R_32F : CUDA_R_16BF);
    case GemmKernel::blas_scaled:
      return blas_scaled_linear(a, blas_, BlasScaledScratch(arena, a), stream_);
  }
}

}  // namespace offload::cuda
