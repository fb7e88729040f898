// offload-bench ops: every op case of the tests, and the published shapes, timed on the backend of this build.
#ifndef OFFLOAD_TOOLS_BENCH_OPS_H_
#define OFFLOAD_TOOLS_BENCH_OPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bench_memory.h"
#include "bench_report.h"

namespace offload::tools {

struct CaseChoice {
  std::string op;         // op_name(); empty: all
  std::string name_glob;  // as in a shell, '*' crossing '/'; empty: all
};
// Throws Error{usage} when nothing matches.
std::vector<BenchCase> chosen_cases(const CaseChoice& choice);

// `repeat` samples, each of as many calls as make it long enough for the clock. The hash is of the first call's
// outputs.
BenchRow measure_case(const BenchCase& bench, int64_t repeat, const Settings& settings);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BENCH_OPS_H_
