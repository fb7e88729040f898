// offload-bench: prefill and decode of a model, arms interleaved, the first measured again at the end.
//
// The prompt is made up, decoding is greedy, so every run of an arm computes the same: results that differ in a bit end
// the benchmark. Each distinct arm loads the model for itself, side by side.
#ifndef OFFLOAD_TOOLS_BENCH_MODEL_H_
#define OFFLOAD_TOOLS_BENCH_MODEL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_report.h"
#include "offload/engine.h"

namespace offload::tools {

inline constexpr std::string_view kBenchProgram = "offload-bench";

struct ModelBenchOptions {
  std::vector<int64_t> prompt_tokens;  // a run of each length; one where something else than speed is asked for
  int64_t decode_tokens = 0;           // behind each
  int64_t repeat = 0;                  // rounds over all arms
  int64_t warmup = 0;                  // rounds before, not counted
  bool cold_cache = false;             // each prompt finds the expert slots empty
  bool records_routing = false;        // record_routing() may be called
};

struct ModelBenchResult {
  std::vector<BenchRow> rows;  // "prefill/ARM", "decode/ARM", "/2" behind the second of the same arm, "@N" of a length
  std::optional<double> baseline_drift;
  OrderedJson plan;
};

class ModelBench {
 public:
  // One entry per place of --arms: all equal but for the arm. Loads. Throws Error.
  ModelBench(std::vector<Settings> arms, const ModelBenchOptions& options);
  ~ModelBench();

  ModelBenchResult run();

  // Attribution, of the first arm: a run of its own with each op watched.
  struct Profile {
    OpProfile prefill, decode;
    double prefill_s = 0, decode_s = 0;
  };
  Profile profile();

  // The routing of one run of the first arm. Throws Error{usage} when a trace cannot hold it.
  RoutingTrace record_routing();

  // The first arm's engine after a run that its trace alone holds. REQUIRES: its settings ask for a trace.
  Engine& trace();

 private:
  class Runner;
  Runner& runner_of(const Settings& settings);
  void warm_up();

  std::vector<Settings> arms_;
  ModelBenchOptions options_;
  std::vector<std::unique_ptr<Runner>> runners_;  // one per distinct arm
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BENCH_MODEL_H_
