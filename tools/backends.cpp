#include "backends.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/ref_ops.h"
#include "cpu/roofs.h"

namespace offload::tools {

std::unique_ptr<Backend> make_backend(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  return std::make_unique<cpu::CpuBackend>(std::make_unique<cpu::RefOps>());
}

namespace {

// The median of one call's seconds: at least three, then until a tenth of a second has passed.
template <typename Call>
double median_seconds(Call&& call) {
  using Clock = std::chrono::steady_clock;
  call();
  std::vector<double> seconds;
  for (double sum = 0; seconds.size() < 3 || (sum < 0.1 && seconds.size() < 1000); sum += seconds.back()) {
    const auto start = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
  return seconds[seconds.size() / 2];
}

double time_linear(int threads, int64_t m, int64_t n, int64_t k) {
  cpu::CpuBackend backend(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = threads}));
  const Buffer x = backend.allocate(m * k * 2, "probe"), w = backend.allocate(n * k * 2, "probe"),
               out = backend.allocate(m * n * 2, "probe");
  const LinearArgs args{Tensor(x.data(), DType::bf16, {m, k}), Tensor(w.data(), DType::bf16, {n, k}),
                        Tensor(out.data(), DType::bf16, {m, n})};
  backend.fill_zero(args.x);
  backend.fill_zero(args.w);
  Ops& ops = backend.ops();
  ops.set_planning(true);
  ops(args);
  ops.set_planning(false);
  const Buffer scratch = backend.allocate(std::max<int64_t>(64, ops.scratch_peak_bytes()), "probe");
  ops.set_scratch(Tensor(scratch.data(), DType::u8, {scratch.bytes()}));
  return median_seconds([&] { ops(args); });
}

}  // namespace

ProbeFunctions host_probe(int threads) {
  return {.device_kind = fmt::format("CPU, {}, {} threads", cpu::isa_name(cpu::best_isa()), threads),
          .cores = threads,
          .memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE),
          .dram_read_bytes_per_s = [threads] { return cpu::measure_dram_read_bytes_per_s(threads); },
          .fma_flops = [threads] { return cpu::measure_fma_flops_per_s(threads, cpu::best_isa()); },
          .gemm_seconds = [threads](int64_t m, int64_t n, int64_t k) { return time_linear(threads, m, n, k); },
          .launch_seconds = [threads] { return time_linear(threads, 1, 1, 1); }};
}

}  // namespace offload::tools
