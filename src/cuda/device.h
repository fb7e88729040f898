// What a CUDA device can do, as plain data that plans decide by, and the check of every runtime call.
//
// Owns nothing. DeviceCaps is a value: a plan for an RTX 2080 Ti can be made, tested and run anywhere. Does NOT
// measure: rates belong to the probe.
#ifndef OFFLOAD_CUDA_DEVICE_H_
#define OFFLOAD_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base.h"

namespace offload::cuda {

// The oldest generation that the kernels are written for (Turing).
inline constexpr int kSmMin = 75;

struct DeviceCaps {
  int sm = kSmMin;  // what plans go by: the least of the device, the build and --force-sm; 75, 80, 86, 90, ...
  int multiprocessors = 68;
  int64_t shared_bytes = 64 << 10;  // per block, with opt-in
  int64_t memory_bytes = 0;
  bool is_90a = false;      // whether the kernels that run are compiled for exactly this Hopper card
  bool is_cuda_13 = false;  // driver and toolkit, or newer
  int device = 0;           // ordinal
  int device_sm = 75;       // of the hardware
  std::string name = {};    // "NVIDIA GeForce RTX 2080 Ti"
  std::string pci = {};     // "0000:17:00.0"
  std::string uuid = {};    // "GPU-1a2b3c4d-..."
  // Registered host memory, at the addresses that the host has it at.
  bool reads_pinned_memory = true;

  bool has_bf16_mma() const { return sm >= 80; }
  // Kernels that start while the previous one still runs, also from graphs and where their blocks wait for each other.
  bool starts_early() const { return sm >= 90 && is_cuda_13; }
  // Matrix instructions of warpgroups.
  bool has_wgmma() const { return sm == 90 && is_90a; }
};

// The caps that an RTX 2080 Ti has, or `caps` held to what an `sm` card of its generation offers.
DeviceCaps forced_to(DeviceCaps caps, int sm);

// Where kernels are queued, and whether the device lets those of launch_early() (kernel.cuh) start before the one in
// front of them has ended.
struct Queue {
  cudaStream_t stream = nullptr;
  bool starts_early = false;

  operator cudaStream_t() const { return stream; }  // NOLINT(google-explicit-constructor): for the CUDA runtime
};

// CUDA devices that this process sees; 0 without a driver. `why_none` then says why in one line.
struct DeviceCount {
  int count = 0;
  std::vector<int> sms = {};  // of each, also those older than kSmMin
  std::string why_none = {};
};
DeviceCount count_devices();

// Throws Error{usage} for an ordinal that does not exist or a device older than kSmMin, Error{device}.
DeviceCaps query_device(int ordinal, std::optional<int> force_sm);

// Throws Error{device} "what: name (code)", or Error{resource} when the device is out of memory.
void check(cudaError_t status, const char* what);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_DEVICE_H_
