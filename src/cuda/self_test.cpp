#include "cuda/self_test.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "cuda/device_memory.h"

namespace offload::cuda {
namespace {

constexpr int64_t kPieceBytes = int64_t{32} << 20;
constexpr int kPieces = 8;
constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
// Measured against these, a link that is as it should be reaches 0.8 to 0.9 (FACTS: 51.7 GiB/s of PCIe 5 x16).
constexpr double kLinkShareMin = 0.7;
// Two links of one host were measured at 0.92 of their sum.
constexpr double kTogetherShareMin = 0.7;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string pci_file(const std::string& pci, const std::string& root, const char* name) {
  return first_line(fmt::format("{}/sys/bus/pci/devices/{}/{}", root, pci, name));
}

// "16.0 GT/s PCIe" is generation 4.
int generation_of(const std::string& speed) {
  const double transfers = std::atof(speed.c_str());
  int generation = 0;
  for (const double of_next : {2.5, 5.0, 8.0, 16.0, 32.0, 64.0}) {
    if (transfers < of_next - 0.1) break;
    ++generation;
  }
  return generation;
}

// Of user data, at most: 128b/130b coding from generation 3 on, 8b/10b before.
double link_bytes_per_s(int generation, int width) {
  constexpr double kLaneBytes[] = {0, 250e6, 500e6, 985e6, 1969e6, 3938e6, 7563e6};
  return kLaneBytes[std::clamp(generation, 0, 6)] * width;
}

// One GPU's copies.
class Copies {
 public:
  explicit Copies(int device) : device_(device), stream_(device), memory_(device, kPieceBytes) {
    const DeviceScope scope(device);
    host_ = PinnedMemory(kPieceBytes);
  }
  void start() const {
    const DeviceScope scope(device_);
    for (int i = 0; i < kPieces; ++i)
      check(cudaMemcpyAsync(memory_.as<void>(), host_.as<void>(), kPieceBytes, cudaMemcpyHostToDevice, stream_.get()),
            "copying to the device");
  }
  void finish() const { stream_.sync(); }

 private:
  int device_;
  DeviceStream stream_;
  DeviceMemory memory_;
  PinnedMemory host_;
};

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Once all wait on their host threads alone, so their sum counts and each has an equal part of it.
void measure_links(std::vector<GpuReport>& gpus, const std::string& root) {
  constexpr double kCopied = static_cast<double>(kPieceBytes) * kPieces;
  std::vector<Copies> all;
  all.reserve(gpus.size());
  for (const GpuReport& gpu : gpus) all.emplace_back(gpu.caps.device);
  const auto run_all = [&] {
    for (const Copies& copies : all) copies.start();
    for (const Copies& copies : all) copies.finish();
  };
  run_all();  // links wake up
  for (size_t i = 0; i < gpus.size(); ++i) {
    gpus[i].h2d_bytes_per_s = kCopied / seconds_of([&] {
                                all[i].start();
                                all[i].finish();
                              });
    gpus[i].link = read_pcie_link(gpus[i].caps.pci, root);
  }
  const double together = kCopied / seconds_of(run_all);
  for (GpuReport& gpu : gpus) gpu.h2d_together_bytes_per_s = together;
}

std::string gib_per_s(double bytes_per_s) {
  return fmt::format("{:.1f} GiB/s", bytes_per_s / kGib);
}

std::string gpu_text(const GpuReport& gpu) {
  return fmt::format("GPU {} ({}, {})", gpu.caps.device, gpu.caps.name, gpu.caps.pci);
}

}  // namespace

PcieLink read_pcie_link(const std::string& pci, const std::string& root) {
  const auto number = [&](const char* name) { return std::atoi(pci_file(pci, root, name).c_str()); };
  // An unplugged or unknown link reads as width 255.
  const auto width = [&](const char* name) { return number(name) > 64 ? 0 : number(name); };
  return {generation_of(pci_file(pci, root, "current_link_speed")), width("current_link_width"),
          generation_of(pci_file(pci, root, "max_link_speed")), width("max_link_width")};
}

int read_numa_node(const std::string& pci, const std::string& root) {
  const std::string line = pci_file(pci, root, "numa_node");
  return line.empty() ? -1 : std::atoi(line.c_str());
}

SelfTest run_self_test(std::span<const int> devices, const SelfTestOptions& options) {
  SelfTest test;
  int version = 0;
  check(cudaDriverGetVersion(&version), "asking for the driver's version");
  test.driver = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    test.memlock_bytes = static_cast<int64_t>(limit.rlim_cur);
  for (const int device : devices) {
    GpuReport gpu{.caps = query_device(device, {}), .link = {}};
    gpu.numa_node = read_numa_node(gpu.caps.pci, options.root);
    test.gpus.push_back(std::move(gpu));
  }
  measure_links(test.gpus, options.root);
  for (size_t a = 0; a < devices.size(); ++a)
    for (size_t b = a + 1; b < devices.size(); ++b)
      test.pairs.push_back({devices[a], devices[b], options.prove_path(devices[a], devices[b])});
  return test;
}

std::vector<std::string> banner(const SelfTest& test) {
  std::vector<std::string> lines;
  for (const GpuReport& gpu : test.gpus) {
    const PcieLink& link = gpu.link;
    lines.push_back(fmt::format(
        "{}, {}: sm_{}, {:.1f} GiB, {}{}host to device {}{}", gpu_text(gpu), gpu.caps.uuid, gpu.caps.device_sm,
        static_cast<double>(gpu.caps.memory_bytes) / kGib,
        link.generation > 0 && link.width > 0 ? fmt::format("PCIe {} x{}, ", link.generation, link.width) : "",
        gpu.numa_node >= 0 ? fmt::format("NUMA node {}, ", gpu.numa_node) : "", gib_per_s(gpu.h2d_bytes_per_s),
        test.gpus.size() > 1 ? fmt::format(", {} while all copy", gib_per_s(gpu.h2d_together_bytes_per_s)) : ""));
  }
  for (const Reach reach : {Reach::peer, Reach::absent, Reach::broken}) {
    std::vector<std::string> pairs;
    for (const PairReport& pair : test.pairs)
      if (pair.path.reach == reach) pairs.push_back(fmt::format("{}-{}", pair.a, pair.b));
    if (!pairs.empty()) lines.push_back(fmt::format("GPUs {}: {}", fmt::join(pairs, ", "), reach_name(reach)));
  }
  lines.push_back(fmt::format(
      "driver for CUDA {}, {}", test.driver,
      test.memlock_bytes ? fmt::format("memlock limit {:.1f} MiB", static_cast<double>(*test.memlock_bytes) / (1 << 20))
                         : std::string("no memlock limit")));
  return lines;
}

std::vector<std::string> findings(const SelfTest& test) {
  std::vector<std::string> lines;
  double alone = 0, together = 0;
  for (const GpuReport& gpu : test.gpus) {
    const PcieLink& link = gpu.link;
    alone += gpu.h2d_bytes_per_s;
    together += gpu.h2d_together_bytes_per_s;
    if (link.width > 0 && link.width < link.width_max)
      lines.push_back(fmt::format("{}: its link has {} of {} lanes; reseat the card, or use a slot or riser with all",
                                  gpu_text(gpu), link.width, link.width_max));
    if (link.generation > 0 && link.generation < link.generation_max)
      lines.push_back(
          fmt::format("{}: its link runs as PCIe {} and could as {}; look at the slot, the riser and the "
                      "firmware's setting",
                      gpu_text(gpu), link.generation, link.generation_max));
    const double roof = link_bytes_per_s(link.generation, link.width);
    if (gpu.h2d_bytes_per_s < kLinkShareMin * roof)
      lines.push_back(fmt::format(
          "{}: {} to the device, where PCIe {} x{} should give {}; is something else copying, "
          "or the memory on another socket?",
          gpu_text(gpu), gib_per_s(gpu.h2d_bytes_per_s), link.generation, link.width, gib_per_s(0.85 * roof)));
  }
  if (test.gpus.size() > 1 && together < kTogetherShareMin * alone)
    lines.push_back(
        fmt::format("all GPUs together copy {}, alone they sum to {}: they share a switch, a chipset's link "
                    "or too few memory channels; use slots of the processor",
                    gib_per_s(together), gib_per_s(alone)));
  for (const PairReport& pair : test.pairs)
    if (pair.path.reach == Reach::broken)
      lines.push_back(
          fmt::format("peer access between GPUs {} and {} is broken and not used, numbers go through host "
                      "memory: {}; ACS or an IOMMU that translates is the usual cause: turn them off in "
                      "the firmware, or boot with iommu=pt",
                      pair.a, pair.b, pair.path.why));
  return lines;
}

}  // namespace offload::cuda
