// CpuOps: every op on the host's cores, with vector kernels chosen at run time.
//
// Owns nothing but its options: memory belongs to the caller, temporary memory to set_scratch(). Each op splits its
// output over an OpenMP team of `threads` (by clause, so several CpuOps on several threads have their own teams); every
// output element is computed whole by one thread, in an order that depends on the shapes and the ISA level alone, so
// the bits never depend on `threads`. Canonical products (core/canonical.h) have the same bits at every level.
// It never allocates while executing, beyond what OpenMP takes for its team on the first call and the lists of
// swiglu_routed, which grow to the largest step. Host memory only.
#ifndef OFFLOAD_CPU_CPU_OPS_H_
#define OFFLOAD_CPU_CPU_OPS_H_

#include <vector>

#include "core/ops.h"
#include "cpu/cpu_gemm.h"

namespace offload::cpu {

struct CpuOpsOptions {
  int threads = 1;
  Isa isa = best_isa();
};

class CpuOps final : public Ops {
 public:
  // REQUIRES: threads >= 1, isa <= best_isa().
  explicit CpuOps(CpuOpsOptions options);

 protected:
#define OFL_OVERRIDE_EXECUTE(Args, name) void execute(const Args& args) override;
  OFL_FOR_EACH_OP(OFL_OVERRIDE_EXECUTE)
#undef OFL_OVERRIDE_EXECUTE
  using Ops::scratch_bytes;  // 0 for the ops not named here
  int64_t scratch_bytes(const LinearArgs& args) const override;
  int64_t scratch_bytes(const HyperReadArgs& args) const override;
  int64_t scratch_bytes(const CausalConvSiluArgs& args) const override;
  int64_t scratch_bytes(const GatedDeltaArgs& args) const override;
  int64_t scratch_bytes(const BlockScoresArgs& args) const override;
  int64_t scratch_bytes(const BlockTopkArgs& args) const override;
  int64_t scratch_bytes(const AttentionArgs& args) const override;
  int64_t scratch_bytes(const RouterTopkArgs& args) const override;
  int64_t scratch_bytes(const SwigluExpertsArgs& args) const override;
  int64_t scratch_bytes(const SwigluRoutedArgs& args) const override;

 private:
  Arena scratch_arena() const;

  int threads_;
  const CpuKernels& kernels_;
  // Of swiglu_routed; they grow to the size of the largest step.
  std::vector<ExpertRun> runs_;
  std::vector<int32_t> rows_, out_rows_;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_OPS_H_
