// StepProgram: what one step of a model consists of, op by op with bytes and flops, without a device.
//
// The production blocks run in planning mode on an Ops that notes what it is asked for, so bytes and flops are those of
// core/op_cost.cpp and the order is that of core/model.cpp. Routed experts are left out: what runs is the policy's
// choice. Does NOT know rates (cost_model.h). Confined to one thread.
#ifndef OFFLOAD_OFFLOAD_STEP_PROGRAM_H_
#define OFFLOAD_OFFLOAD_STEP_PROGRAM_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/experts.h"
#include "core/model_spec.h"
#include "core/ops.h"
#include "core/step.h"
#include "offload/routing_trace.h"

namespace offload {

struct StepOp {
  std::string_view name;
  Cost cost;
  int64_t m = 0, n = 0, k = 0;  // of a matrix product [m, k] x [n, k]; k = 0: none
};
using StepOps = std::vector<StepOp>;

// A layer in the order of section 5 of the design: mixer, all-reduce, router, (shared expert | experts), combine,
// all-reduce, write.
struct LayerProgram {
  StepOps mixer;    // [n-gram embedding], residual read, mixer
  StepOps router;   // residual write and read, router
  StepOps shared;   // shared expert: runs while the host plans
  StepOps combine;  // of the experts' rows
  StepOps write;
};

struct StepProgram {
  int64_t rows = 0;
  int64_t reduce_bytes = 0;                // of each of the two all-reduces of a layer; 0 for one rank
  StepOps prologue{}, epilogue{}, head{};  // head: logits of one row
  std::vector<LayerProgram> layers{};
};

class StepProgrammer {
 public:
  // Rank 0 of `world`. Throws Error{usage} when the model's heads or shared expert do not divide by world, or the
  // context is outside the model's.
  StepProgrammer(const ModelSpec& spec, int64_t world, int64_t context, const Arithmetic& arithmetic = {});
  ~StepProgrammer();

  // `rows` tokens at positions first, first + 1, ... REQUIRES: rows >= 1, first + rows <= context.
  StepProgram program(int64_t rows, int64_t first) const;

  const ModelSpec& spec() const { return spec_; }
  int64_t world() const { return world_; }
  int64_t context() const { return context_; }
  RoutingShape routing_shape() const;
  ExpertShape expert_shape() const;
  int64_t weight_bytes() const { return weight_bytes_; }      // dense weights of one rank
  int64_t sequence_bytes() const { return sequence_bytes_; }  // state of one sequence of `context` positions
  int64_t workspace_bytes(int64_t rows) const;                // activations of one step, without op scratch
  // What `tokens` that pass each layer together, in chunks, take beyond the workspace of one chunk: mostly residual
  // stacks. 0 for no more than a chunk.
  int64_t stack_bytes(int64_t tokens, int64_t chunk) const;

 private:
  struct Planned;

  StepProgram run(int64_t rows, int64_t first, int64_t chunk, int64_t& peak_bytes) const;

  ModelSpec spec_;
  int64_t world_, context_;
  Arithmetic arithmetic_;
  std::unique_ptr<Planned> planned_;
  int64_t weight_bytes_ = 0, sequence_bytes_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_STEP_PROGRAM_H_
