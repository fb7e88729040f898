// The list of op cases: one set of shapes, values and tolerances for the tests and the benchmarks of every backend.
//
// A case names its tensors and how to fill them, and builds the op's arguments from pointers that the caller provides,
// on the host or on a device. It knows nothing of test frameworks or of where memory lives. Values are a function of
// the case's name alone. Thread-safe: no state.
#ifndef OFFLOAD_TESTS_OP_CASES_H_
#define OFFLOAD_TESTS_OP_CASES_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/ops.h"

namespace offload {

// A small deterministic generator (splitmix64), so that values do not depend on a standard library.
class CaseRandom {
 public:
  explicit CaseRandom(std::string_view seed);
  uint64_t bits();
  double uniform();              // [0, 1)
  double normal();               // N(0, 1)
  int64_t below(int64_t count);  // 0 .. count - 1

 private:
  uint64_t state_;
};

// Writes the elements of a tensor's logical shape, row-major; the caller rounds them to the dtype. NaN becomes the
// poison pattern (see op_suite.h).
using Fill = std::function<void(CaseRandom&, std::span<double>)>;

Fill normal(double scale = 1.0, double mean = 0.0);
Fill constant(double value);
Fill literal(std::vector<double> values);  // REQUIRES: as many as the tensor has elements

// What a tensor holds before and after the op: input is filled and must not change, output is poisoned and compared,
// inout is filled and compared.
enum class Role : uint8_t { input, output, inout };

struct CaseTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  Role role = Role::input;
  Fill fill;                          // of input and inout
  std::vector<int64_t> storage = {};  // shape of the allocation when it is larger (a strided view); empty: contiguous
};

// How far an output may be from the reference: |actual - expected| <= relative * |expected| + scaled * s, and for BF16
// outputs + ulps * ulp(expected) + scaled_ulps * ulp(s), where s is the largest |expected| of the output tensor and
// ulp(v) is BF16's step at v. Integers and NaN must be equal always. The instances are in op_cases.cpp with their
// derivations; they are frozen: fix the kernel, not the tolerance.
struct Tolerance {
  std::string_view name;
  double relative = 0;
  double scaled = 0;
  double ulps = 0;
  double scaled_ulps = 0;
};

struct OpCase {
  std::string op;    // op_name()
  std::string name;  // unique: "linear/bf16/m=8,n=70,k=130"
  std::vector<CaseTensor> tensors;
  // Builds the op's arguments from one pointer per entry of `tensors`, in that order, and calls ops(args).
  std::function<void(Ops&, std::span<const Tensor>)> run;
  Tolerance tolerance;
};

// All cases, in a fixed order.
std::vector<OpCase> all_op_cases();
// The cases of one op; empty when the name is unknown.
std::vector<OpCase> op_cases(std::string_view op);

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_CASES_H_
