// The door to the backends: which exist in this build, and how one is made.
#ifndef OFFLOAD_TOOLS_BACKENDS_H_
#define OFFLOAD_TOOLS_BACKENDS_H_

#include <memory>
#include <string>
#include <vector>

#include "common.h"
#include "core/backend.h"
#include "core/collective.h"
#include "offload/probe.h"
#include "offload/roofs.h"

namespace offload::tools {

// Why "--device auto" does not mean cuda here, in one line; empty where it does.
std::string why_no_cuda();

// REQUIRES: settings from settings_of().
std::unique_ptr<Backend> make_backend(const Settings& settings, int rank = 0);

class RankGroup;

// One backend per rank and what joins them. Outlives the engine.
class DeviceSet {
 public:
  // Throws Error: usage where the model or the GPUs cannot be had as settings ask.
  explicit DeviceSet(const Settings& settings);
  ~DeviceSet();
  Devices devices() const;
  // What the devices are and how they are linked, for a log; and what is wrong with that. None on a CPU.
  const std::vector<std::string>& banner() const { return banner_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Of the ops of all ranks since the last reset, on devices and on the host beside them.
  Cost total_cost() const;
  void reset_cost();
  // Watches rank 0's device; null: none.
  void set_observer(OpObserver* observer);

 private:
  PinHooks pinning_;
  std::vector<int> numa_nodes_;
  std::vector<std::string> banner_, warnings_;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::unique_ptr<Ops>> host_ops_;
  std::unique_ptr<RankGroup> group_;
  std::vector<std::unique_ptr<Collective>> ends_;
};

// What the device can do at most, measured now, with settings.threads on a CPU. Takes seconds.
Roofs measure_roofs(const Settings& settings);

// One way of an all-reduce over settings.tp ranks, at one size.
struct AllReduceTiming {
  std::string name;  // "all_reduce/waiting/peer/10240"
  int64_t bytes = 0;
  std::vector<double> seconds = {};  // one per measurement
};
// Every way that the ranks' devices have, with and without the memory that they reach of one another. `repeat`
// measurements of several calls each. REQUIRES: settings.tp > 1 on GPUs.
std::vector<AllReduceTiming> measure_all_reduce(const Settings& settings, int64_t repeat);

// "avx2", "NVIDIA H200, plans of sm_75", ...: the kernels that make_backend's backend uses.
std::string instruction_set(const Settings& settings);

// "PCIe 3.0 x16" of rank 0's GPU now; a GPU lowers its link while it is idle. Empty on a CPU, or where nothing is
// known.
std::string link_text(const Settings& settings);

// What plans the kernels, for evidence: "cpu", "cuda sm_90", "cuda forced sm_75".
std::string device_plan(const Settings& settings);

// What the GPUs' self-test says of every one that this process sees, wrong things last; none without GPUs.
std::vector<std::string> describe_gpus();

// Measurements of the device and of settings.threads of this host's cores.
ProbeFunctions probe_functions(const Settings& settings);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BACKENDS_H_
