#include "backends.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/roofs.h"
#include "cpu/thread_collective.h"
#ifdef OFFLOAD_CUDA
#include "cuda/cuda_backend.h"
#include "cuda/roofs.h"
#endif

namespace offload::tools {

#ifdef OFFLOAD_CUDA
namespace {

std::unique_ptr<Backend> make_cuda_backend(const Settings& settings, int rank) {
  return std::make_unique<cuda::CudaBackend>(rank % cuda::count_devices().count, settings.force_sm);
}

PinHooks cuda_pinning() {
  return {.pin = cuda::pin_host_memory, .unpin = cuda::unpin_host_memory};
}

Roofs cuda_roofs(const Settings& settings) {
  const cuda::DeviceCaps caps = cuda::query_device(0, settings.force_sm);
  return {.read_bytes_per_s = cuda::measure_device_read_bytes_per_s(caps),
          .flops_per_s =
              cuda::measure_gemm_flops_per_s(caps, caps.has_bf16_mma() ? cuda::GemmType::bf16 : cuda::GemmType::f16),
          .link_bytes_per_s = cuda::measure_link_bytes_per_s(caps)};
}

std::string cuda_name(const Settings& settings) {
  const cuda::DeviceCaps caps = cuda::query_device(0, settings.force_sm);
  return fmt::format("{}, plans of sm_{}", caps.name, caps.sm);
}

std::string cuda_plan(const Settings& settings) {
  const cuda::DeviceCaps caps = cuda::query_device(0, settings.force_sm);
  return fmt::format("cuda {}sm_{}", settings.force_sm ? "forced " : "", caps.sm);
}

void add_cuda_probe(const Settings& settings, ProbeFunctions& probe) {
  const cuda::DeviceCaps caps = cuda::query_device(0, settings.force_sm);
  DeviceProbe& device = probe.device;
  device.kind = cuda_name(settings);
  device.memory_bytes = caps.memory_bytes;
  device.compute_units = caps.multiprocessors;
  device.memory_read_bytes_per_s = [caps] { return cuda::measure_device_read_bytes_per_s(caps); };
  device.large_product = 8192;
  device.large_gemm_seconds = [caps](GemmMath math, int64_t size) {
    return cuda::measure_gemm_seconds(caps, math == GemmMath::bf16 ? cuda::GemmType::bf16 : cuda::GemmType::f16, size,
                                      size, size);
  };
  device.launch_seconds = [caps] { return cuda::measure_launch_seconds(caps); };
  probe.link = LinkProbe{.copy_seconds = [caps](int64_t bytes) { return cuda::measure_copy_seconds(caps, bytes); },
                         .dram_read_while_copying_bytes_per_s =
                             [caps, read = probe.host.dram_read_bytes_per_s] {
                               const cuda::LinkLoad load(caps);
                               return read();
                             },
                         .wait_seconds = [caps] { return cuda::measure_wait_seconds(caps); },
                         .pinning = cuda_pinning()};
}

}  // namespace

std::string why_no_cuda() {
  return cuda::count_devices().why_none;
}
#else
namespace {

[[noreturn]] void no_cuda() {
  throw_error(ErrorCode::internal, "this build has no CUDA backend");
}
std::unique_ptr<Backend> make_cuda_backend(const Settings&, int) {
  no_cuda();
}
PinHooks cuda_pinning() {
  no_cuda();
}
Roofs cuda_roofs(const Settings&) {
  no_cuda();
}
std::string cuda_name(const Settings&) {
  no_cuda();
}
std::string cuda_plan(const Settings&) {
  no_cuda();
}
void add_cuda_probe(const Settings&, ProbeFunctions&) {
  no_cuda();
}

}  // namespace

std::string why_no_cuda() {
  return "this build has no CUDA backend";
}
#endif

namespace {

// A rank's share of the cores.
std::unique_ptr<Ops> make_host_ops(const Settings& settings) {
  return std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = std::max(1, settings.threads / settings.tp)});
}

}  // namespace

std::unique_ptr<Backend> make_backend(const Settings& settings, int rank) {
  if (settings.device == "cuda") return make_cuda_backend(settings, rank);
  OFL_ASSERT(settings.device == "cpu");
  return std::make_unique<cpu::CpuBackend>(make_host_ops(settings));
}

struct DeviceSet::Group {
  explicit Group(int world) : threads(world) {}
  cpu::ThreadGroup threads;
};

DeviceSet::~DeviceSet() = default;

DeviceSet::DeviceSet(const Settings& settings) {
  if (settings.device == "cuda") pinning_ = cuda_pinning();
  for (int rank = 0; rank < settings.tp; ++rank) backends_.push_back(make_backend(settings, rank));
  for (int rank = 0; rank < settings.tp && settings.cpu_permille > 0; ++rank)
    host_ops_.push_back(make_host_ops(settings));
  if (settings.tp == 1) return;
  group_ = std::make_unique<Group>(settings.tp);
  for (int rank = 0; rank < settings.tp; ++rank) ends_.push_back(group_->threads.end(rank));
}

Devices DeviceSet::devices() const {
  std::vector<Backend*> backends;
  std::vector<Collective*> ends;
  std::vector<Ops*> host_ops;
  for (const auto& backend : backends_) backends.push_back(backend.get());
  for (const auto& end : ends_) ends.push_back(end.get());
  for (const auto& ops : host_ops_) host_ops.push_back(ops.get());
  Devices devices{std::move(backends), std::move(ends), std::move(host_ops)};
  devices.pinning = pinning_;
  return devices;
}

Cost DeviceSet::total_cost() const {
  Cost sum;
  for (const auto& backend : backends_) sum += backend->ops().total_cost();
  for (const auto& ops : host_ops_) sum += ops->total_cost();
  return sum;
}

void DeviceSet::reset_cost() {
  for (const auto& backend : backends_) backend->ops().reset_cost();
  for (const auto& ops : host_ops_) ops->reset_cost();
}

void DeviceSet::set_observer(OpObserver* observer) {
  backends_.front()->ops().set_observer(observer);
}

Roofs measure_roofs(const Settings& settings) {
  if (settings.device == "cuda") return cuda_roofs(settings);
  OFL_ASSERT(settings.device == "cpu");
  return {.read_bytes_per_s = cpu::measure_dram_read_bytes_per_s(settings.threads),
          .flops_per_s = cpu::measure_fma_flops_per_s(settings.threads, cpu::best_isa())};
}

std::string instruction_set(const Settings& settings) {
  if (settings.device == "cuda") return cuda_name(settings);
  OFL_ASSERT(settings.device == "cpu");
  return std::string(cpu::isa_name(cpu::best_isa()));
}

std::string device_plan(const Settings& settings) {
  return settings.device == "cuda" ? cuda_plan(settings) : "cpu";
}

namespace {

// The median seconds of a call in a row of them, as the host starts them and the device runs them: rounds of many calls
// where one is short.
template <typename Call>
double seconds_in_a_row(Backend& backend, Call&& call) {
  using Clock = std::chrono::steady_clock;
  const auto time = [&](int64_t calls) {
    const auto start = Clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    backend.compute_lane().drain();
    return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(calls);
  };
  constexpr double kRound = 0.02;
  time(1);
  const auto calls = static_cast<int64_t>(std::clamp(kRound / std::max(time(1), 1e-9), 1.0, 1000.0));
  std::array<double, 5> rounds{};
  for (double& round : rounds) round = time(calls);
  std::nth_element(rounds.begin(), rounds.begin() + rounds.size() / 2, rounds.end());
  return rounds[rounds.size() / 2];
}

double time_linear(const Settings& settings, int64_t m, int64_t n, int64_t k) {
  const std::unique_ptr<Backend> backend = make_backend(settings);
  backend->bind_thread();
  backend->create_events(0);
  const Buffer x = backend->allocate(m * k * 2, "probe"), w = backend->allocate(n * k * 2, "probe"),
               out = backend->allocate(m * n * 2, "probe");
  const LinearArgs args{Tensor(x.data(), DType::bf16, {m, k}), Tensor(w.data(), DType::bf16, {n, k}),
                        Tensor(out.data(), DType::bf16, {m, n})};
  backend->fill_zero(args.x);
  backend->fill_zero(args.w);
  Ops& ops = backend->ops();
  ops.set_planning(true);
  ops(args);
  ops.set_planning(false);
  const Buffer scratch = backend->allocate(std::max<int64_t>(64, ops.scratch_peak_bytes()), "probe");
  ops.set_scratch(Tensor(scratch.data(), DType::u8, {scratch.bytes()}));
  return seconds_in_a_row(*backend, [&] { ops(args); });
}

HostProbe host_probe(int threads) {
  return {.cores = threads,
          .memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE),
          .dram_read_bytes_per_s = [threads] { return cpu::measure_dram_read_bytes_per_s(threads); },
          .fma_flops = [threads] { return cpu::measure_fma_flops_per_s(threads, cpu::best_isa()); }};
}

}  // namespace

ProbeFunctions probe_functions(const Settings& settings) {
  const int threads = settings.threads;
  const auto gemm = [settings](int64_t m, int64_t n, int64_t k) { return time_linear(settings, m, n, k); };
  ProbeFunctions probe{.host = host_probe(threads), .device = {}, .link = {}};
  probe.device.gemm_seconds = gemm;
  if (settings.device == "cuda") {
    add_cuda_probe(settings, probe);
    return probe;
  }
  probe.device.kind = fmt::format("CPU, {}, {} threads", cpu::isa_name(cpu::best_isa()), threads);
  probe.device.memory_bytes = probe.host.memory_bytes;
  probe.device.compute_units = threads;
  // The CPU has no FP16 units: its kernels compute FP16's numbers at BF16's rate.
  probe.device.large_gemm_seconds = [gemm](GemmMath, int64_t size) { return gemm(size, size, size); };
  probe.device.launch_seconds = [settings] { return time_linear(settings, 1, 1, 1); };
  return probe;
}

}  // namespace offload::tools
