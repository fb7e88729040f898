// What this host's memory and FMA units can do: the roofs that benchmarks state their results against.
//
// Both take about a second, allocate for themselves and use a team of `threads`; the best of several rounds counts, as
// every disturbance only slows. Not meant for the serving path.
#ifndef OFFLOAD_CPU_ROOFS_H_
#define OFFLOAD_CPU_ROOFS_H_

#include "cpu/cpu_gemm.h"

namespace offload::cpu {

// Streams a buffer far larger than any cache. Throws Error{resource} when there is no memory for it.
double measure_dram_read_bytes_per_s(int threads);

// FP32 FMAs on registers, two operations each. REQUIRES: isa <= best_isa().
double measure_fma_flops_per_s(int threads, Isa isa);

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_ROOFS_H_
