// What the CPU ops share: rows as F32 in small buffers, and loops over a team. Internal to src/cpu.
#ifndef OFFLOAD_CPU_CPU_OPS_ROWS_H_
#define OFFLOAD_CPU_CPU_OPS_ROWS_H_

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "core/ops.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {

// Elements that an elementwise op takes through the L1 cache at a time.
inline constexpr int64_t kRowChunk = 512;

struct alignas(64) RowBuffer {
  float f[kRowChunk];
  operator float*() { return f; }  // NOLINT: a buffer is used as the array that it is
};

inline const void* element_at(const Tensor& t, int64_t offset) {
  return static_cast<const std::byte*>(t.data()) + offset * dtype_bytes(t.dtype());
}

inline int64_t row_offset(const Tensor& t, int64_t i, int64_t j = 0) {
  return i * t.stride(0) + (t.rank() > 2 ? j * t.stride(1) : 0);
}

// n elements from element `offset` of t, as F32.
inline void load_row(const CpuKernels& kernels, const Tensor& t, int64_t offset, float* out, int64_t n) {
  if (t.dtype() == DType::bf16)
    kernels.widen(static_cast<const uint16_t*>(t.data()) + offset, out, n);
  else
    std::memcpy(out, t.as<float>() + offset, static_cast<size_t>(n) * sizeof(float));
}

// rnd!: stores n elements in t's dtype.
inline void store_row(const CpuKernels& kernels, const float* x, const Tensor& t, int64_t offset, int64_t n) {
  if (t.dtype() == DType::bf16)
    kernels.narrow(x, static_cast<uint16_t*>(t.data()) + offset, n);
  else
    std::memcpy(t.as<float>() + offset, x, static_cast<size_t>(n) * sizeof(float));
}

inline float load_one(const Tensor& t, int64_t offset) {
  return t.dtype() == DType::bf16 ? to_float(t.as<bf16>()[offset]) : t.as<float>()[offset];
}

inline void store_one(float value, const Tensor& t, int64_t offset) {
  if (t.dtype() == DType::bf16)
    t.as<bf16>()[offset] = to_bf16(value);
  else
    t.as<float>()[offset] = value;
}

// The inner rnd() of a formula: to A with reference rounding, nothing otherwise.
class Rnd {
 public:
  Rnd(const CpuKernels& kernels, DType activation, Rounding rounding)
      : kernels_(kernels), rounds_(activation == DType::bf16 && rounding == Rounding::reference) {}
  void operator()(float* x, int64_t n) const {
    if (rounds_) kernels_.round_bf16(x, n);
  }
  float one(float x) const { return rounds_ ? to_float(to_bf16(x)) : x; }

 private:
  const CpuKernels& kernels_;
  bool rounds_;
};

inline float sigmoid_one(const CpuKernels& kernels, float x) {
  alignas(64) float lanes[kLanes] = {x};
  kernels.sigmoid(lanes, 1);
  return lanes[0];
}

// body(item, thread) for every item, each by one thread of the team. Which thread takes an item is left open, so body
// may use `thread` to find its scratch and nothing else. A team is not worth waking for less than ~50 us of work.
template <typename Body>
void for_each_item(int threads, int64_t items, bool worth_a_team, const Body& body) {
  if (threads == 1 || items <= 1 || !worth_a_team) {
    for (int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t item = 0; item < items; ++item) body(item, omp_get_thread_num());
}

// The same in runs of consecutive items, for items that are too small to hand out one by one. `elements` is the size of
// one item.
template <typename Body>
void for_each_row(int threads, int64_t rows, int64_t elements, const Body& body) {
  constexpr int64_t kRunElements = 8192, kTeamElements = 32768;
  const int64_t run = std::max<int64_t>(1, kRunElements / std::max<int64_t>(1, elements));
  for_each_item(threads, (rows + run - 1) / run, rows * elements >= kTeamElements, [&](int64_t item, int thread) {
    for (int64_t row = item * run; row < std::min(rows, (item + 1) * run); ++row) body(row, thread);
  });
}

// Splits n elements into chunks: body(begin, count).
template <typename Body>
void for_each_chunk(int64_t n, const Body& body) {
  for (int64_t begin = 0; begin < n; begin += kRowChunk) body(begin, std::min(kRowChunk, n - begin));
}

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_OPS_ROWS_H_
