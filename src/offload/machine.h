// Machine: what a computer can do, as rates; read from a machine file that offload-probe wrote or a person filled in.
//
// A value. The reader refuses, by name, unknown keys, absent required ones and numbers outside their range, so that a
// machine in hand never divides by zero or overflows a clock. Does NOT measure (probe.h) nor turn rates into durations
// (cost_model.h).
#ifndef OFFLOAD_OFFLOAD_MACHINE_H_
#define OFFLOAD_OFFLOAD_MACHINE_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace offload {

// What rates and sizes are stated in.
inline constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

enum class GemmMath : uint8_t { bf16, fp16 };
inline constexpr std::array<std::string_view, 2> kGemmMathNames{"bf16", "fp16"};

// Rates are in SI: bytes/s, flop/s, seconds; an FMA is two flops.
struct DeviceRates {
  std::string kind;
  int64_t count = 1;
  int64_t memory_bytes = 0;
  double memory_bytes_per_s = 0;       // streaming read
  std::array<double, 2> gemm_flops{};  // by GemmMath, of a large GEMM
  int64_t compute_units = 1;           // what a GEMM's tiles are dealt to: SMs, cores
  int64_t tile_rows = 128, tile_columns = 128;
  double gemv_efficiency = 1;  // share of memory_bytes_per_s that a product of few rows reaches
  double launch_gap_s = 0;     // between the starts of two ops that do nothing
};

struct LinkRates {
  double h2d_bytes_per_s =
      0;                // pinned, one device alone; 0: experts lie where the device reads them, nothing is copied
  double additive = 1;  // share of its own rate that each further device adds
  double copy_overhead_s = 0;  // per copy
};

struct HostRates {
  int64_t ram_bytes = 0;                 // 0: not known
  int64_t cores = 0;                     // 0: not known
  double dram_bytes_per_s = 0;           // all cores reading; 0: not known, so no expert runs on the host
  double dram_with_h2d_bytes_per_s = 0;  // the same while every link copies; 0: as without
  double fma_flops = 0;                  // FP32, all cores; 0: not known
  double wait_s = 0;                     // from the end of a device op until the host goes on
  double plan_s = 0;                     // from a layer's routing to the first thing issued for it
  double launch_s = 0;                   // to issue one batch of experts
  double pin_bytes_per_s = 0;            // first touch and pinning of fresh memory; 0: not known
};

// Duration of an all-reduce of so many bytes over the machine's devices.
struct CollectivePoint {
  int64_t bytes = 0;
  double duration_s = 0;
};

// Sums over one decode step of one rank that were measured for one model; they replace what the roofs say for it.
struct Calibration {
  std::string model_type;
  int64_t hidden = 0, layers = 0, experts = 0;  // name the model
  int64_t world = 1, context = 0;
  double dense_s = 0;      // every matrix product but experts and lm_head
  double attention_s = 0;  // every other op
  double lm_head_s = 0;
  double experts_s = 0;  // of `expert_runs` runs out of device memory
  int64_t expert_runs = 0;
};

struct Machine {
  std::string name;
  DeviceRates device;
  LinkRates link;
  HostRates host;
  double disk_bytes_per_s = 0;              // 0: not known
  std::vector<CollectivePoint> collective;  // by ascending bytes; empty: one device
  std::optional<Calibration> calibration;
  std::map<std::string, std::string> sources;  // dotted field name -> where the number comes from
};

// Throws Error{input} naming origin, field, what was expected and what was found.
Machine parse_machine(std::string_view text, std::string_view origin);
// Throws Error{input}, also for what the system says.
Machine read_machine(const std::string& path);
// The file's text; parse_machine() gives the same machine up to the rounding of units.
std::string machine_text(const Machine& machine);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_MACHINE_H_
