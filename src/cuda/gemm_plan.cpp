#include "cuda/gemm_plan.h"

#include "core/canonical.h"

namespace offload::cuda {

std::string_view gemm_kernel_name(GemmKernel kernel) {
  switch (kernel) {
    case GemmKernel::canonical:
      return "canonical";
    case GemmKernel::simt:
      return "simt";
    case GemmKernel::mma_bf16:
      return "mma_bf16";
    case GemmKernel::wgmma_bf16:
      return "wgmma_bf16";
    case GemmKernel::mma_scaled:
      return "mma_scaled";
    case GemmKernel::blas_bf16:
      return "blas_bf16";
    case GemmKernel::blas_scaled:
      return "blas_scaled";
  }
  return "";
}

GemmKernel plan_gemm(const GemmShape& shape, const DeviceCaps& caps) {
  if (shape.m <= kCanonicalRowsMax) return GemmKernel::canonical;
  const bool bf16 = shape.x == DType::bf16 && shape.w == DType::bf16;
  if (!bf16 || !shape.aligned) return GemmKernel::simt;
  if (shape.math == Math::reordered) return caps.has_bf16_mma() ? GemmKernel::mma_bf16 : GemmKernel::mma_scaled;
  if (shape.math != Math::native)
    return shape.grouped || shape.m < kBlasScaledRowsMin ? GemmKernel::mma_scaled : GemmKernel::blas_scaled;
  if (shape.grouped && caps.has_wgmma()) return GemmKernel::wgmma_bf16;
  if (caps.has_bf16_mma()) return shape.grouped ? GemmKernel::mma_bf16 : GemmKernel::blas_bf16;
  return shape.grouped || shape.m < kBlasScaledRowsMin ? GemmKernel::mma_scaled : GemmKernel::blas_scaled;
}

bool needs_exponents(GemmKernel kernel, Math math) {
  return kernel == GemmKernel::simt && math == Math::scaled_fp16;
}

int64_t canonical_run_rows(GemmKernel kernel, Math math, int64_t tokens) {
  const bool is_bf16 = kernel == GemmKernel::mma_bf16 || kernel == GemmKernel::wgmma_bf16;
  return tokens > kCanonicalRowsMax && is_bf16 && math == Math::native ? 0 : kCanonicalRowsMax;
}

GemmTileShape plan_tile(GemmKernel kernel, int64_t rows, const DeviceCaps& caps) {
  constexpr int64_t kWideShared = 144 << 10;  // three stages of 128 + 256 rows of 128 bytes
  if (kernel == GemmKernel::simt) return {64, 64};
  if (kernel == GemmKernel::wgmma_bf16) return {kWgmmaRows, 256};
  if (kernel == GemmKernel::mma_scaled) return {rows > 64 ? kScaledRows : 64, 128};
  if (kernel == GemmKernel::mma_bf16 && rows > 64 && caps.shared_bytes >= kWideShared) return {128, 256};
  const bool tall = rows > 128 && (rows % 128 == 0 || rows % 128 > 64 || rows > 512);
  return {tall ? 128 : 64, 128};
}

}  // namespace offload::cuda
