// The CPU's inner loops, one table of function pointers per ISA level, chosen at run time.
//
// Leaf functions: single-threaded, no allocation, no state; the ops above them own the partition and the scratch. Each
// level is one translation unit that instantiates the text of cpu_kernels_inl.h with its own vector type. Such a unit
// is compiled with -m flags, so nothing in it may have external linkage but its table.
//
// The canonical products and SiLU have the same bits at every level (core/canonical.h). The others do not: the vector
// width is part of their summation order. x86-64 only.
#ifndef OFFLOAD_CPU_CPU_GEMM_H_
#define OFFLOAD_CPU_CPU_GEMM_H_

#include <cstdint>
#include <string_view>

namespace offload::cpu {

enum class Isa : uint8_t { portable, avx2, avx512 };

// The highest level that this processor and operating system run.
Isa best_isa();
std::string_view isa_name(Isa isa);

// F32 buffers that a kernel works on in place are sized to a multiple of kLanes; what lies behind the n elements is
// computed and ignored.
inline constexpr int64_t kLanes = 16;
inline constexpr int64_t round_to_lanes(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// Elements of k that one packed panel of the prefill GEMM spans: a panel of weights (kGemmBlockK x 16 F32) is half of a
// 32 KiB L1 cache.
inline constexpr int64_t kGemmBlockK = 256;

struct CpuKernels {
  Isa isa;

  // --- conversions: BF16 bits to F32 and back (nearest even, NaN stays NaN) ---
  void (*widen)(const uint16_t* x, float* out, int64_t n);
  void (*narrow)(const float* x, uint16_t* out, int64_t n);

  // --- elementwise on padded F32 buffers ---
  void (*round_bf16)(float* x, int64_t n);
  void (*sigmoid)(float* x, int64_t n);              // 1 / (1 + canonical_exp(-x)), relative error < 4e-7
  void (*silu)(float* x, int64_t n);                 // canonical_silu, the same bits at every level
  void (*add)(float* x, const float* y, int64_t n);  // x += y
  void (*mul)(float* x, const float* y, int64_t n);  // x *= y
  void (*scale)(float* x, float s, int64_t n);       // x *= s
  void (*mul_add)(float* x, const float* y, const float* z, int64_t n);  // x += y * z
  void (*axpy)(float* x, float s, const float* y, int64_t n);            // x += s * y
  // --- reductions over n elements, nothing behind them read ---
  float (*dot)(const float* x, const float* y, int64_t n);
  float (*sum)(const float* x, int64_t n);
  float (*max)(const float* x, int64_t n);             // REQUIRES: n > 0
  float (*exp_sum)(float* x, float shift, int64_t n);  // x = exp(x - shift); returns the sum

  // --- canonical small-row products ---
  // Elements [begin, begin + count) of a row, begin a multiple of 64, into their places of out [k_padded], the row in
  // the order that the product reads: for each vector of accumulators all its elements of x. Zeros fill the last block.
  void (*canonical_permute)(const float* x, int64_t begin, int64_t count, int64_t k_padded, float* out);
  // out[m * out_stride + n] = canonical sum for m < rows (1..8), n < columns; x: permuted rows,
  // x_stride = k_padded apart.
  void (*canonical_bf16)(const float* x, int64_t x_stride, int64_t rows, const uint16_t* w, int64_t k, int64_t columns,
                         float* out, int64_t out_stride);
  void (*canonical_f32)(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t k, int64_t columns,
                        float* out, int64_t out_stride);

  // --- prefill GEMM: C [gemm_rows, gemm_columns] per call ---
  int64_t gemm_rows;
  int64_t gemm_columns;
  // Up to `count` rows of w (leading dimension k_stride), elements [0, k) -> out [k][gemm_columns], zeros behind count.
  void (*pack_columns_bf16)(const uint16_t* w, int64_t k_stride, int64_t count, int64_t k, float* out);
  void (*pack_columns_f32)(const float* w, int64_t k_stride, int64_t count, int64_t k, float* out);
  // c [gemm_rows][c_stride] = or += a [k][gemm_rows] x b [k][gemm_columns]
  void (*gemm)(const float* a, const float* b, int64_t k, float* c, int64_t c_stride, int accumulate);

  // --- small dense product: c [m][n] (+)= a x b; a element (i, l) at a[i * a_row + l * a_column]; n a multiple of
  // kLanes ---
  void (*matmul)(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b,
                 int64_t b_stride, float* c, int64_t c_stride, int accumulate);

  // --- attention: `heads` rows of q or of weights against `count` rows of keys or values ---
  // out[h * out_stride + p] = q[h] . k[p]
  void (*scores_bf16)(const float* q, int64_t q_stride, int64_t heads, const uint16_t* k, int64_t k_stride,
                      int64_t count, int64_t n, float* out, int64_t out_stride);
  void (*scores_f32)(const float* q, int64_t q_stride, int64_t heads, const float* k, int64_t k_stride, int64_t count,
                     int64_t n, float* out, int64_t out_stride);
  // out[h * out_stride + j] += sum_p weights[h * weights_stride + p] * v[p][j], p ascending
  void (*weigh_bf16)(const float* weights, int64_t weights_stride, int64_t heads, const uint16_t* v, int64_t v_stride,
                     int64_t count, int64_t n, float* out, int64_t out_stride);
  void (*weigh_f32)(const float* weights, int64_t weights_stride, int64_t heads, const float* v, int64_t v_stride,
                    int64_t count, int64_t n, float* out, int64_t out_stride);

  // --- one step of the gated delta rule on m [dk][dv], dv a multiple of kLanes; delta is scratch [dv] ---
  void (*delta_step)(float* m, int64_t dk, int64_t dv, float decay, const float* q, const float* k, const float* v,
                     float beta, float* out);

  // --- roofs ---
  // Runs register-resident FMAs; returns a value that depends on all. flops = fma_flops * iterations.
  float (*fma_loop)(int64_t iterations);
  int64_t fma_flops;
  // Reads bytes (a multiple of 4096) once; returns a value that depends on all.
  uint32_t (*read_loop)(const void* x, int64_t bytes);
};

// REQUIRES: isa <= best_isa() to be called through.
const CpuKernels& cpu_kernels(Isa isa);

const CpuKernels& portable_kernels();
const CpuKernels& avx2_kernels();
const CpuKernels& avx512_kernels();

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_GEMM_H_
