#include "offload/budget.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "offload/engine.h"
#include "offload/pinning.h"
#include "offload/progress.h"
#include "offload/system_memory.h"
#include "synthetic_checkpoint.h"

namespace offload::budget_test {
namespace fs = std::filesystem;

namespace {

constexpr int64_t kGibBytes = int64_t{1} << 30;

// A root with the given files.
class FakeRoot {
 public:
  FakeRoot& file(const std::string& path, const std::string& text) {
    const fs::path full = folder_.path(path);
    fs::create_directories(full.parent_path());
    std::ofstream(full) << text;
    return *this;
  }
  FakeRoot& available(int64_t bytes) {
    return file("proc/meminfo",
                fmt::format("MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\n", bytes / 512, bytes / 1024));
  }
  SystemMemory read() const { return read_system_memory(folder_.path()); }

 private:
  TemporaryFolder folder_;
};

std::string refusal(const Budget& budget) {
  try {
    budget.require_fit();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resource);
    CHECK(error.message().find('\n') == std::string::npos);
    return error.message();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("\"", part, "\" is not in: ", text);
  return found;
}

}  // namespace

TEST_CASE("reported_container_limits_give_the_memory_that_is_really_there") {
  struct Case {
    std::string name;
    int64_t bytes_min, bytes_max;
    std::string decided_by;
  };
  for (const Case& each : {Case{"v2_8_GiB", 6'442'450'944, 7'516'192'768, "/sys/fs/cgroup/memory.max"},
                           Case{"v2_no_limit", 75'161'927'680, 81'604'378'624, "/proc/meminfo"},
                           Case{"v1_unlimited_sentinel", 75'161'927'680, 81'604'378'624, "/proc/meminfo"}}) {
    CAPTURE(each.name);
    const SystemMemory memory = read_system_memory(OFFLOAD_SOURCE_DIR "/tests/data/cgroup/" + each.name);
    CHECK(memory.available_bytes >= each.bytes_min);
    CHECK(memory.available_bytes <= each.bytes_max);
    CHECK(memory.decided_by == each.decided_by);
    CHECK(memory.total_bytes == int64_t{81'788'928} * 1024);
  }
}

TEST_CASE("the_tightest_level_of_a_cgroup_path_decides") {
  FakeRoot root;
  root.available(64 * kGibBytes).file("proc/self/cgroup", "0::/a/b\n");
  root.file("sys/fs/cgroup/a/b/memory.max", "max\n").file("sys/fs/cgroup/a/b/memory.current", "1073741824\n");
  CHECK(root.read().available_bytes == 64 * kGibBytes);
  root.file("sys/fs/cgroup/a/memory.max", fmt::format("{}\n", 8 * kGibBytes));
  root.file("sys/fs/cgroup/a/memory.current", fmt::format("{}\n", 3 * kGibBytes));
  CHECK(root.read().available_bytes == 5 * kGibBytes);
  CHECK(root.read().decided_by == "/sys/fs/cgroup/a/memory.max");
  root.file("sys/fs/cgroup/a/memory.stat", fmt::format("anon 5\ninactive_file {}\nactive_file 7\n", kGibBytes));
  CHECK(root.read().available_bytes == 6 * kGibBytes);
  root.file("sys/fs/cgroup/a/b/memory.high", fmt::format("{}\n", 2 * kGibBytes));
  CHECK(root.read().available_bytes == kGibBytes);
  CHECK(root.read().decided_by == "/sys/fs/cgroup/a/b/memory.high");
}

TEST_CASE("a_cgroup_v1_limit_counts_at_its_path_and_at_the_mount") {
  FakeRoot root;
  root.available(64 * kGibBytes).file("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n");
  // The path is the host's; inside the container only the mount exists.
  root.file("sys/fs/cgroup/memory/memory.limit_in_bytes", fmt::format("{}\n", 4 * kGibBytes));
  root.file("sys/fs/cgroup/memory/memory.usage_in_bytes", fmt::format("{}\n", 2 * kGibBytes));
  root.file("sys/fs/cgroup/memory/memory.stat", fmt::format("inactive_file 1\ntotal_inactive_file {}\n", kGibBytes));
  CHECK(root.read().available_bytes == 3 * kGibBytes);
  root.file("sys/fs/cgroup/memory/memory.stat",
            fmt::format("hierarchical_memory_limit {}\ntotal_inactive_file {}\n", 2 * kGibBytes, kGibBytes));
  CHECK(root.read().available_bytes == kGibBytes);
}

TEST_CASE("usage_above_the_limit_leaves_nothing_and_never_less") {
  FakeRoot root;
  root.available(64 * kGibBytes).file("proc/self/cgroup", "0::/\n");
  root.file("sys/fs/cgroup/memory.max", "1000\n").file("sys/fs/cgroup/memory.current", "5000\n");
  CHECK(root.read().available_bytes == 0);
  root.file("sys/fs/cgroup/memory.stat", "inactive_file 999999\n");
  CHECK(root.read().available_bytes == 1000);
}

TEST_CASE("malformed_cgroup_files_set_no_limit") {
  for (const char* text : {"", "\n", "-5\n", "0x10\n", "99999999999999999999999\n", "12cats\n", "max\n", "\xff\xfe"}) {
    CAPTURE(text);
    FakeRoot root;
    root.available(64 * kGibBytes).file("proc/self/cgroup", "0::/../../elsewhere\n:\n::\nx\n0::\n");
    root.file("sys/fs/cgroup/memory.max", text).file("sys/fs/cgroup/memory.current", text);
    CHECK(root.read().available_bytes == 64 * kGibBytes);
  }
}

TEST_CASE("a_meminfo_without_available_memory_counts_free_and_cached_or_is_refused") {
  FakeRoot root;
  root.file("proc/meminfo", "MemTotal: 100 kB\nMemFree: 10 kB\nCached: 5 kB\n");
  CHECK(root.read().available_bytes == 15 * 1024);
  root.file("proc/meminfo", "nonsense\n");
  CHECK_THROWS_WITH_AS(root.read(), doctest::Contains("--ram-budget"), Error);
  CHECK_THROWS_AS(read_system_memory("/nonexistent"), Error);
}

TEST_CASE("the_lock_limit_is_read_and_unlimited_is_none") {
  FakeRoot root;
  root.available(kGibBytes).file("proc/self/limits",
                                 "Limit                     Soft Limit           Hard Limit           Units     \n"
                                 "Max locked memory         65536                8388608              bytes     \n");
  CHECK(root.read().memlock_bytes == 65536);
  root.file("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes     \n");
  CHECK_FALSE(root.read().memlock_bytes.has_value());
}

TEST_CASE("this_machine_has_some_memory_available") {
  const SystemMemory memory = read_system_memory();
  CHECK(memory.available_bytes > 0);
  CHECK(memory.available_bytes <= memory.total_bytes);
}

TEST_CASE("a_plan_that_does_not_fit_is_refused_with_both_numbers_and_the_flag_that_helps") {
  Budget budget;
  budget.limit(MemoryPlace::ram(), 8 * kGibBytes, "/sys/fs/cgroup/memory.max");
  budget.add("experts", 6 * kGibBytes, MemoryPlace::ram());
  budget.add("sequence state", 2 * kGibBytes, MemoryPlace::ram(), {"lower --context", 2 * kGibBytes});
  CHECK(refusal(budget).empty());  // exactly full
  budget.add("workspace", 3 * kGibBytes, MemoryPlace::ram(), {"lower --chunk", 2 * kGibBytes + kGibBytes / 2});
  std::string message = refusal(budget);
  CHECK(has(message, "RAM needed: 11.00 GiB"));
  CHECK(has(message, "experts 6.00 GiB"));
  CHECK(has(message, "available: 8.00 GiB (/sys/fs/cgroup/memory.max)"));
  CHECK(has(message, "short by 3.00 GiB; lower --chunk and lower --context"));
  budget.add("more experts", 90 * kGibBytes, MemoryPlace::ram());
  CHECK(has(refusal(budget), "no flag saves that much"));
}

TEST_CASE("one_flag_that_is_enough_is_advised_alone") {
  Budget budget;
  budget.limit(MemoryPlace::vram(1), 10, "the device");
  budget.add("a", 8, MemoryPlace::vram(1), {"lower --a", 1});
  budget.add("b", 8, MemoryPlace::vram(1), {"lower --b", 7});
  budget.add("elsewhere", 1000, MemoryPlace::vram(0), {"lower --c", 1000});
  const std::string message = refusal(budget);
  CHECK(has(message, "VRAM of rank 1 needed: 16 bytes"));
  CHECK(message.ends_with("; lower --b"));
}

TEST_CASE("the_tighter_of_two_limits_holds_and_a_users_own_limit_is_the_advice") {
  Budget budget;
  budget.add("experts", 5 * kGibBytes, MemoryPlace::ram());
  budget.limit(MemoryPlace::ram(), 64 * kGibBytes, "/proc/meminfo");
  budget.limit(MemoryPlace::ram(), 4 * kGibBytes, "--ram-budget");
  CHECK(has(refusal(budget), "available: 4.00 GiB (--ram-budget), short by 1.00 GiB; raise --ram-budget"));
}

TEST_CASE("sums_saturate_instead_of_wrapping_into_a_fit") {
  Budget budget;
  budget.limit(MemoryPlace::ram(), kGibBytes, "x");
  const int64_t huge = std::numeric_limits<int64_t>::max() - 5;
  budget.add("a", huge, MemoryPlace::ram());
  budget.add("b", huge, MemoryPlace::ram());
  CHECK(budget.total(MemoryPlace::ram()) == std::numeric_limits<int64_t>::max());
  CHECK_FALSE(refusal(budget).empty());
}

TEST_CASE("the_table_lists_rows_sums_and_limits_by_place") {
  Budget budget;
  budget.limit(MemoryPlace::ram(), 8 * kGibBytes, "--ram-budget");
  budget.add("experts", 6 * kGibBytes, MemoryPlace::ram());
  budget.add("weights", kGibBytes / 2, MemoryPlace::vram(0));
  CHECK(budget.table() ==
        "RAM\n"
        "  experts                          6.00 GiB\n"
        "  sum                              6.00 GiB\n"
        "  available                        8.00 GiB  (--ram-budget)\n"
        "VRAM of rank 0\n"
        "  weights                        512.00 MiB\n"
        "  sum                            512.00 MiB\n");
}

TEST_CASE("the_rate_is_that_of_the_last_seconds_and_the_time_left_follows") {
  ProgressMeter meter(1000);
  LoadProgress progress = meter.update(0, 100);
  CHECK(progress.bytes_per_s == 0);
  CHECK_FALSE(progress.seconds_left.has_value());
  progress = meter.update(100, 101);
  CHECK(progress.bytes_per_s == doctest::Approx(100));
  CHECK(*progress.seconds_left == doctest::Approx(9));
  for (int s = 2; s <= 30; ++s) progress = meter.update(100 + 10 * (s - 1), 100 + s);  // the disk slows down to 10
  CHECK(progress.bytes_per_s == doctest::Approx(10));
  CHECK(*progress.seconds_left == doctest::Approx(61));
  progress = meter.update(5000, 131);
  CHECK(progress.done == 1000);
  CHECK(*progress.seconds_left == 0);
}

TEST_CASE("progress_survives_a_standing_clock_no_bytes_and_many_updates") {
  ProgressMeter meter(10);
  for (int i = 0; i < 100'000; ++i) meter.update(0, 5);
  CHECK_FALSE(meter.update(0, 6).seconds_left.has_value());
  ProgressMeter nothing(0);
  CHECK(*nothing.update(0, 1).seconds_left == 0);
  CHECK(progress_text({.done = 3 * kGibBytes,
                       .total = 12 * kGibBytes,
                       .bytes_per_s = static_cast<double>(kGibBytes),
                       .seconds_left = 8.2}) == "3.0 of 12.0 GiB, 1.00 GiB/s, 9 s left");
}

TEST_CASE("the_pinning_warning_gives_reached_size_limit_and_remedies_in_one_line") {
  const std::string message = pinning_warning(kGibBytes / 2, 57 * kGibBytes, 65536);
  CHECK(has(message, "host pinning stopped at 512.00 MiB of 57.00 GiB"));
  CHECK(has(message, "the GPU is not full"));
  CHECK(has(message, "RLIMIT_MEMLOCK is 64.00 KiB"));
  CHECK(has(message, "limits.conf"));
  CHECK(has(message, "LimitMEMLOCK"));
  CHECK(message.find('\n') == std::string::npos);
  CHECK(has(pinning_warning(0, kGibBytes, std::nullopt), "stopped at 0 bytes"));
}

TEST_CASE("an_engine_whose_plan_exceeds_the_ram_budget_is_refused_before_it_loads") {
  cpu::CpuBackend backend(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1}));
  bool loading = false;
  EngineOptions options;
  options.model_dir = OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp";
  options.context = 256;
  options.chunk = 64;
  options.progress = [&](int64_t, int64_t) { loading = true; };
  options.ram_budget_bytes = 1 << 20;
  try {
    Engine engine(options, backend);
    FAIL("a plan of several MiB was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resource);
    CHECK(has(error.message(), "RAM needed: "));
    CHECK(has(error.message(), "available: 1.00 MiB (--ram-budget)"));
    CHECK(has(error.message(), "raise --ram-budget"));
  }
  CHECK_FALSE(loading);
}

}  // namespace offload::budget_test
