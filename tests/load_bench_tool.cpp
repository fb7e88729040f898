// load_bench_tool make DIR LAYERS EXPERTS HIDDEN INTERMEDIATE FILES [fused]
// load_bench_tool run DIR LAYERS EXPERTS HIDDEN INTERMEDIATE THREADS FORM(expert|slice) WORLD [REPEAT CHUNK_KIB DEPTH]
#include <cstdio>
#include <string>

#include "offload/budget.h"
#include "offload/load_bench.h"
#include "synthetic_checkpoint.h"

using namespace offload;

namespace {

int usage() {
  std::fprintf(stderr, "usage: see the top of tests/load_bench_tool.cpp\n");
  return 2;
}

void run(const std::string& folder, const SyntheticExperts& model, const LoadBenchOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const LoadBenchResult result = load_bench(checkpoint, model.expert_layers(), model.shape, options);
  for (const LoadBenchRound& round : result.rounds)
    fmt::print("plain_gib_s={:.3f} load_gib_s={:.3f} reload_gib_s={:.3f} reload_to_plain={:.3f}\n",
               round.plain_bytes_per_s / 0x1p30, round.load_bytes_per_s / 0x1p30, round.reload_bytes_per_s / 0x1p30,
               round.reload_bytes_per_s / round.plain_bytes_per_s);
  fmt::print("median_ratio={:.3f} uring={} direct={} reads={} checksum={:016x}\n", load_efficiency(result),
             result.read.used_uring, result.read.used_direct, result.read.reads, result.checksum);
  fmt::print("experts={} staging_bound={} rss_before={} rss_peak={} peak_over_experts={}\n",
             bytes_text(result.expert_bytes), bytes_text(result.staging_bytes), bytes_text(result.rss_before_bytes),
             bytes_text(result.rss_peak_bytes),
             bytes_text(std::max<int64_t>(0, result.rss_peak_bytes - result.expert_bytes)));
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::stoll(argv[i]); };
  if (argc < 8) return usage();
  const std::string verb = argv[1], folder = argv[2];
  SyntheticExperts model{.shape = {.experts = number(4), .hidden = number(5), .intermediate = number(6)},
                         .layers = number(3)};
  try {
    if (verb == "make") {
      model.files = static_cast<int>(number(7));
      model.fused = argc > 8;
      write_synthetic(folder, model);
    } else if (verb == "run" && argc >= 10) {
      LoadBenchOptions options;
      options.load.threads = static_cast<int>(number(7));
      options.residency = {.form = std::string(argv[8]) == "slice" ? ShardForm::slice : ShardForm::expert,
                           .world = static_cast<int>(number(9))};
      if (argc > 10) options.repeat = static_cast<int>(number(10));
      if (argc > 11) options.load.reader.chunk_bytes = number(11) << 10;
      if (argc > 12) options.load.reader.queue_depth = static_cast<int>(number(12));
      run(folder, model, options);
    } else {
      return usage();
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return exit_code(error.code());
  }
  return 0;
}
