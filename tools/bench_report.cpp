#include "bench_report.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <thread>

namespace offload::tools {
namespace {

constexpr double kGiga = 1e9;
constexpr int64_t kReportBytesMax = 64 << 20;

// The first line of `path` that begins with `key`, from behind the colon; or the first line of all when key is empty.
std::string line_of(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (key.empty()) return line;
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(':');
    const size_t begin = colon == std::string::npos ? line.size() : line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(std::min(begin, line.size()));
  }
  return "";
}

double leading_number(const std::string& text) {
  return text.empty() ? 0 : std::strtod(text.c_str(), nullptr);
}

double bytes_of(const Cost& cost) {
  return static_cast<double>(cost.bytes_read + cost.bytes_written);
}

bool bound_by_memory(const Cost& cost, const Roofs& roofs) {
  return bytes_of(cost) / roofs.read_bytes_per_s >= static_cast<double>(cost.flops) / roofs.flops_per_s;
}

// What a row says, worked out.
struct RowNumbers {
  double median = 0, least = 0, most = 0, predicted = 0, fraction = 0, gib_s = 0, gflop_s = 0;
  std::string_view bound;

  RowNumbers(const BenchRow& row, const Roofs& roofs)
      : median(tools::median(row.seconds)),
        least(*std::min_element(row.seconds.begin(), row.seconds.end())),
        most(*std::max_element(row.seconds.begin(), row.seconds.end())),
        predicted(predicted_seconds(row.cost, roofs)),
        fraction(predicted / median),
        gib_s(bytes_of(row.cost) / median / kGib),
        gflop_s(static_cast<double>(row.cost.flops) / median / kGiga),
        bound(bound_by_memory(row.cost, roofs) ? "memory" : "compute") {}
};

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.2f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3f} ms", seconds * 1e3);
  return fmt::format("{:.3f} s", seconds);
}

OrderedJson row_json(const BenchRow& row, const Roofs& roofs) {
  const RowNumbers numbers(row, roofs);
  OrderedJson json = OrderedJson::object();
  json["name"] = row.name;
  json["tokens"] = row.tokens;
  json["n"] = row.seconds.size();
  json["median_s"] = numbers.median;
  json["min_s"] = numbers.least;
  json["max_s"] = numbers.most;
  if (row.tokens > 0) {
    const auto tokens = static_cast<double>(row.tokens);
    json["median_tok_s"] = tokens / numbers.median;
    json["min_tok_s"] = tokens / numbers.most;
    json["max_tok_s"] = tokens / numbers.least;
    if (numbers.predicted > 0) json["predicted_tok_s"] = tokens / numbers.predicted;
  }
  json["bytes"] = row.cost.bytes_read + row.cost.bytes_written;
  json["flops"] = row.cost.flops;
  json["link_bytes"] = row.link_bytes;
  json["gib_s"] = numbers.gib_s;
  json["gflop_s"] = numbers.gflop_s;
  json["predicted_s"] = numbers.predicted;
  json["bound"] = numbers.bound;
  json["fraction"] = numbers.fraction;
  json["hash"] = fmt::format("{:016x}", row.hash);
  return json;
}

}  // namespace

MachineState machine_state() {
  MachineState state;
  state.cpu = line_of("/proc/cpuinfo", "model name");
  state.cores = std::max(1u, std::thread::hardware_concurrency());
  state.memory_bytes = static_cast<int64_t>(leading_number(line_of("/proc/meminfo", "MemTotal"))) * 1024;
  state.governor = line_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "");
  state.clock_mhz = leading_number(line_of("/proc/cpuinfo", "cpu MHz"));
  state.load = leading_number(line_of("/proc/loadavg", ""));
  return state;
}

double median(std::vector<double> values) {
  OFL_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

double predicted_seconds(const Cost& cost, const Roofs& roofs) {
  return std::max(bytes_of(cost) / roofs.read_bytes_per_s, static_cast<double>(cost.flops) / roofs.flops_per_s);
}

std::string bench_line(const BenchRow& row, const Roofs& roofs) {
  const RowNumbers numbers(row, roofs);
  std::string line = fmt::format("{:<48}", row.name);
  if (row.tokens > 0) {
    const auto tokens = static_cast<double>(row.tokens);
    line += fmt::format(" {:>9.2f} tok/s ({:.2f}..{:.2f}, n {}), predicted {:.2f}", tokens / numbers.median,
                        tokens / numbers.most, tokens / numbers.least, row.seconds.size(), tokens / numbers.predicted);
  } else {
    line += fmt::format(" {:>11} ({}..{}, n {})", time_text(numbers.median), time_text(numbers.least),
                        time_text(numbers.most), row.seconds.size());
  }
  line += fmt::format("  {:.2f} GiB/s  {:.2f} GFLOP/s  {:.1f} % of {}", numbers.gib_s, numbers.gflop_s,
                      100 * numbers.fraction, numbers.bound);
  Roofs instruction = roofs;
  instruction.flops_per_s = roofs.m16n8k8_flops_per_s;
  if (instruction.flops_per_s > 0 && !bound_by_memory(row.cost, instruction))
    line += fmt::format(" ({:.1f} % of m16n8k8)", 100 * numbers.gflop_s * kGiga / instruction.flops_per_s);
  if (row.link_bytes > 0 && roofs.link_bytes_per_s > 0) {
    const auto bytes = static_cast<double>(row.link_bytes);
    line += fmt::format("  {:.2f} GiB moved, {:.1f} % of the link", bytes / kGib,
                        100 * bytes / numbers.median / roofs.link_bytes_per_s);
  }
  return line + fmt::format("  {:016x}", row.hash);
}

namespace {

// On a CPU the arithmetic is that of FP32 FMAs, on a device that of a large 16-bit matrix product.
std::string roofs_text(const Roofs& roofs) {
  const bool is_device = roofs.link_bytes_per_s > 0;
  std::string text = fmt::format("{:.2f} GiB/s read, {:.1f} GFLOP/s {}", roofs.read_bytes_per_s / kGib,
                                 roofs.flops_per_s / kGiga, is_device ? "16-bit GEMM" : "FP32 FMA");
  if (roofs.m16n8k8_flops_per_s > 0) text += fmt::format(", {:.1f} m16n8k8", roofs.m16n8k8_flops_per_s / kGiga);
  if (is_device) text += fmt::format(", link {:.2f} GiB/s", roofs.link_bytes_per_s / kGib);
  return text;
}

}  // namespace

std::string bench_head(const BenchReport& report) {
  const MachineState& machine = report.before;
  return fmt::format(
      "command    {}\ncommit     {}\nmachine    {}, {} cores, {:.1f} GiB, governor {}, clock {}; {}{} with {} threads\n"
      "load       {:.2f} at the start\nroofs      {}\n",
      report.command, report.commit, machine.cpu.empty() ? "unknown" : machine.cpu, machine.cores,
      static_cast<double>(machine.memory_bytes) / kGib, machine.governor.empty() ? "unknown" : machine.governor,
      machine.clock_mhz > 0 ? fmt::format("{:.0f} MHz", machine.clock_mhz) : "unknown", report.instruction_set,
      report.link.empty() ? "" : ", " + report.link, report.threads, machine.load, roofs_text(report.roofs_before));
}

std::string bench_foot(const BenchReport& report) {
  std::string foot = fmt::format("load       {:.2f} at the end\nroofs      {} at the end, drift {:.1f} %\n",
                                 report.after.load, roofs_text(report.roofs_after), 100 * report.roofs_drift());
  if (report.baseline_drift)
    foot += fmt::format("baseline   measured again at the end, drift {:.1f} %\n", 100 * *report.baseline_drift);
  if (!report.quotable())
    foot += fmt::format("NOT TO BE QUOTED: something drifted by more than {:.0f} % during the run\n", 100 * kDriftMax);
  return foot;
}

OrderedJson bench_json(const BenchReport& report) {
  const MachineState& machine = report.before;
  OrderedJson json = OrderedJson::object();
  json["kind"] = report.kind;
  json["command"] = report.command;
  json["commit"] = report.commit;
  json["machine"] = OrderedJson::object({{"cpu", machine.cpu},
                                         {"instruction_set", report.instruction_set},
                                         {"link", report.link},
                                         {"cores", machine.cores},
                                         {"threads", report.threads},
                                         {"memory_bytes", machine.memory_bytes},
                                         {"governor", machine.governor},
                                         {"clock_mhz", machine.clock_mhz},
                                         {"load_before", machine.load},
                                         {"load_after", report.after.load}});
  const auto pair = [](double a, double b, double unit) { return OrderedJson::array({a / unit, b / unit}); };
  const Roofs &first = report.roofs_before, &last = report.roofs_after;
  json["roofs"] = OrderedJson::object({{"read_gib_s", pair(first.read_bytes_per_s, last.read_bytes_per_s, kGib)},
                                       {"fma_gflop_s", pair(first.flops_per_s, last.flops_per_s, kGiga)},
                                       {"drift", report.roofs_drift()}});
  if (first.link_bytes_per_s > 0)
    json["roofs"]["link_gib_s"] = pair(first.link_bytes_per_s, last.link_bytes_per_s, kGib);
  if (first.m16n8k8_flops_per_s > 0)
    json["roofs"]["m16n8k8_gflop_s"] = pair(first.m16n8k8_flops_per_s, last.m16n8k8_flops_per_s, kGiga);
  json["baseline_drift"] = report.baseline_drift ? OrderedJson(*report.baseline_drift) : OrderedJson();
  json["quotable"] = report.quotable();
  json["rows"] = OrderedJson::array();
  for (const BenchRow& row : report.rows) json["rows"].push_back(row_json(row, report.roofs()));
  if (!report.plan.is_null()) json["plan"] = report.plan;
  return json;
}

// --- attribution ---

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void OpProfile::op_begins() {
  if (lane_ != nullptr) lane_->drain();
  begin_s_ = now_s();
}

void OpProfile::op_ended(std::string_view name, const Cost& cost) {
  if (lane_ != nullptr) lane_->drain();
  const double seconds = now_s() - begin_s_;
  auto total = std::find_if(totals_.begin(), totals_.end(), [&](const Total& each) { return each.name == name; });
  if (total == totals_.end()) total = totals_.insert(totals_.end(), Total{name});
  ++total->calls;
  total->seconds += seconds;
  total->cost += cost;
}

std::vector<OpProfile::Total> OpProfile::sorted() const {
  std::vector<Total> totals = totals_;
  std::stable_sort(totals.begin(), totals.end(), [](const Total& a, const Total& b) { return a.seconds > b.seconds; });
  return totals;
}

std::string OpProfile::table(std::string_view title, double wall_s, const Roofs& roofs) const {
  std::string text = fmt::format("{}: {} (for attribution, not a speed)\n{:<18} {:>7} {:>11} {:>6} {:>8} {:>9} {:>6}\n",
                                 title, time_text(wall_s), "op", "calls", "time", "share", "GiB/s", "GFLOP/s", "roof");
  double inside = 0;
  for (const Total& total : sorted()) {
    inside += total.seconds;
    text +=
        fmt::format("{:<18} {:>7} {:>11} {:>5.1f}% {:>8.2f} {:>9.2f} {:>5.1f}%\n", total.name, total.calls,
                    time_text(total.seconds), 100 * total.seconds / wall_s, bytes_of(total.cost) / total.seconds / kGib,
                    static_cast<double>(total.cost.flops) / total.seconds / kGiga,
                    100 * predicted_seconds(total.cost, roofs) / total.seconds);
  }
  return text + fmt::format("{:<18} {:>7} {:>11} {:>5.1f}%\n", "(between ops)", "", time_text(wall_s - inside),
                            100 * (1 - inside / wall_s));
}

OrderedJson OpProfile::json(std::string_view title, double wall_s, const Roofs& roofs) const {
  OrderedJson ops = OrderedJson::array();
  for (const Total& total : sorted())
    ops.push_back(OrderedJson::object({{"op", total.name},
                                       {"calls", total.calls},
                                       {"seconds", total.seconds},
                                       {"bytes", total.cost.bytes_read + total.cost.bytes_written},
                                       {"flops", total.cost.flops},
                                       {"predicted_s", predicted_seconds(total.cost, roofs)}}));
  return OrderedJson::object({{"phase", title}, {"wall_s", wall_s}, {"ops", ops}});
}

// --- comparison ---

namespace {

struct ComparedRow {
  std::string name;
  double median_a = 0, median_b = 0;  // seconds; 0: the file lacks the row
  bool same_hash = false;

  double speedup() const { return median_a / median_b; }
};

Json read_report(const std::string& path) {
  const std::string origin = printable(path, 4096);
  Json report = parse_json(read_text_file(path, kReportBytesMax), origin);
  if (!report.is_object() || !report.contains("kind") || !report.contains("rows") || !report.at("rows").is_array())
    throw_error(ErrorCode::input, "{}: kind and rows are missing; expected what offload-bench --json printed", origin);
  for (const Json& row : report.at("rows")) {
    if (!row.is_object()) throw_error(ErrorCode::input, "{}: a row is no object", origin);
    if (!(json_get<double>(row, "median_s", 0.0, origin) > 0) || json_get<std::string>(row, "name", "", origin).empty())
      throw_error(ErrorCode::input, "{}: a row lacks a name or a median_s above 0", origin);
  }
  return report;
}

struct Comparison {
  std::vector<ComparedRow> rows;
  std::array<std::optional<bool>, 2> quotable;  // as the files say
};

std::optional<bool> quotable(const Json& report, const std::string& origin) {
  if (!report.contains("quotable")) return std::nullopt;
  return json_get<bool>(report, "quotable", false, origin);
}

Comparison compared(const std::string& path_a, const std::string& path_b) {
  const Json a = read_report(path_a), b = read_report(path_b);
  const std::string origin_a = printable(path_a, 4096), origin_b = printable(path_b, 4096);
  if (a.at("kind") != b.at("kind"))
    throw_error(ErrorCode::input, "{} and {} are of different kinds; compare ops with ops, or models with models",
                origin_a, origin_b);
  std::vector<ComparedRow> rows;
  std::vector<std::string> hashes;
  for (const Json& row : a.at("rows")) {
    rows.push_back({row.at("name").get<std::string>(), row.at("median_s").get<double>()});
    hashes.push_back(json_get<std::string>(row, "hash", "", origin_a));
  }
  for (const Json& row : b.at("rows")) {
    const std::string name = row.at("name").get<std::string>();
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const ComparedRow& r) { return r.name == name; });
    if (found == rows.end()) {
      rows.push_back({name, 0, row.at("median_s").get<double>()});
      continue;
    }
    found->median_b = row.at("median_s").get<double>();
    const std::string& hash = hashes[static_cast<size_t>(found - rows.begin())];
    found->same_hash = !hash.empty() && hash == json_get<std::string>(row, "hash", "", origin_b);
  }
  return {std::move(rows), {quotable(a, origin_a), quotable(b, origin_b)}};
}

}  // namespace

std::string compare_reports(const std::string& path_a, const std::string& path_b) {
  const Comparison comparison = compared(path_a, path_b);
  std::string text;
  for (const ComparedRow& row : comparison.rows) {
    if (row.median_a == 0 || row.median_b == 0) {
      text +=
          fmt::format("{:<48} only in {}\n", printable(row.name), printable(row.median_a == 0 ? path_b : path_a, 4096));
      continue;
    }
    text += fmt::format("{:<48} {:>11} -> {:>11}  {:.3f}x{}\n", printable(row.name), time_text(row.median_a),
                        time_text(row.median_b), row.speedup(), row.same_hash ? "" : "  other bits");
  }
  for (size_t i = 0; i < 2; ++i)
    if (!comparison.quotable[i].value_or(true))
      text += fmt::format("NOT TO BE QUOTED: {}: something drifted by more than {:.0f} % during that run\n",
                          printable(i == 0 ? path_a : path_b, 4096), 100 * kDriftMax);
  return text;
}

OrderedJson compare_json(const std::string& path_a, const std::string& path_b) {
  const Comparison comparison = compared(path_a, path_b);
  OrderedJson rows = OrderedJson::array(), quotable = OrderedJson::array();
  for (const std::optional<bool>& each : comparison.quotable)
    quotable.push_back(each ? OrderedJson(*each) : OrderedJson());
  for (const ComparedRow& row : comparison.rows) {
    OrderedJson json = OrderedJson::object({{"name", row.name}});
    json["median_s"] = OrderedJson::array({row.median_a > 0 ? OrderedJson(row.median_a) : OrderedJson(),
                                           row.median_b > 0 ? OrderedJson(row.median_b) : OrderedJson()});
    if (row.median_a > 0 && row.median_b > 0) {
      json["speedup"] = row.speedup();
      json["same_hash"] = row.same_hash;
    }
    rows.push_back(std::move(json));
  }
  return OrderedJson::object(
      {{"kind", "comparison"}, {"a", path_a}, {"b", path_b}, {"quotable", quotable}, {"rows", rows}});
}

}  // namespace offload::tools
