// Launching grouped products, and making FP16 of BF16 by powers of two. Device pointers throughout; everything
// enqueues.
#ifndef OFFLOAD_CUDA_GEMM_LAUNCH_H_
#define OFFLOAD_CUDA_GEMM_LAUNCH_H_

#include "core/dtype.h"
#include "cuda/gemm_plan.h"

namespace offload::cuda {

struct GemmRun;
struct GroupedGemm;

struct GemmTypes {
  DType x = DType::bf16, w = DType::bf16, out = DType::bf16;
  bool swiglu = false;  // REQUIRES then: out == x
};
// `tiles` tiles, the p.tiles of it. REQUIRES: kernel is one of the own tiles; `shape` is of plan_tile(), or
// kScaledAlone where that fits.
void launch_grouped(const GroupedGemm& p, GemmKernel kernel, const GemmTypes& types, int64_t tiles,
                    const GemmTileShape& shape, cudaStream_t stream);

// The same where the kernel is wgmma_bf16. REQUIRES: types.x and types.w BF16.
void launch_grouped_wgmma(GroupedGemm p, const GemmTypes& types, int64_t tiles, cudaStream_t stream);

// exponents[i] = half_exponent() of the largest magnitude of row i of x [rows, k] BF16; 0 where `math` casts plainly.
void launch_row_exponents(const void* x, int64_t x_stride, int64_t rows, int64_t k, Math math, int32_t* exponents,
                          cudaStream_t stream);
// The same of all rows of the weights of `count` runs: [rows, k] each, into exponents[run * exponents_stride + row].
void launch_run_exponents(const GemmRun* runs, int64_t count, int64_t rows, int64_t k, Math math, int32_t* exponents,
                          int64_t exponents_stride, cudaStream_t stream);
// The same of rows x_rows[i] (null: i) of x, and out [rows, k] FP16 contiguous = x * 2^e; where x_rows is null and x is
// contiguous, out may be x. k a multiple of 8, rows aligned to 16 bytes.
void launch_scale_rows(const void* x, int64_t x_stride, const int32_t* x_rows, int64_t rows, int64_t k, Math math,
                       int32_t* exponents, void* out, cudaStream_t stream);
// Whether prepare_x() has anything to do.
bool prepares_x(GemmKernel kernel, Math math);
// Makes of p.x [rows, k] what `kernel` reads, and exponents [rows]. For mma_scaled that is scaled rows in `out` FP16
// [min(rows, listed), k], `out` as above: of all rows, or of the `listed` ones in p.x_rows where those are fewer, and
// p.x_rows is null then.
void prepare_x(GroupedGemm& p, GemmKernel kernel, int64_t rows, int64_t listed, int32_t* exponents, void* out,
               cudaStream_t stream);
// out [m, n] of `dtype` = sums [m, n] F32 contiguous x 2^-(x_exponents[row] + w_exponents[column]), rounded as `math`
// says and once to dtype.
void launch_unscale(const float* sums, int64_t m, int64_t n, const int32_t* x_exponents, const int32_t* w_exponents,
                    Math math, void* out, int64_t out_stride, DType dtype, cudaStream_t stream);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GEMM_LAUNCH_H_
