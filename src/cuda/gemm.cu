#include "cuda/gemm.cuh"

#include "cuda/gemm_launch.h"
#include "cuda/gemm_scaled.cuh"

namespace offload::cuda {
namespace {

// --- grouped products ---

template <bool kSwiglu, typename TOut>
void launch_scaled(GroupedGemm p, dim3 grid, const GemmTileShape& shape, cudaStream_t stream) {
  p.chunks_aligned = p.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % (4 * sizeof(TOut)) == 0;
  const auto go = [&](auto tile) {
    using Tile = decltype(tile);
    OFL_ASSERT(shape.rows == Tile::kTileM && shape.columns == Tile::kTileN);
    launch(grouped_scaled_kernel<Tile, kSwiglu, TOut>, grid, Tile::kThreads, Tile::kShared, stream, p);
  };
  if (shape.rows > 64) return go(ScaledTile<2, kScaledRows, 2>{});
  if constexpr (!kSwiglu)
    if (shape.columns == 64) return go(ScaledTile<1, 64, 4>{});
  go(ScaledTile<2, 64, 3>{});
}

template <bool kSwiglu, typename TOut>
void launch_mma(GroupedGemm p, GemmKernel kernel, int64_t tiles, const GemmTileShape& shape, cudaStream_t stream) {
  const dim3 grid(blocks_for(p.n, kSwiglu ? shape.columns / 2 : shape.columns), static_cast<unsigned>(tiles));
  if (kernel == GemmKernel::mma_scaled) return launch_scaled<kSwiglu, TOut>(p, grid, shape, stream);
  p.pairs_aligned = p.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % (2 * sizeof(TOut)) == 0;
  const auto go = [&](auto rows, auto columns) {
    constexpr int kRows = decltype(rows)::value, kColumns = decltype(columns)::value;
    launch(grouped_mma_kernel<kRows, kColumns, kSwiglu, TOut>, grid, kGemmThreads, gemm_shared_bytes<kRows, kColumns>(),
           stream, p);
  };
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  if (shape.columns == 256) return go(k128, std::integral_constant<int, 256>{});
  shape.rows == 64 ? go(k64, k128) : go(k128, k128);
}

template <bool kSwiglu, typename TX, typename TOut>
void launch_simt(const GroupedGemm& p, DType w, int64_t tiles, cudaStream_t stream) {
  const dim3 grid(blocks_for(p.n, kSwiglu ? kSimtTile / 2 : kSimtTile), static_cast<unsigned>(tiles));
  with_float_type(
      w, [&](auto tw) { launch(grouped_simt_kernel<TX, decltype(tw), kSwiglu, TOut>, grid, 256, 0, stream, p); });
}

// --- scaling ---

// The exponent of one row of k elements, by one warp: half_exponent() of its largest magnitude; 0 for plain FP16.
__device__ inline int32_t row_exponent(const bf16* row, int64_t k, Math math) {
  if (is_plain(math)) return 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint32_t most = 0;
  if (k % 8 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    for (int64_t i = lane; i < k / 8; i += kWarp) most = largest_bits(reinterpret_cast<const uint4*>(row)[i], most);
  } else {
    for (int64_t i = lane; i < k; i += kWarp) most = max(most, row[i].bits & 0x7fffu);
  }
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
  return half_exponent(most);
}

constexpr int kRowWarps = 4;  // of a block; a row each
constexpr unsigned kGridYMost = 65535;

__device__ inline int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp;
}

// Bound by reading x.
__global__ void row_exponents_kernel(const bf16* x, int64_t x_stride, int64_t rows, int64_t k, Math math,
                                     int32_t* exponents) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  const int32_t e = row_exponent(x + row * x_stride, k, math);
  if (threadIdx.x % kWarp == 0) exponents[row] = e;
}

// Grid (rows / kRowWarps, runs).
__global__ void run_exponents_kernel(const GemmRun* runs, int64_t rows, int64_t k, Math math, int32_t* exponents,
                                     int64_t exponents_stride) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  if (runs[blockIdx.y].count == 0) return;
  const auto* w = static_cast<const bf16*>(runs[blockIdx.y].w);
  const int32_t e = row_exponent(w + row * k, k, math);
  if (threadIdx.x % kWarp == 0) exponents[blockIdx.y * exponents_stride + row] = e;
}

// Reads x twice, the second time out of the cache, and writes as much as it reads: a lane what it alone has read.
__global__ void scale_rows_kernel(const bf16* x, int64_t x_stride, const int32_t* x_rows, int64_t rows, int64_t k,
                                  Math math, int32_t* exponents, uint4* out) {
  const int64_t row = row_of_warp(), chunks = k / 8;
  if (row >= rows) return;
  const bf16* from = x + (x_rows == nullptr ? row : x_rows[row]) * x_stride;
  const int32_t e = row_exponent(from, k, math);
  const float scale = power_of_two(e);
  if (threadIdx.x % kWarp == 0) exponents[row] = e;
  for (int64_t i = threadIdx.x % kWarp; i < chunks; i += kWarp)
    out[row * chunks + i] = half_pairs(reinterpret_cast<const uint4*>(from)[i], scale);
}

template <typename TOut>
__global__ void unscale_kernel(const float* sums, int64_t n, const int32_t* x_exponents, const int32_t* w_exponents,
                               Math math, TOut* out, int64_t out_stride) {
  const GroupedGemm as_asked{.math = math};
  const int64_t row = blockIdx.x;
  const int x_exponent = x_exponents[row];
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.y} * blockDim.x)
    store_float(out + row * out_stride + i,
                as_asked.finished(scalbnf(sums[row * n + i], -(x_exponent + w_exponents[i]))));
}

}  // namespace

void launch_grouped(const GroupedGemm& p, GemmKernel kernel, const GemmTypes& types, int64_t tiles,
                    const GemmTileShape& shape, cudaStream_t stream) {
  OFL_ASSERT(!types.swiglu || types.out == types.x);
  if (kernel == GemmKernel::wgmma_bf16) return launch_grouped_wgmma(p, types, tiles, stream);
  if (kernel != GemmKernel::simt) {
    if (types.swiglu) return launch_mma<true, bf16>(p, kernel, tiles, shape, stream);
    with_float_type(types.out, [&](auto out) { launch_mma<false, decltype(out)>(p, kernel, tiles, shape, stream); });
    return;
  }
  with_float_type(types.x, [&](auto x) {
    using TX = decltype(x);
    if (types.swiglu) return launch_simt<true, TX, TX>(p, types.w, tiles, stream);
    if (types.out == DType::f32) return launch_simt<false, TX, float>(p, types.w, tiles, stream);
    launch_simt<false, TX, TX>(p, types.w, tiles, stream);
  });
}

void launch_row_exponents(const void* x, int64_t x_stride, int64_t rows, int64_t k, Math math, int32_t* exponents,
                          cudaStream_t stream) {
  launch(row_exponents_kernel, blocks_for(rows, kRowWarps), kRowWarps * kWarp, 0, stream, static_cast<const bf16*>(x),
         x_stride, rows, k, math, exponents);
}

void launch_run_exponents(const GemmRun* runs, int64_t count, int64_t rows, int64_t k, Math math, int32_t* exponents,
                          int64_t exponents_stride, cudaStream_t stream) {
  launch(run_exponents_kernel, dim3(blocks_for(rows, kRowWarps), static_cast<unsigned>(count)), kRowWarps * kWarp, 0,
         stream, runs, rows, k, math, exponents, exponents_stride);
}

void launch_scale_rows(const void* x, int64_t x_stride, const int32_t* x_rows, int64_t rows, int64_t k, Math math,
                       int32_t* exponents, void* out, cudaStream_t stream) {
  launch(scale_rows_kernel, blocks_for(rows, kRowWarps), kRowWarps * kWarp, 0, stream, static_cast<const bf16*>(x),
         x_stride, x_rows, rows, k, math, exponents, static_cast<uint4*>(out));
}

bool prepares_x(GemmKernel kernel, Math math) {
  return kernel == GemmKernel::mma_scaled || needs_exponents(kernel, math);
}

void prepare_x(GroupedGemm& p, GemmKernel kernel, int64_t rows, int64_t listed, int32_t* exponents, void* out,
               cudaStream_t stream) {
  if (!prepares_x(kernel, p.math)) return;
  p.x_exponents = exponents;
  if (kernel != GemmKernel::mma_scaled)
    return launch_row_exponents(p.x, p.x_stride, rows, p.k, p.math, exponents, stream);
  const bool gathers = p.x_rows != nullptr && listed < rows;
  launch_scale_rows(p.x, p.x_stride, gathers ? p.x_rows : nullptr, gathers ? listed : rows, p.k, p.math, exponents, out,
                    stream);
  p.x = out;
  p.x_stride = p.k;
  if (gathers) p.x_rows = nullptr;
}

void launch_unscale(const float* sums, int64_t m, int64_t n, const int32_t* x_exponents, const int32_t* w_exponents,
                    Math math, void* out, int64_t out_stride, DType dtype, cudaStream_t stream) {
  with_float_type(dtype, [&](auto type) {
    using TOut = decltype(type);
    launch(unscale_kernel<TOut>, dim3(static_cast<unsigned>(m), std::min(blocks_for(n, 1024), kGridYMost)), 256, 0,
           stream, sums, n, x_exponents, w_exponents, math, static_cast<TOut*>(out), out_stride);
  });
}

}  // namespace offload::cuda
