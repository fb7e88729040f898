#include "offload/machine.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace offload {
namespace {

constexpr int64_t kMachineFileBytesMax = int64_t{1} << 20;
// Ranges wide enough for any machine and narrow enough that bytes / rate stays inside 63 bits of nanoseconds.
constexpr double kRateMin = 1e-3, kRateMax = 1e7;  // GiB/s, TFLOP/s
constexpr double kMicrosecondsMax = 1e7;

// One object of the file. Every key must be asked for; finish() refuses the others.
class MachineFields {
 public:
  MachineFields(const Json& json, std::string path, std::string_view origin)
      : json_(json), path_(std::move(path)), origin_(origin) {
    if (!json.is_object()) fail(path_.empty() ? "the file" : path_, "an object");
  }

  double number(const char* key, double least, double most, std::optional<double> fallback = {}) {
    if (!has(key, fallback.has_value())) return *fallback;
    const double value = json_get<double>(json_, key, 0, origin_at());
    if (!(value >= least && value <= most))
      throw_error(ErrorCode::input, "{}: {}{} is {}, expected {} to {}", origin_, prefix(), key, value, least, most);
    return value;
  }
  int64_t integer(const char* key, int64_t least, int64_t most, std::optional<int64_t> fallback = {}) {
    if (!has(key, fallback.has_value())) return *fallback;
    const int64_t value = json_get<int64_t>(json_, key, 0, origin_at());
    if (value < least || value > most)
      throw_error(ErrorCode::input, "{}: {}{} is {}, expected {} to {}", origin_, prefix(), key, value, least, most);
    return value;
  }
  std::string text(const char* key, std::optional<std::string> fallback = {}) {
    if (!has(key, fallback.has_value())) return *fallback;
    return printable(json_get<std::string>(json_, key, "", origin_at()));
  }
  std::optional<MachineFields> object(const char* key, bool is_required) {
    if (!has(key, !is_required)) return std::nullopt;
    return MachineFields(json_.at(key), prefix() + key, origin_);
  }
  const Json* array(const char* key) {
    if (!has(key, true)) return nullptr;
    if (!json_.at(key).is_array()) fail(prefix() + key, "an array");
    return &json_.at(key);
  }
  const Json& json() const { return json_; }
  const std::string& path() const { return path_; }

  void finish() const {
    for (const auto& [key, value] : json_.items())
      if (std::find(known_.begin(), known_.end(), key) == known_.end())
        throw_error(ErrorCode::input, "{}: {}{} is no field of a machine file; known here: {}", origin_, prefix(),
                    printable(key), fmt::join(known_, ", "));
  }

 private:
  bool has(const char* key, bool is_optional) {
    known_.emplace_back(key);
    if (json_.contains(key) && !json_.at(key).is_null()) return true;
    if (!is_optional) throw_error(ErrorCode::input, "{}: {}{} is missing", origin_, prefix(), key);
    return false;
  }
  std::string prefix() const { return path_.empty() ? "" : path_ + "."; }
  std::string origin_at() const { return path_.empty() ? std::string(origin_) : fmt::format("{}: {}", origin_, path_); }
  [[noreturn]] void fail(std::string_view what, std::string_view expected) const {
    throw_error(ErrorCode::input, "{}: {} must be {}", origin_, what, expected);
  }

  const Json& json_;
  std::string path_;
  std::string_view origin_;
  std::vector<std::string> known_;
};

DeviceRates read_device(MachineFields fields) {
  DeviceRates out;
  out.kind = fields.text("kind", "");
  out.count = fields.integer("count", 1, 64);
  out.memory_bytes = std::llround(fields.number("memory_gib", 0.001, 1e6) * kGib);
  out.memory_bytes_per_s = fields.number("memory_gib_s", kRateMin, kRateMax) * kGib;
  std::optional<MachineFields> gemm = fields.object("gemm_tflops", true);
  for (size_t math = 0; math < kGemmMathNames.size(); ++math)
    out.gemm_flops.at(math) = gemm->number(kGemmMathNames.at(math).data(), kRateMin, kRateMax) * 1e12;
  gemm->finish();
  out.compute_units = fields.integer("compute_units", 1, 100000, 1);
  out.tile_rows = fields.integer("tile_rows", 1, 4096, 128);
  out.tile_columns = fields.integer("tile_columns", 1, 4096, 128);
  out.gemv_efficiency = fields.number("gemv_efficiency", 0.01, 1, 1);
  out.launch_gap_s = fields.number("launch_gap_us", 0, kMicrosecondsMax, 0) * 1e-6;
  fields.finish();
  return out;
}

LinkRates read_link(MachineFields fields) {
  LinkRates out;
  out.h2d_bytes_per_s = fields.number("h2d_gib_s", kRateMin, kRateMax) * kGib;
  out.additive = fields.number("additive", 0, 1, 1);
  out.copy_overhead_s = fields.number("copy_overhead_us", 0, kMicrosecondsMax, 0) * 1e-6;
  fields.finish();
  return out;
}

HostRates read_host(MachineFields fields) {
  HostRates out;
  out.ram_bytes = std::llround(fields.number("ram_gib", 0.001, 1e6, 0) * kGib);
  out.cores = fields.integer("cores", 1, 100000, 0);
  out.dram_bytes_per_s = fields.number("dram_gib_s", kRateMin, kRateMax, 0) * kGib;
  out.dram_with_h2d_bytes_per_s = fields.number("dram_with_h2d_gib_s", kRateMin, kRateMax, 0) * kGib;
  out.fma_flops = fields.number("fma_tflops", 1e-6, kRateMax, 0) * 1e12;
  out.wait_s = fields.number("wait_us", 0, kMicrosecondsMax, 0) * 1e-6;
  out.plan_s = fields.number("plan_us", 0, kMicrosecondsMax, 0) * 1e-6;
  out.launch_s = fields.number("launch_us", 0, kMicrosecondsMax, 0) * 1e-6;
  out.pin_bytes_per_s = fields.number("pin_gib_s", kRateMin, kRateMax, 0) * kGib;
  fields.finish();
  return out;
}

Calibration read_calibration(MachineFields fields) {
  Calibration out;
  out.model_type = fields.text("model_type");
  out.hidden = fields.integer("hidden", 1, int64_t{1} << 30);
  out.layers = fields.integer("layers", 1, 4096);
  out.experts = fields.integer("experts", 1, 65536);
  out.world = fields.integer("world", 1, 64);
  out.context = fields.integer("context", 1, int64_t{1} << 30);
  const auto seconds = [&](const char* key) { return fields.number(key, 1e-6, 1e6) * 1e-3; };
  out.dense_s = seconds("dense_ms");
  out.attention_s = seconds("attention_ms");
  out.lm_head_s = seconds("lm_head_ms");
  out.experts_s = seconds("experts_ms");
  out.expert_runs = fields.integer("expert_runs", 1, int64_t{1} << 30);
  fields.finish();
  return out;
}

std::vector<CollectivePoint> read_collective(const Json& array, std::string_view origin) {
  std::vector<CollectivePoint> out;
  for (size_t i = 0; i < array.size(); ++i) {
    MachineFields point(array[i], fmt::format("collective[{}]", i), origin);
    out.push_back({point.integer("bytes", 1, int64_t{1} << 40), point.number("us", 0, kMicrosecondsMax) * 1e-6});
    point.finish();
    if (i > 0 && out[i].bytes <= out[i - 1].bytes)
      throw_error(ErrorCode::input, "{}: collective[{}].bytes is {}, expected more than the {} before it", origin, i,
                  out[i].bytes, out[i - 1].bytes);
    if (i > 0 && out[i].duration_s < out[i - 1].duration_s)
      throw_error(ErrorCode::input,
                  "{}: collective[{}].us is less than the one before it; more bytes take no less time", origin, i);
  }
  return out;
}

}  // namespace

Machine parse_machine(std::string_view text, std::string_view origin) {
  const Json json = parse_json(text, origin);
  MachineFields fields(json, "", origin);
  Machine out;
  out.name = fields.text("name");
  out.device = read_device(*fields.object("device", true));
  if (std::optional<MachineFields> link = fields.object("link", false)) out.link = read_link(*link);
  if (std::optional<MachineFields> host = fields.object("host", false)) out.host = read_host(*host);
  out.disk_bytes_per_s = fields.number("disk_gib_s", 1e-6, kRateMax, 0) * kGib;
  if (const Json* collective = fields.array("collective")) out.collective = read_collective(*collective, origin);
  if (out.device.count > 1 && out.collective.empty())
    throw_error(ErrorCode::input, "{}: collective is empty, expected durations of an all-reduce over {} devices",
                origin, out.device.count);
  if (std::optional<MachineFields> calibration = fields.object("calibration", false))
    out.calibration = read_calibration(*calibration);
  if (std::optional<MachineFields> sources = fields.object("sources", false))
    for (const auto& [key, value] : sources->json().items()) {
      if (!value.is_string()) throw_error(ErrorCode::input, "{}: sources.{} must be a string", origin, printable(key));
      out.sources[printable(key)] = printable(value.get<std::string>(), 1000);
    }
  fields.finish();
  return out;
}

Machine read_machine(const std::string& path) {
  return parse_machine(read_text_file(path, kMachineFileBytesMax), printable(path, 4096));
}

std::string machine_text(const Machine& machine) {
  const DeviceRates& device = machine.device;
  // Six digits: no rate is known better.
  const auto rounded = [](double value) {
    if (value == 0) return 0.0;
    const double unit = std::pow(10, 5 - std::floor(std::log10(std::abs(value))));
    return std::round(value * unit) / unit;
  };
  OrderedJson out = OrderedJson::object();
  out["name"] = machine.name;
  OrderedJson gemm = OrderedJson::object();
  for (size_t math = 0; math < kGemmMathNames.size(); ++math)
    gemm[std::string(kGemmMathNames.at(math))] = rounded(device.gemm_flops.at(math) * 1e-12);
  out["device"] = {{"kind", device.kind},
                   {"count", device.count},
                   {"memory_gib", rounded(static_cast<double>(device.memory_bytes) / kGib)},
                   {"memory_gib_s", rounded(device.memory_bytes_per_s / kGib)},
                   {"gemm_tflops", gemm},
                   {"compute_units", device.compute_units},
                   {"tile_rows", device.tile_rows},
                   {"tile_columns", device.tile_columns},
                   {"gemv_efficiency", rounded(device.gemv_efficiency)},
                   {"launch_gap_us", rounded(device.launch_gap_s * 1e6)}};
  if (machine.link.h2d_bytes_per_s > 0)
    out["link"] = {{"h2d_gib_s", rounded(machine.link.h2d_bytes_per_s / kGib)},
                   {"additive", rounded(machine.link.additive)},
                   {"copy_overhead_us", rounded(machine.link.copy_overhead_s * 1e6)}};
  OrderedJson host = OrderedJson::object();
  const auto known = [&](const char* key, double value) {
    if (value > 0) host[key] = rounded(value);
  };
  known("ram_gib", static_cast<double>(machine.host.ram_bytes) / kGib);
  if (machine.host.cores > 0) host["cores"] = machine.host.cores;
  known("dram_gib_s", machine.host.dram_bytes_per_s / kGib);
  known("dram_with_h2d_gib_s", machine.host.dram_with_h2d_bytes_per_s / kGib);
  known("fma_tflops", machine.host.fma_flops * 1e-12);
  known("wait_us", machine.host.wait_s * 1e6);
  known("plan_us", machine.host.plan_s * 1e6);
  known("launch_us", machine.host.launch_s * 1e6);
  known("pin_gib_s", machine.host.pin_bytes_per_s / kGib);
  out["host"] = host;
  if (machine.disk_bytes_per_s > 0) out["disk_gib_s"] = rounded(machine.disk_bytes_per_s / kGib);
  if (!machine.collective.empty()) {
    out["collective"] = OrderedJson::array();
    for (const CollectivePoint& point : machine.collective)
      out["collective"].push_back({{"bytes", point.bytes}, {"us", rounded(point.duration_s * 1e6)}});
  }
  if (const std::optional<Calibration>& c = machine.calibration)
    out["calibration"] = {{"model_type", c->model_type},
                          {"hidden", c->hidden},
                          {"layers", c->layers},
                          {"experts", c->experts},
                          {"world", c->world},
                          {"context", c->context},
                          {"dense_ms", rounded(c->dense_s * 1e3)},
                          {"attention_ms", rounded(c->attention_s * 1e3)},
                          {"lm_head_ms", rounded(c->lm_head_s * 1e3)},
                          {"experts_ms", rounded(c->experts_s * 1e3)},
                          {"expert_runs", c->expert_runs}};
  if (!machine.sources.empty()) out["sources"] = machine.sources;
  return out.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace offload
