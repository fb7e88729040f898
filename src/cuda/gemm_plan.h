// Which kernel a matrix product of given shape and types gets on a device: pure functions, tested without one.
#ifndef OFFLOAD_CUDA_GEMM_PLAN_H_
#define OFFLOAD_CUDA_GEMM_PLAN_H_

#include <cstdint>
#include <string_view>

#include "core/product_math.h"
#include "cuda/device.h"

namespace offload::cuda {

enum class GemmKernel : uint8_t {
  canonical,   // up to kCanonicalRowsMax rows: the order of core/canonical.h, bound by reading the weights
  simt,        // FP32 FMAs on the ordinary units; any types and alignment
  mma_bf16,    // own tiles on BF16 matrix units
  wgmma_bf16,  // own tiles on Hopper's warpgroup units
  mma_scaled,  // own tiles on FP16 matrix units: BF16 bits become FP16 by a power of two per row, x's before
  blas_bf16,   // cuBLAS on BF16
  blas_scaled  // cuBLAS on FP16 made so of x and w before
};
std::string_view gemm_kernel_name(GemmKernel kernel);

struct GemmShape {
  int64_t m = 0, n = 0, k = 0;
  DType x = DType::bf16, w = DType::bf16, out = DType::bf16;
  Math math = Math::native;
  bool aligned = true;   // rows of x and w start at multiples of 16 bytes
  bool grouped = false;  // rows gathered for one of several weights
};

// Rows from which converting all of x and w once beats converting tiles as they are read.
inline constexpr int64_t kBlasScaledRowsMin = 128;

GemmKernel plan_gemm(const GemmShape& shape, const DeviceCaps& caps);

// Whether `kernel` converts to FP16 itself and wants an exponent for each row of x and of w.
bool needs_exponents(GemmKernel kernel, Math math);

// Of an expert FFN over `tokens` tokens whose tiles are of `kernel`: runs of up to so many rows go through the
// canonical kernels, longer ones through tiles. All through tiles where those compute the same numbers and read weights
// as fast.
int64_t canonical_run_rows(GemmKernel kernel, Math math, int64_t tokens);

// Rows and columns of w that one block of the own kernels takes.
struct GemmTileShape {
  int64_t rows = 64, columns = 128;
};
inline constexpr int kWgmmaRows = 192;   // of a tile
inline constexpr int kScaledRows = 160;  // of a tall one for mma_scaled
// For mma_scaled of one run without swiglu: more blocks for the card.
inline constexpr GemmTileShape kScaledAlone{64, 64};
// For runs of `rows` rows on average. Wgmma: kWgmmaRows x 256. Scaled: up to 64 rows 64 x 128, else kScaledRows x 128
// (both products of 128 runs of 64 rows, hidden 2560, intermediate 640, launched alone on an H200, 2026-12-01: 0.57 ms
// and 0.63, of 100 rows 0.96 and 0.77). Simt: 64 x 64; else 64 or 128 rows and 128 columns, or 128 x 256 where shared
// memory holds it: half of what 64 x 128 reads from the caches per product, and as fast on an H200 (README).
GemmTileShape plan_tile(GemmKernel kernel, int64_t rows, const DeviceCaps& caps);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GEMM_PLAN_H_
