// Measurement of the host's roofs.
#include "cpu/roofs.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "core/base.h"

namespace offload::cpu {
namespace {

constexpr int kRounds = 9;
constexpr int64_t kReadBytes = int64_t{1} << 30;  // several times the largest last-level cache of a desktop
constexpr int64_t kPieceBytes = int64_t{1} << 20;

class Pages {
 public:
  explicit Pages(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED)
      throw_error(ErrorCode::resource, "measuring the memory read rate needs {} MiB of memory, which mmap refused",
                  bytes >> 20);
    madvise(base_, bytes_, MADV_HUGEPAGE);
  }
  ~Pages() { munmap(base_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(base_); }

 private:
  void* base_ = nullptr;
  size_t bytes_;
};

template <typename Round>
double best_seconds(const Round& round) {
  double best = 1e30;
  for (int i = 0; i < kRounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    round();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

}  // namespace

double measure_dram_read_bytes_per_s(int threads) {
  OFL_ASSERT(threads >= 1);
  const CpuKernels& kernels = cpu_kernels(best_isa());
  const Pages pages(kReadBytes);
  constexpr int64_t kPieces = kReadBytes / kPieceBytes;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t piece = 0; piece < kPieces; ++piece)
    std::memset(pages.data() + piece * kPieceBytes, static_cast<int>(piece & 0x7f), kPieceBytes);

  volatile uint32_t sink = 0;  // keeps the reads
  const double seconds = best_seconds([&] {
    uint32_t all = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : all)
    for (int64_t piece = 0; piece < kPieces; ++piece)
      all += kernels.read_loop(pages.data() + piece * kPieceBytes, kPieceBytes);
    sink = all;
  });
  return static_cast<double>(kReadBytes) / seconds;
}

double measure_fma_flops_per_s(int threads, Isa isa) {
  OFL_ASSERT(threads >= 1);
  const CpuKernels& kernels = cpu_kernels(isa);
  constexpr int64_t kIterations = 4'000'000;
  volatile float sink = 0;  // keeps the products
  const double seconds = best_seconds([&] {
    float all = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : all)
    for (int thread = 0; thread < threads; ++thread) all += kernels.fma_loop(kIterations);
    sink = all;
  });
  return static_cast<double>(threads) * static_cast<double>(kernels.fma_flops * kIterations) / seconds;
}

}  // namespace offload::cpu
