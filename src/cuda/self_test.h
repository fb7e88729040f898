// SelfTest: what a start should know of the GPUs that it is about to use: how each is linked, how fast bytes get there,
// alone and together, which reach each other's memory, and what of it is wrong.
//
// run_self_test() measures for about a tenth of a second a GPU; the rest is pure. What is wrong is said with its remedy
// and is no error: the backend works around it.
#ifndef OFFLOAD_CUDA_SELF_TEST_H_
#define OFFLOAD_CUDA_SELF_TEST_H_

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/peer_path.h"

namespace offload::cuda {

// A PCIe link as the kernel sees it; 0 where it says nothing.
struct PcieLink {
  int generation = 0, width = 0, generation_max = 0, width_max = 0;
};
// From /sys/bus/pci/devices/PCI below `root`. A GPU lowers its link's generation while it is idle.
PcieLink read_pcie_link(const std::string& pci, const std::string& root = "/");
// The system's number of the node; -1 where it names none.
int read_numa_node(const std::string& pci, const std::string& root = "/");

struct GpuReport {
  DeviceCaps caps;
  PcieLink link;
  int numa_node = -1;
  double h2d_bytes_per_s = 0;           // page-locked, alone
  double h2d_together_bytes_per_s = 0;  // while every GPU of the report copies
};

struct PairReport {
  int a = 0, b = 0;  // devices
  PeerPath path;
};

struct SelfTest {
  std::string driver;                    // "13.0": the newest CUDA that it knows
  std::optional<int64_t> memlock_bytes;  // RLIMIT_MEMLOCK; nothing: unlimited
  std::vector<GpuReport> gpus;
  std::vector<PairReport> pairs;
};

struct SelfTestOptions {
  std::function<PeerPath(int a, int b)> prove_path = prove_peer_path;
  std::string root = "/";
};
// Of `devices`, which differ. Throws Error{device, resource}.
SelfTest run_self_test(std::span<const int> devices, const SelfTestOptions& options = {});

// One line for each GPU, one for each kind of path between them, one for the rest.
std::vector<std::string> banner(const SelfTest& test);
// What is wrong and what to do about it, one line each.
std::vector<std::string> findings(const SelfTest& test);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_SELF_TEST_H_
