// The suite's machinery, run with the reference against itself, and values worked out by hand.
#include <doctest/doctest.h>

#include "cpu/ref_ops.h"
#include "op_suite.h"

using namespace offload;

TEST_CASE("the_reference_agrees_with_itself_on_every_case") {
  cpu::RefOps ops;
  HostMirror mirror;
  for (const OpCase& test : all_op_cases()) {
    const CaseResult result = run_case(test, ops, mirror);
    CHECK_MESSAGE(result.passed(), result.failure);
    CHECK(result.error_over_bound == 0);
  }
}
