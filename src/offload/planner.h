// Planner: which chunk, slots, shard form, look-ahead, prefill order and host share serve a model best on a machine.
//
// A search with the simulator as judge: every candidate runs the production policy over the same routing trace, so the
// choice is as good as the machine file and the trace. Pure and deterministic. Does NOT load a model, read files or
// change an engine; an arithmetic arm is the caller's choice, never the planner's.
#ifndef OFFLOAD_OFFLOAD_PLANNER_H_
#define OFFLOAD_OFFLOAD_PLANNER_H_

#include <functional>
#include <string>
#include <vector>

#include "offload/simulator.h"

namespace offload {

struct PlanRequest {
  int64_t world = 1;
  GemmMath math = GemmMath::bf16;
  int64_t vram_bytes = 0;  // of each rank; 0: the device's memory
  // The request that is to be served soonest: its prompt, then so many tokens.
  int64_t prompt_tokens = 8192, decode_tokens = 256;
};

// Bytes of one rank.
struct PlanMemory {
  int64_t budget = 0;
  int64_t reserve = 0;  // device context and libraries
  int64_t weights = 0, sequence = 0, workspace = 0;
  int64_t stacks = 0;  // residual stacks of the whole prompt, for prefill by layers
  int64_t slots = 0;

  int64_t total() const { return reserve + weights + sequence + workspace + stacks + slots; }
};

// What one input of the machine file improved by a tenth would gain.
struct Lever {
  std::string input;        // as the file names it, or "vram"
  double prefill_gain = 0;  // in tokens/s, as a share
  double decode_gain = 0;
  double request_gain = 0;  // in time of the whole request
};

struct Plan {
  SimOptions options;
  PlanMemory memory;
  int64_t prefill_group = 0;  // prompt tokens that pass each layer together
  int64_t slot_bytes = 0;
  int64_t experts_per_rank = 0;  // slots that would hold all of the rank's experts or slices
  bool is_calibrated = false;
  Simulation predicted;
  double request_s = 0;  // prompt and tokens at the predicted rates
  int64_t candidates = 0;
  std::vector<Lever> levers;       // by falling request_gain
  std::vector<std::string> notes;  // what was not searched and why; one line each
};

// `trace` has the model's shape, prefill steps and decode steps; half of the decode steps warm the cache and are not
// counted. `progress` is told after each simulation; it may throw to stop. Throws Error: usage for a request that the
// machine or the model cannot meet, resource when nothing fits, with the sum.
Plan plan_serving(const Machine& machine, const ModelSpec& spec, const PlanRequest& request, const RoutingTrace& trace,
                  const std::function<void()>& progress = {});

// A prompt as one step and 96 decode steps, drawn like real traffic.
RoutingTrace draw_planning_trace(const RoutingShape& shape, int64_t prompt_tokens, uint64_t seed);

// For people: the choice, why, and what would help next. Several lines.
std::string plan_text(const Plan& plan, const Machine& machine, const ModelSpec& spec, const PlanRequest& request);
OrderedJson plan_json(const Plan& plan, const PlanRequest& request);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PLANNER_H_
