// The rate of loading the routed experts beside the rate at which the disk delivers the same files.
//
// Writes nothing. The plain rate is measured by code that shares nothing with the loader: one queue of sequential
// O_DIRECT reads whose bytes are dropped. Needs the memory of a real load.
#ifndef OFFLOAD_OFFLOAD_LOAD_BENCH_H_
#define OFFLOAD_OFFLOAD_LOAD_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "offload/residency.h"

namespace offload {

struct LoadBenchOptions {
  ResidencyOptions residency = {};
  ResidencyLoadOptions load = {};
  int repeat = 3;  // rounds; interleaved so that a change of the disk's mood meets both
};

struct LoadBenchRound {
  double plain_bytes_per_s = 0;
  // Experts' bytes over a whole load. The first load takes its memory from the system, which has to clear it; a virtual
  // machine's host may have to find it first. The reload fills the same memory again: reading and placing alone.
  double load_bytes_per_s = 0;
  double reload_bytes_per_s = 0;
};

struct LoadBenchResult {
  std::vector<LoadBenchRound> rounds;
  int64_t file_bytes = 0;                            // read by a plain pass
  int64_t expert_bytes = 0;                          // of all shards
  int64_t staging_bytes = 0;                         // the loader's bound beside the shards
  int64_t rss_before_bytes = 0, rss_peak_bytes = 0;  // of the process, before and at the top of the loads
  uint64_t checksum = 0;                             // of all shards of the last round
  ReadReport read = {};
};

// Median over the rounds of reload / plain: what the loader makes of the disk.
double load_efficiency(const LoadBenchResult& result);

// Reads all files of `checkpoint` and loads its experts, cold, `repeat` times. Throws what a load throws.
LoadBenchResult load_bench(const Checkpoint& checkpoint, const std::vector<ExpertLayer>& layers,
                           const ExpertShape& shape, const LoadBenchOptions& options);

// The same for the experts of the model in `model_dir`.
LoadBenchResult load_bench(const std::string& model_dir, const LoadBenchOptions& options);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_LOAD_BENCH_H_
