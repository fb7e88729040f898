// What offload-bench measured: as lines for people, as the JSON of --json, and two such files compared.
//
// Pure, but for machine_state(), which reads /proc and /sys. JSON keys: kind ("ops" | "model" | "all_reduce"), command,
// commit, machine {cpu, instruction_set, link, cores, threads, memory_bytes, governor, clock_mhz, load_before,
// load_after}, roofs {read_gib_s [before, after], fma_gflop_s [before, after], drift; on a device link_gib_s [before,
// after], on Turing's plan m16n8k8_gflop_s [before, after]}, baseline_drift (null without a second measurement),
// quotable, rows [{name, tokens, n, median_s, min_s, max_s, median_tok_s, min_tok_s, max_tok_s (absent without tokens),
// bytes, flops, link_bytes, gib_s, gflop_s, predicted_s, predicted_tok_s, bound, fraction, hash}], plan (of a model).
#ifndef OFFLOAD_TOOLS_BENCH_REPORT_H_
#define OFFLOAD_TOOLS_BENCH_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends.h"
#include "core/json.h"

namespace offload::tools {

// Speeds are not to be quoted when a measurement that was repeated at the end has moved by more.
inline constexpr double kDriftMax = 0.03;

class BenchHash {  // FNV-1a, 64 bits
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) value_ = (value_ ^ static_cast<uint64_t>(byte)) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

struct BenchRow {
  std::string name;
  int64_t tokens = 0;                // of one sample; 0: not a matter of tokens
  Cost cost = {};                    // of one sample
  std::vector<double> seconds = {};  // one per sample
  uint64_t hash = 0;                 // of the result's bits
  int64_t link_bytes = 0;            // of one sample: experts copied to the device or read over the link
};

struct MachineState {
  std::string cpu, governor;
  int64_t cores = 0;
  int64_t memory_bytes = 0;
  double clock_mhz = 0;  // 0: not readable
  double load = 0;       // runnable threads over the last minute
};
MachineState machine_state();

struct BenchReport {
  std::string_view kind;
  std::string command, commit;
  std::string instruction_set;
  std::string link;  // of the device, as the system sees it now; empty where it has none or says nothing
  int threads = 1;
  MachineState before, after;
  Roofs roofs_before, roofs_after;
  std::vector<BenchRow> rows;
  std::optional<double> baseline_drift;
  OrderedJson plan;  // null: none

  Roofs roofs() const { return better_of(roofs_before, roofs_after); }
  double roofs_drift() const { return drift(roofs_before, roofs_after); }
  bool quotable() const { return roofs_drift() <= kDriftMax && baseline_drift.value_or(0) <= kDriftMax; }
};

double median(std::vector<double> values);
// What the roofs allow at best: the slower of moving the bytes and computing the operations.
double predicted_seconds(const Cost& cost, const Roofs& roofs);

// One row, without a line end.
std::string bench_line(const BenchRow& row, const Roofs& roofs);
// What was run where, before the rows; and the verdict after them.
std::string bench_head(const BenchReport& report);
std::string bench_foot(const BenchReport& report);
OrderedJson bench_json(const BenchReport& report);

// --- attribution ---

// Times each op between the calls of an observer. Only for backends that have finished an op when it returns.
class OpProfile final : public OpObserver {
 public:
  // The lane that the ops run on, waited for after each; null: their work is done when they return.
  void set_lane(Lane* lane) { lane_ = lane; }
  void op_begins() override;
  void op_ended(std::string_view name, const Cost& cost) override;
  // Sorted by time, with what passed outside ops. `wall_s`: of the run that was watched.
  std::string table(std::string_view title, double wall_s, const Roofs& roofs) const;
  OrderedJson json(std::string_view title, double wall_s, const Roofs& roofs) const;

 private:
  struct Total {
    std::string_view name;
    int64_t calls = 0;
    double seconds = 0;
    Cost cost = {};
  };
  std::vector<Total> sorted() const;
  Lane* lane_ = nullptr;
  std::vector<Total> totals_;
  double begin_s_ = 0;
};

// Two files of --json. Rows are matched by name; says which hashes differ and which file is not to be quoted. Throws
// Error{input} for files that are none.
std::string compare_reports(const std::string& path_a, const std::string& path_b);
OrderedJson compare_json(const std::string& path_a, const std::string& path_b);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BENCH_REPORT_H_
