// RefOps: the naive reference of every op, the oracle that each backend is compared with.
//
// It reads like the contracts in core/ops.h: sums and transcendental functions in double, and a rounding exactly where
// the formula has one. It shares no code with the fast kernels, needs no scratch, knows no canonical order and is slow.
// GatedDeltaArgs::chunk_rows is ignored: the recurrence is also the oracle of the chunked form. Host memory only.
#ifndef OFFLOAD_CPU_REF_OPS_H_
#define OFFLOAD_CPU_REF_OPS_H_

#include "core/ops.h"

namespace offload::cpu {

class RefOps final : public Ops {
 protected:
#define OFL_OVERRIDE_EXECUTE(Args, name) void execute(const Args& args) override;
  OFL_FOR_EACH_OP(OFL_OVERRIDE_EXECUTE)
#undef OFL_OVERRIDE_EXECUTE
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_REF_OPS_H_
