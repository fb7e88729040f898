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
  if (caps.has_bf16_mma()) return shape.grouped ? GemmKernel::mma_bf16 : GemmKernel::blas_bf16;
  return shape.grouped || shape.m < kBlasScaledRowsMin ? GemmKernel::mma_scaled : GemmKernel::blas_scaled;
}

int64_t plan_tile_rows(int64_t rows) {
  return rows > 128 && (rows % 128 == 0 || rows % 128 > 64 || rows > 512) ? 128 : 64;
}

}  // namespace offload::cuda
