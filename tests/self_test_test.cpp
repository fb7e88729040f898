// What the GPUs' self-test says, from reports by hand; and one run on the devices that are there.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cuda/self_test.h"

using namespace offload;
using cuda::GpuReport;
using cuda::Reach;
using cuda::SelfTest;

namespace {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

GpuReport turing(int device) {
  GpuReport gpu;
  gpu.caps = {.memory_bytes = int64_t{22} << 30,
              .device = device,
              .name = "RTX 2080 Ti",
              .pci = fmt::format("0000:{}7:00.0", device),
              .uuid = "GPU-1"};
  gpu.link = {3, 16, 3, 16};
  gpu.h2d_bytes_per_s = gpu.h2d_together_bytes_per_s = 11.4 * kGib;
  return gpu;
}

SelfTest good_rig() {
  SelfTest test{.driver = "13.0", .memlock_bytes = {}, .gpus = {turing(0), turing(1)}, .pairs = {}};
  test.pairs.push_back({0, 1, {Reach::peer, ""}});
  return test;
}

bool has(const std::vector<std::string>& lines, std::string_view part) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

}  // namespace

TEST_CASE("a_good_rig_is_described_by_card_link_and_path_and_has_nothing_wrong") {
  const std::vector<std::string> lines = banner(good_rig());
  CHECK(lines.size() == 4);
  CHECK(has(lines, "GPU 1 (RTX 2080 Ti, 0000:17:00.0), GPU-1: sm_75, 22.0 GiB, PCIe 3 x16, host to device 11.4 GiB/s"));
  CHECK(has(lines, "GPUs 0-1: peer access, written and verified"));
  CHECK(has(lines, "driver for CUDA 13.0, no memlock limit"));
  CHECK(findings(good_rig()).empty());
}

TEST_CASE("what_is_wrong_is_said_with_its_place_and_its_remedy") {
  SelfTest test = good_rig();
  test.gpus[1].link = {2, 4, 3, 16};
  test.gpus[1].h2d_bytes_per_s = test.gpus[1].h2d_together_bytes_per_s = 0.9 * kGib;
  test.gpus[0].h2d_together_bytes_per_s = 3 * kGib;
  test.pairs[0].path = {Reach::broken, "12 of 262144 words that device 0 stored to device 1 were lost"};
  const std::vector<std::string> lines = findings(test);
  CHECK(has(lines, "GPU 1 (RTX 2080 Ti, 0000:17:00.0): its link has 4 of 16 lanes; reseat"));
  CHECK(has(lines, "runs as PCIe 2 and could as 3"));
  CHECK(has(lines, "0.9 GiB/s to the device, where PCIe 2 x4 should give"));
  CHECK(has(lines, "all GPUs together copy 3.9 GiB/s, alone they sum to 12.3 GiB/s"));
  CHECK(has(lines, "between GPUs 0 and 1 is broken and not used"));
  CHECK(has(lines, "IOMMU"));
  CHECK(lines.size() == 5);
}

TEST_CASE("a_link_is_read_from_the_system_and_what_it_does_not_say_is_zero") {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / fmt::format("offload-link-{}", getpid());
  const std::filesystem::path folder = root / "sys/bus/pci/devices/0000:17:00.0";
  std::filesystem::create_directories(folder);
  for (const auto& [name, text] :
       {std::pair{"current_link_speed", "8.0 GT/s PCIe"}, std::pair{"max_link_speed", "32.0 GT/s PCIe"},
        std::pair{"current_link_width", "16"}, std::pair{"max_link_width", "255"}, std::pair{"numa_node", "1"}})
    std::ofstream(folder / name) << text << '\n';
  const cuda::PcieLink link = cuda::read_pcie_link("0000:17:00.0", root.string());
  CHECK(link.generation == 3);
  CHECK(link.generation_max == 5);
  CHECK(link.width == 16);
  CHECK(link.width_max == 0);
  CHECK(cuda::read_numa_node("0000:17:00.0", root.string()) == 1);
  std::filesystem::remove_all(root);
  const cuda::PcieLink unknown = cuda::read_pcie_link("0000:17:00.0", root.string());
  CHECK(unknown.generation == 0);
  CHECK(unknown.width == 0);
  CHECK(cuda::read_numa_node("0000:17:00.0", root.string()) == -1);
}

TEST_CASE("the_devices_at_hand_pass_their_self_test") {
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) {
    MESSAGE("skipped: no CUDA device: ", devices.why_none);
    return;
  }
  std::vector<int> all;
  for (int d = 0; d < devices.count; ++d) all.push_back(d);
  const SelfTest test = cuda::run_self_test(all);
  for (const std::string& line : banner(test)) MESSAGE(line);
  for (const std::string& line : findings(test)) MESSAGE("finding: ", line);
  for (const GpuReport& gpu : test.gpus) CHECK(gpu.h2d_bytes_per_s > 1e8);
}
