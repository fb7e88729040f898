#include "backends.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <vector>

#include "core/models/registry.h"

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/roofs.h"
#include "cpu/thread_collective.h"
#include "offload/gpu_choice.h"
#ifdef OFFLOAD_CUDA
#include "cuda/cuda_backend.h"
#include "cuda/group_collective.h"
#include "cuda/roofs.h"
#include "cuda/self_test.h"
#endif

namespace offload::tools {

// What joins the ranks of one backend.
class RankGroup {
 public:
  virtual ~RankGroup() = default;
  virtual std::unique_ptr<Collective> end(int rank) = 0;
  // In one line, for a log; "" where there is nothing to say.
  virtual std::string describe() const { return ""; }
};

namespace {

class HostGroup final : public RankGroup {
 public:
  explicit HostGroup(int world) : threads_(world) {}
  std::unique_ptr<Collective> end(int rank) override { return threads_.end(rank); }

 private:
  cpu::ThreadGroup threads_;
};

// What a start learns of the devices.
struct DeviceNotes {
  std::vector<int> numa_nodes;  // by rank
  std::vector<std::string> banner, warnings;
};

}  // namespace

#ifdef OFFLOAD_CUDA
namespace {

std::optional<std::string> visible_devices_variable() {
  const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
  return value == nullptr ? std::optional<std::string>() : value;
}

// Before the first call of CUDA and of NCCL, which take these from nowhere else: GPUs are counted as nvidia-smi does,
// unless the user says otherwise, and NCCL prepares no multicast, which nothing here uses.
void prepare_cuda() {
  setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
}

VisibleGpus usable_from(const cuda::DeviceCount& devices) {
  return {.sms = devices.sms, .sm_min = cuda::kSmMin};
}

// The device of each rank.
std::vector<int> devices_of(const Settings& settings) {
  return gpus_of_ranks(settings.tp, usable_from(cuda::count_devices()), settings.gpus, visible_devices_variable());
}

std::unique_ptr<Backend> make_cuda_backend(const Settings& settings, int rank) {
  const std::vector<int> devices = devices_of(settings);
  const int device = devices[static_cast<size_t>(rank)];
  const auto sharers = std::count(devices.begin(), devices.end(), device);
  return std::make_unique<cuda::CudaBackend>(device, settings.force_sm, static_cast<int>(sharers));
}

class CudaGroup final : public RankGroup {
 public:
  explicit CudaGroup(const std::vector<std::unique_ptr<Backend>>& backends, const cuda::GroupOptions& options = {})
      : group_(cuda_backends(backends), options) {}
  cuda::DeviceGroup& group() { return group_; }
  std::unique_ptr<Collective> end(int rank) override { return group_.end(rank); }
  std::string describe() const override { return group_.describe(); }

 private:
  static std::vector<cuda::CudaBackend*> cuda_backends(const std::vector<std::unique_ptr<Backend>>& backends) {
    std::vector<cuda::CudaBackend*> all;
    for (const auto& backend : backends) all.push_back(dynamic_cast<cuda::CudaBackend*>(backend.get()));
    return all;
  }
  cuda::DeviceGroup group_;
};

std::unique_ptr<RankGroup> make_cuda_group(const std::vector<std::unique_ptr<Backend>>& backends) {
  return std::make_unique<CudaGroup>(backends);
}

void add_timings(std::vector<AllReduceTiming>& timings, std::string_view link,
                 const std::vector<cuda::WaySample>& samples) {
  for (const cuda::WaySample& sample : samples)
    for (const auto& [way, seconds] : {std::pair{cuda::GroupWay::waiting, sample.waiting_s},
                                       {cuda::GroupWay::ordered, sample.ordered_s},
                                       {cuda::GroupWay::nccl, sample.nccl_s}}) {
      if (!seconds) continue;
      const std::string name = fmt::format("all_reduce/{}/{}/{}", cuda::group_way_name(way), link, sample.bytes);
      auto at = std::find_if(timings.begin(), timings.end(), [&](const auto& each) { return each.name == name; });
      if (at == timings.end()) at = timings.insert(at, {name, sample.bytes});
      at->seconds.push_back(*seconds);
    }
}

std::vector<AllReduceTiming> time_cuda_all_reduce(const Settings& settings, int64_t repeat) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < settings.tp; ++rank) backends.push_back(make_cuda_backend(settings, rank));
  const auto no_path = [](int, int) { return cuda::PeerPath{cuda::Reach::absent, "left out"}; };
  std::vector<AllReduceTiming> timings;
  for (const bool by_host : {false, true}) {
    cuda::GroupOptions options{.measure = false};
    if (by_host) options.prove_path = no_path;
    CudaGroup group(backends, options);
    const bool reaches = group.group().path(0, settings.tp - 1).reach != cuda::Reach::absent;
    if (by_host && reaches) break;  // all ranks are on one device
    for (int64_t i = 0; i < repeat; ++i) add_timings(timings, reaches ? "memory" : "host", group.group().measure());
    if (!by_host && !reaches) break;
  }
  return timings;
}

std::vector<std::string> describe_cuda() {
  const VisibleGpus visible = usable_from(cuda::count_devices());
  const std::vector<int> all = visible.usable();
  if (all.empty()) return {};
  const cuda::SelfTest test = cuda::run_self_test(all);
  std::vector<std::string> lines = cuda::banner(test);
  if (const std::string text = visible.left_out(); !text.empty()) lines.push_back(text);
  for (const std::string& finding : cuda::findings(test)) lines.push_back("warning: " + finding);
  return lines;
}

DeviceNotes cuda_notes(const Settings& settings) {
  const std::vector<int> of_ranks = devices_of(settings);
  std::vector<int> devices = of_ranks;
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  const cuda::SelfTest test = cuda::run_self_test(devices);
  DeviceNotes notes{{}, cuda::banner(test), cuda::findings(test)};
  std::vector<GpuTraits> traits;
  for (const int device : of_ranks) {
    const auto gpu = std::find_if(test.gpus.begin(), test.gpus.end(),
                                  [&](const cuda::GpuReport& each) { return each.caps.device == device; });
    notes.numa_nodes.push_back(gpu->numa_node);
    traits.push_back({gpu->caps.name, gpu->caps.device_sm, gpu->caps.memory_bytes});
  }
  for (const std::string& note : uneven_gpu_notes(traits)) notes.warnings.push_back(note);
  if (settings.gpus.empty())
    if (const std::string text = usable_from(cuda::count_devices()).left_out(); !text.empty())
      notes.banner.push_back(text);
  return notes;
}

PinHooks cuda_pinning() {
  return {.pin = cuda::pin_host_memory, .unpin = cuda::unpin_host_memory};
}

// The device that speaks for all where one is measured: rank 0's.
cuda::DeviceCaps first_caps(const Settings& settings) {
  return cuda::query_device(devices_of(settings).front(), settings.force_sm);
}

Roofs cuda_roofs(const Settings& settings) {
  const cuda::DeviceCaps caps = first_caps(settings);
  return {.read_bytes_per_s = cuda::measure_device_read_bytes_per_s(caps),
          .flops_per_s =
              cuda::measure_gemm_flops_per_s(caps, caps.has_bf16_mma() ? cuda::GemmType::bf16 : cuda::GemmType::f16),
          .link_bytes_per_s = cuda::measure_link_bytes_per_s(caps),
          .m16n8k8_flops_per_s = caps.has_bf16_mma() ? 0 : cuda::measure_m16n8k8_flops_per_s(caps)};
}

std::string cuda_name(const Settings& settings) {
  const cuda::DeviceCaps caps = first_caps(settings);
  return fmt::format("{}, plans of sm_{}", caps.name, caps.sm);
}

std::string cuda_plan(const Settings& settings) {
  const cuda::DeviceCaps caps = first_caps(settings);
  return fmt::format("cuda {}sm_{}", settings.force_sm ? "forced " : "", caps.sm);
}

std::string cuda_link(const Settings& settings) {
  const cuda::PcieLink link = cuda::read_pcie_link(first_caps(settings).pci);
  return link.width > 0 ? fmt::format("PCIe {}.0 x{}", link.generation, link.width) : "";
}

void add_cuda_probe(const Settings& settings, ProbeFunctions& probe) {
  const cuda::DeviceCaps caps = first_caps(settings);
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
  prepare_cuda();
  const std::optional<std::string> variable = visible_devices_variable();
  if (std::string why = why_none_visible(read_gpus(), variable); !why.empty()) return why;
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count > 0) {
    const VisibleGpus visible = usable_from(devices);
    return visible.usable().empty() ? visible.left_out() : "";
  }
  if (!variable) return devices.why_none;
  return fmt::format("CUDA_VISIBLE_DEVICES is \"{}\": {}", printable(*variable), devices.why_none);
}
#else
namespace {

[[noreturn]] void no_cuda() {
  throw_error(ErrorCode::internal, "this build has no CUDA backend");
}
std::unique_ptr<Backend> make_cuda_backend(const Settings&, int) {
  no_cuda();
}
std::unique_ptr<RankGroup> make_cuda_group(const std::vector<std::unique_ptr<Backend>>&) {
  no_cuda();
}
DeviceNotes cuda_notes(const Settings&) {
  no_cuda();
}
std::vector<AllReduceTiming> time_cuda_all_reduce(const Settings&, int64_t) {
  no_cuda();
}
std::vector<std::string> describe_cuda() {
  return {};
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
std::string cuda_link(const Settings&) {
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

DeviceSet::~DeviceSet() = default;

DeviceSet::DeviceSet(const Settings& settings) {
  const bool on_gpus = settings.device == "cuda";
  if (on_gpus) {
    // What the model allows is said before what the machine has.
    if (settings.tp > 1) Engine::require_world(load_model_spec(settings.model_dir), settings.tp, settings.shard);
    DeviceNotes notes = cuda_notes(settings);
    numa_nodes_ = std::move(notes.numa_nodes);
    banner_ = std::move(notes.banner);
    warnings_ = std::move(notes.warnings);
    pinning_ = cuda_pinning();
  }
  for (int rank = 0; rank < settings.tp; ++rank) backends_.push_back(make_backend(settings, rank));
  for (int rank = 0; rank < settings.tp && settings.cpu_permille > 0; ++rank)
    host_ops_.push_back(make_host_ops(settings));
  if (settings.tp == 1) return;
  group_ = on_gpus ? make_cuda_group(backends_) : std::make_unique<HostGroup>(settings.tp);
  for (int rank = 0; rank < settings.tp; ++rank) ends_.push_back(group_->end(rank));
  if (const std::string text = group_->describe(); !text.empty()) banner_.push_back(text);
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
  devices.numa_nodes = numa_nodes_;
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

std::vector<std::string> describe_gpus() {
  return why_no_cuda().empty() ? describe_cuda() : std::vector<std::string>();
}

std::vector<AllReduceTiming> measure_all_reduce(const Settings& settings, int64_t repeat) {
  OFL_ASSERT(settings.device == "cuda" && settings.tp > 1);
  return time_cuda_all_reduce(settings, repeat);
}

std::string instruction_set(const Settings& settings) {
  if (settings.device == "cuda") return cuda_name(settings);
  OFL_ASSERT(settings.device == "cpu");
  return std::string(cpu::isa_name(cpu::best_isa()));
}

std::string link_text(const Settings& settings) {
  return settings.device == "cuda" ? cuda_link(settings) : "";
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
