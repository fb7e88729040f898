// Probe: measures the machine it runs on and makes a machine file of it (machine.h).
//
// What needs a backend is handed in as functions, as this library knows none; the rest (files on disk, how the parts
// become rates, which GEMM tile explains small products) is here. The only unit of the planning side that reads a
// clock. Does NOT measure links between devices or collectives yet: the functions describe one device.
#ifndef OFFLOAD_OFFLOAD_PROBE_H_
#define OFFLOAD_OFFLOAD_PROBE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "offload/machine.h"
#include "offload/pinning.h"

namespace offload {

// Each function measures anew when called, for a second or so; all are required unless said otherwise.
struct HostProbe {
  int64_t cores = 0;
  int64_t memory_bytes = 0;
  std::function<double()> dram_read_bytes_per_s;
  std::function<double()> fma_flops;
};

struct DeviceProbe {
  std::string kind;
  int64_t memory_bytes = 0;
  int64_t compute_units = 0;
  std::function<double()> memory_read_bytes_per_s;  // empty: the host's memory is the device's
  int64_t large_product = 1024;                     // rows, columns and depth of a product that fills the device
  // The products of that size, at the best of the device's library or kernels.
  std::function<double(GemmMath math, int64_t size)> large_gemm_seconds;
  // One BF16 product [m, k] x [n, k] as the model's ops do it: the median of several.
  std::function<double(int64_t m, int64_t n, int64_t k)> gemm_seconds;
  std::function<double()> launch_seconds;  // of an op with next to nothing to do
};

// Between the host and a device with memory of its own.
struct LinkProbe {
  std::function<double(int64_t bytes)> copy_seconds;            // of one copy in a row of them, from pinned memory
  std::function<double()> dram_read_while_copying_bytes_per_s;  // the host's cores, beside copies without end
  std::function<double()> wait_seconds;                         // a device op with little to do and a wait for it
  PinHooks pinning;
};

struct ProbeFunctions {
  HostProbe host;
  DeviceProbe device;
  std::optional<LinkProbe> link;
};

struct ProbeOptions {
  std::string name;       // of the machine
  std::string when;       // goes into the sources: a date, a command
  std::string disk_file;  // read past the page cache; empty: the disk is left out
  int64_t pin_bytes = 0;  // of host memory to touch and pin where there is a link; 0: left out
};

// `progress` is told what is measured next; it may throw to stop. Throws Error: resource when a measurement gives no
// sensible number, input for the disk file.
Machine probe_machine(const ProbeFunctions& functions, const ProbeOptions& options,
                      const std::function<void(std::string_view what)>& progress = {});

struct GemmTiming {
  int64_t m = 0, n = 0, k = 0;
  double seconds = 0;
};
// The tile, of powers of two, with which the cost model's fill rule comes nearest to the timings (least sum of squared
// logarithms of the ratio; the smaller tile on a tie). Sets device.tile_rows and tile_columns.
void fit_tile(DeviceRates& device, const std::vector<GemmTiming>& timings);

// Reads up to `bytes_max` bytes of a file past the page cache, from several threads. Throws Error{input} naming the
// path and the reason.
struct DiskRate {
  double bytes_per_s = 0;
  bool is_direct = false;  // false: the file system refuses direct reads; its cached pages were dropped first
};
DiskRate measure_disk_read(const std::string& path, int64_t bytes_max);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PROBE_H_
