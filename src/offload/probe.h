// Probe: measures the machine it runs on and makes a machine file of it (machine.h).
//
// What needs a backend is handed in as functions, as this library knows none; the rest (files on disk, how the parts
// become rates, which GEMM tile explains small products) is here. The only unit of the planning side that reads a
// clock. Does NOT measure links between devices or collectives yet: the functions describe one device, and where that
// is the host itself, its memory is the device's.
#ifndef OFFLOAD_OFFLOAD_PROBE_H_
#define OFFLOAD_OFFLOAD_PROBE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "offload/machine.h"

namespace offload {

// Each measures anew when called, for a second or so. All are required.
struct ProbeFunctions {
  std::string device_kind;
  int64_t cores = 0;
  int64_t memory_bytes = 0;
  std::function<double()> dram_read_bytes_per_s;
  std::function<double()> fma_flops;
  // One BF16 product [m, k] x [n, k]: the median of several.
  std::function<double(int64_t m, int64_t n, int64_t k)> gemm_seconds;
  // An op with next to nothing to do.
  std::function<double()> launch_seconds;
};

struct ProbeOptions {
  std::string name;       // of the machine
  std::string when;       // goes into the sources: a date, a command
  std::string disk_file;  // read past the page cache; empty: the disk is left out
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
