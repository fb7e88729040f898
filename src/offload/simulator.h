// Simulator: when everything would end if the production policy served a routing trace on a machine of known rates.
//
// Lanes are integer clocks in nanoseconds: compute and copy of each rank, the host's cores, collectives. Each op starts
// when its lane and whatever it waits for are done, in program order; durations are the cost model's, plans are
// ExpertPolicy's, and ExpertCache holds the simulator to them. So a result is a function of the arguments: no wall
// clock, no thread, the same on every host. Does NOT model: reads of the n-gram table from disk, memory contention on a
// device, sampling, or what the host takes to issue anything but experts.
#ifndef OFFLOAD_OFFLOAD_SIMULATOR_H_
#define OFFLOAD_OFFLOAD_SIMULATOR_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

#include "offload/cost_model.h"
#include "offload/expert_policy.h"
#include "offload/routing_trace.h"
#include "offload/step_program.h"
#include "offload/trace.h"

namespace offload {

enum class SimLane : uint8_t { compute, copy, host, collective };
inline constexpr std::array<std::string_view, 4> kSimLaneNames{"compute", "copy", "host", "collective"};

enum class CopyStart : uint8_t {
  in_line,   // no copy lane: a copy takes its turn between the runs
  routed,    // on the copy lane, once the layer is routed; look-ahead as the policy plans it
  foreseen,  // on the copy lane, as if routing were known long before: the bound of any look-ahead
};

enum class PrefillOrder : uint8_t { chunk_major, layer_major };

// `first` simulates rank 0 as if no other rank ever kept it waiting: what published sums per rank assume.
enum class RankScope : uint8_t { all, first };

// Random extra time on ops, for tests: liveness and order must not depend on durations.
struct Stalls {
  uint64_t seed = 1;
  int64_t permille = 0;  // of the ops
  int64_t ns_max = 0;
};

struct SimOptions {
  ShardForm shard = ShardForm::expert;
  RankScope ranks = RankScope::all;
  CopyStart copies = CopyStart::routed;
  PrefillOrder order = PrefillOrder::chunk_major;
  int64_t chunk = 8192;
  // Position of every decode step; 0: after the prompt and the steps before.
  int64_t decode_position = 0;
  // Slots per rank (of slices: as many times smaller), look-ahead and shares off the slab. Shape, world and rank are
  // filled in by the simulator.
  PolicyOptions policy{};
  // Steps of the trace before this one run but do not count.
  int64_t count_from = 0;
  // Nor do so many first decode steps.
  int64_t decode_warm = 0;
  Stalls stalls{};
};

struct PhaseTimes {
  int64_t steps = 0, tokens = 0;
  int64_t ns = 0;                            // from the end of the step before to the end of the last, on compute lanes
  std::array<int64_t, 4> busy_ns{};          // by SimLane, of the busiest rank
  int64_t copied_bytes = 0, host_bytes = 0;  // of all ranks simulated
  PolicyCounts counts;                       // of all ranks simulated

  double tokens_per_s() const { return ns == 0 ? 0 : static_cast<double>(tokens) * 1e9 / static_cast<double>(ns); }
  double ms_per_step() const { return steps == 0 ? 0 : static_cast<double>(ns) * 1e-6 / static_cast<double>(steps); }
  // The lane that is busy longest; faster others would not help below its share of `ns`.
  SimLane bound() const;
};

struct Simulation {
  PhaseTimes prefill, decode;
};

// One op on one lane, for tests. `slot` and `key` are those of expert runs and copies.
struct SimEvent {
  SimLane lane = SimLane::compute;
  int64_t rank = 0;
  std::string_view name;
  int64_t begin_ns = 0, end_ns = 0;
  ExpertKey key{};
  int32_t slot = -1;
};

struct SimOutputs {
  TraceBuffer* trace = nullptr;  // with the lanes of simulation_lanes()
  std::function<void(const SimEvent&)> on_event;
};

// Throws Error: input for a trace of another shape than the model's, usage for options out of range or steps beyond the
// programmer's context.
Simulation simulate(const CostModel& costs, const StepProgrammer& programmer, const SimOptions& options,
                    const RoutingTrace& trace, const SimOutputs& outputs = {});

std::vector<TraceBuffer::Lane> simulation_lanes(int64_t ranks);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_SIMULATOR_H_
