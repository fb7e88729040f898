// Choice of the ISA level by what the processor reports.
#include "core/base.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {

Isa best_isa() {
  // __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx2 && avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::portable;
}

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "";
}

const CpuKernels& cpu_kernels(Isa isa) {
  OFL_ASSERT(isa <= best_isa());
  switch (isa) {
    case Isa::portable:
      return portable_kernels();
    case Isa::avx2:
      return avx2_kernels();
    case Isa::avx512:
      return avx512_kernels();
  }
  return portable_kernels();
}

}  // namespace offload::cpu
