#include "offload/probe.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "child_process.h"
#include "offload/cost_model.h"
#include "simulation_cases.h"

namespace offload::probe_test {
namespace fs = std::filesystem;

namespace {

// A make-believe machine of 100 Gflop/s and 10 GB/s.
ProbeFunctions made_up() {
  const auto gemm = [](int64_t m, int64_t n, int64_t k) {
    return std::max(2.0 * static_cast<double>(m * n * k) / 1e11, 2.0 * static_cast<double>(n * k) / 5e9);
  };
  return {.host = {.cores = 4,
                   .memory_bytes = int64_t{8} << 30,
                   .dram_read_bytes_per_s = [] { return 1e10; },
                   .fma_flops = [] { return 2e11; }},
          .device = {.kind = "made up",
                     .memory_bytes = int64_t{8} << 30,
                     .compute_units = 4,
                     .memory_read_bytes_per_s = {},
                     .large_gemm_seconds = [gemm](GemmMath, int64_t size) { return gemm(size, size, size); },
                     .gemm_seconds = gemm,
                     .launch_seconds = [] { return 1e-6; }},
          .link = {}};
}

// The same with a card: 1 TB/s, 10 and 20 Tflop/s, a link of 8 GB/s that costs 5 us a copy.
ProbeFunctions made_up_with_a_card(bool can_pin) {
  ProbeFunctions functions = made_up();
  DeviceProbe& device = functions.device;
  device.memory_read_bytes_per_s = [] { return 1e12; };
  device.large_product = 8192;
  device.large_gemm_seconds = [](GemmMath math, int64_t size) {
    return 2.0 * std::pow(static_cast<double>(size), 3) / (math == GemmMath::bf16 ? 1e13 : 2e13);
  };
  functions.link = LinkProbe{
      .copy_seconds = [](int64_t bytes) { return 5e-6 + static_cast<double>(bytes) / 8e9; },
      .dram_read_while_copying_bytes_per_s = [] { return 7e9; },
      .wait_seconds = [] { return 2e-5; },
      .pinning = {.pin = [can_pin](std::span<std::byte>) { return can_pin; }, .unpin = [](std::span<std::byte>) {}}};
  return functions;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

class TemporaryFile {
 public:
  TemporaryFile(const std::string& name, int64_t bytes)
      : path_((fs::temp_directory_path() / fmt::format("offload_probe_{}_{}", getpid(), name)).string()) {
    std::ofstream(path_, std::ios::binary) << std::string(static_cast<size_t>(bytes), 'x');
  }
  TemporaryFile(const TemporaryFile&) = delete;
  ~TemporaryFile() { fs::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("measurements_become_a_machine_file_that_is_read_again") {
  std::vector<std::string> told;
  const Machine machine = probe_machine(made_up(), {.name = "m", .when = "now", .disk_file = ""},
                                        [&](std::string_view what) { told.emplace_back(what); });
  CHECK(told.size() >= 6);
  CHECK(machine.device.memory_bytes_per_s == 1e10);
  CHECK(is_near(machine.device.gemm_flops[0], 1e11, 1e-9));
  CHECK(is_near(machine.device.gemv_efficiency, 0.5, 1e-9));
  CHECK(machine.device.launch_gap_s == 1e-6);
  CHECK(machine.disk_bytes_per_s == 0);
  const std::string text = machine_text(machine);
  const Machine again = parse_machine(text, "again");
  CHECK(machine_text(again) == text);
  CHECK(again.host.cores == 4);
  CHECK(contains(again.sources.at("host.dram_gib_s"), "measured now"));
}

TEST_CASE("a_card_and_its_link_become_the_fields_that_the_planner_reads") {
  const Machine machine =
      probe_machine(made_up_with_a_card(true), {.name = "m", .when = "now", .disk_file = "", .pin_bytes = 1 << 26});
  const Machine read = parse_machine(machine_text(machine), "again");
  CHECK(is_near(read.device.memory_bytes_per_s, 1e12, 1e-3));
  CHECK(is_near(read.host.dram_bytes_per_s, 1e10, 1e-3));
  CHECK(is_near(read.device.gemm_flops[static_cast<size_t>(GemmMath::bf16)], 1e13, 1e-3));
  CHECK(is_near(read.device.gemm_flops[static_cast<size_t>(GemmMath::fp16)], 2e13, 1e-3));
  CHECK(is_near(read.link.h2d_bytes_per_s, 8e9, 1e-2));
  CHECK(is_near(read.link.copy_overhead_s, 5e-6, 1e-2));
  CHECK(is_near(read.host.dram_with_h2d_bytes_per_s, 7e9, 1e-3));
  CHECK(is_near(read.host.wait_s, 2e-5, 1e-3));
  CHECK(read.host.pin_bytes_per_s > 0);
  CHECK(contains(read.sources.at("host.pin_gib_s"), "touched by all threads, then pinned"));

  const Machine unpinned =
      probe_machine(made_up_with_a_card(false), {.name = "m", .when = "now", .disk_file = "", .pin_bytes = 1 << 26});
  CHECK(unpinned.host.pin_bytes_per_s == 0);
  CHECK(!contains(machine_text(unpinned), "pin_gib_s"));
}

TEST_CASE("a_tile_is_found_again_from_what_the_cost_model_says_of_it") {
  Machine machine;
  machine.device = {.kind = "", .count = 1, .memory_bytes = 1, .memory_bytes_per_s = 1e13, .gemm_flops = {1e12, 1e12}};
  machine.device.compute_units = 20;
  for (const int64_t rows : {32, 128})
    for (const int64_t columns : {16, 64}) {
      machine.device.tile_rows = rows;
      machine.device.tile_columns = columns;
      const CostModel costs(machine, GemmMath::bf16, 1);
      std::vector<GemmTiming> timings;
      for (const int64_t m : {17, 33, 65, 129, 300})
        for (const int64_t n : {16, 80, 640, 1000}) {
          const StepOp op{"linear", {2 * (m + n) * 512, 2 * m * n, 2 * m * n * 512}, m, n, 512};
          timings.push_back({m, n, 512, static_cast<double>(costs.op_ns(op)) * 1e-9});
        }
      DeviceRates fitted = machine.device;
      fitted.tile_rows = fitted.tile_columns = 1;
      fit_tile(fitted, timings);
      CHECK(fitted.tile_rows == rows);
      CHECK(fitted.tile_columns == columns);
    }
}

TEST_CASE("a_measurement_that_gives_no_number_ends_the_probe_by_name") {
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                           -std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    ProbeFunctions functions = made_up();
    functions.host.dram_read_bytes_per_s = [&] { return bad; };
    const std::string message = refusal([&] { probe_machine(functions, {}); });
    CHECK(contains(message, "measuring memory reads gave"));
    CHECK(!contains(message, "-nan"));
    functions = made_up();
    functions.device.large_gemm_seconds = [&](GemmMath, int64_t) { return bad; };
    CHECK(contains(refusal([&] { probe_machine(functions, {}); }), "measuring a large matrix product gave"));
  }
}

TEST_CASE("a_disk_is_measured_by_a_file_and_a_bad_file_is_refused") {
  const TemporaryFile large("large", int64_t{40} << 20), small("small", 1000);
  CHECK(measure_disk_read(large.path(), int64_t{1} << 30).bytes_per_s > 0);
  CHECK(contains(refusal([&] { measure_disk_read(small.path(), 1 << 30); }), "1000 bytes, expected 33554432 at least"));
  CHECK(contains(refusal([&] { measure_disk_read("/nonexistent", 1 << 30); }), "/nonexistent: No such file"));
  CHECK(contains(refusal([&] { measure_disk_read("/dev/zero", 1 << 30); }), "not a regular file"));
  CHECK(
      contains(refusal([&] { measure_disk_read(fs::temp_directory_path().string(), 1 << 30); }), "not a regular file"));
}

TEST_CASE("offload_probe_writes_a_file_that_offload_plan_takes") {
  const TemporaryFile machine("machine", 0), disk("disk", int64_t{40} << 20);
  const auto probed = run_program(
      OFFLOAD_PROBE, {"-o", machine.path(), "--device", "cpu", "--threads", "1", "--disk-file", disk.path()}, "");
  INFO(probed.err);
  REQUIRE(probed.exit_code == 0);
  CHECK(probed.out.empty());
  const Machine measured = read_machine(machine.path());
  CHECK(measured.device.memory_bytes_per_s > 1e8);
  CHECK(measured.disk_bytes_per_s > 0);
  const auto planned = run_program(OFFLOAD_PLAN,
                                   {"--machine", machine.path(), "--model-config",
                                    OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp", "--prompt-tokens", "64"},
                                   "");
  INFO(planned.err);
  CHECK(planned.exit_code == 0);
  CHECK(contains(planned.out, "no link"));

  const auto refused = [](std::vector<std::string> arguments, int code, std::string_view part) {
    const auto result = run_program(OFFLOAD_PROBE, arguments, "");
    CHECK(result.exit_code == code);
    CHECK(contains(result.err, part));
  };
  refused({"--threads", "0"}, 2, "--threads is \"0\"");
  refused({"--device", "tpu"}, 2, "--device is \"tpu\"");
  refused({"--pin-gib", "much"}, 2, "--pin-gib is \"much\"");
  refused({"--pin-gib", "-1"}, 2, "--pin-gib is \"-1\"");
  refused({"--force-sm", "75", "--device", "cpu"}, 2, "--force-sm is for a GPU");
  CHECK(run_program(OFFLOAD_PROBE, {"--version"}, "").out.starts_with("offload-probe 0."));
  refused({"--disk-file", "/nonexistent"}, 1, "/nonexistent: No such file");
  // Found before anything is measured.
  const fs::path link = machine.path() + "_link";
  fs::create_symlink(machine.path(), link);
  for (const std::string& path : {std::string("/nonexistent/machine.json"), link.string(), std::string()}) {
    const auto unwritable = run_program(OFFLOAD_PROBE, {"-o", path, "--threads", "1"}, "");
    CHECK(unwritable.exit_code == 2);
    CHECK(contains(unwritable.err, "-o " + path));
    CHECK(!contains(unwritable.err, "measuring"));
  }
  CHECK(fs::is_symlink(link));
  fs::remove(link);
}

}  // namespace offload::probe_test
