// The op-level traps on the reference.
#include "op_traps.h"

#include <doctest/doctest.h>

#include "cpu/ref_ops.h"

namespace offload::op_traps_test {

#define OFL_TRAP_TEST(name)       \
  TEST_CASE(#name) {              \
    cpu::RefOps ops;              \
    HostMirror mirror;            \
    OpValues values(ops, mirror); \
    name(values);                 \
  }
OFL_FOR_EACH_OP_TRAP(OFL_TRAP_TEST)

}  // namespace offload::op_traps_test
