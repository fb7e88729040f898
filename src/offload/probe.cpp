#include "offload/probe.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <thread>

#include "core/host_memory.h"
#include "offload/budget.h"
#include "offload/cost_model.h"

namespace offload {
namespace {

constexpr int64_t kDiskBytesMax = int64_t{1} << 30;
constexpr int64_t kDiskBlock = int64_t{8} << 20;
constexpr int kDiskThreads = 4;
constexpr size_t kDiskAlignment = 4096;

double sensible(double value, std::string_view what) {
  if (std::isfinite(value) && value > 0) return value;
  throw_error(ErrorCode::resource, "measuring {} gave {}; run the probe again on an idle machine", what,
              number_text(value));
}

struct Descriptor {
  explicit Descriptor(int number_) : number(number_) {}
  ~Descriptor() {
    if (number >= 0) close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number;
};

[[noreturn]] void fail(const std::string& path) {
  throw_error(ErrorCode::input, "{}: {}", printable(path, 4096), std::strerror(errno));
}

}  // namespace

DiskRate measure_disk_read(const std::string& path, int64_t bytes_max) {
  DiskRate rate{.is_direct = true};
  // Not blocking, so that a named pipe is refused instead of waited for.
  int number = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
  if (number < 0 && errno == EINVAL) {
    rate.is_direct = false;
    number = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  }
  const Descriptor file(number);
  struct stat status {};
  if (file.number < 0 || fstat(file.number, &status) != 0) fail(path);
  if (!S_ISREG(status.st_mode)) throw_error(ErrorCode::input, "{}: not a regular file", printable(path, 4096));
  const int64_t blocks = std::min<int64_t>(status.st_size, bytes_max) / kDiskBlock;
  if (blocks < kDiskThreads)
    throw_error(ErrorCode::input, "{}: {} bytes, expected {} at least for a disk measurement; name a larger file",
                printable(path, 4096), status.st_size, kDiskThreads * kDiskBlock);
  if (!rate.is_direct) posix_fadvise(file.number, 0, 0, POSIX_FADV_DONTNEED);

  std::atomic<int64_t> next{0};
  std::atomic<int> error{0};
  const auto read_blocks = [&] {
    struct Free {
      void operator()(void* memory) const { std::free(memory); }
    };
    const std::unique_ptr<void, Free> block(std::aligned_alloc(kDiskAlignment, static_cast<size_t>(kDiskBlock)));
    if (block == nullptr) error = ENOMEM;
    for (int64_t i = next++; i < blocks && error == 0; i = next++)
      for (int64_t done = 0; done < kDiskBlock && error == 0;) {
        const ssize_t count = pread(file.number, static_cast<char*>(block.get()) + done,
                                    static_cast<size_t>(kDiskBlock - done), i * kDiskBlock + done);
        if (count > 0) done += count;
        if (count == 0) error = EIO;  // the file shrank
        if (count < 0 && errno != EINTR) error = errno;
      }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int t = 0; t < kDiskThreads; ++t) threads.emplace_back(read_blocks);
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  errno = error;
  if (error != 0) fail(path);
  rate.bytes_per_s = static_cast<double>(blocks * kDiskBlock) / std::max(seconds, 1e-9);
  return rate;
}

void fit_tile(DeviceRates& device, const std::vector<GemmTiming>& timings) {
  Machine machine;
  machine.device = device;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t rows = 16; rows <= 256; rows *= 2)
    for (int64_t columns = 16; columns <= 256; columns *= 2) {
      machine.device.tile_rows = rows;
      machine.device.tile_columns = columns;
      const CostModel costs(machine, GemmMath::bf16, 1);
      double error = 0;
      for (const GemmTiming& one : timings) {
        const StepOp op{
            "linear", {2 * (one.m + one.n) * one.k, 2 * one.m * one.n, 2 * one.m * one.n * one.k}, one.m, one.n, one.k};
        const double ratio = std::log(static_cast<double>(std::max<int64_t>(1, costs.op_ns(op))) * 1e-9 / one.seconds);
        error += ratio * ratio;
      }
      if (error >= least) continue;
      least = error;
      device.tile_rows = rows;
      device.tile_columns = columns;
    }
}

namespace {

// Tells what is measured next, and notes where each number comes from.
struct Notes {
  std::function<std::string_view(std::string_view what)> next;
  std::map<std::string, std::string>& sources;
  std::string measured;

  void measure(const char* field, const std::string& how) const { sources[field] = measured + ": " + how; }
  void say(const char* field, const std::string& text) const { sources[field] = text; }
};

void measure_host(const HostProbe& functions, const Notes& notes, HostRates& host) {
  host.cores = functions.cores;
  host.ram_bytes = functions.memory_bytes;
  host.dram_bytes_per_s = sensible(functions.dram_read_bytes_per_s(), notes.next("memory reads"));
  notes.measure("host.dram_gib_s", "all threads read 1 GiB, best of several");
  host.fma_flops = sensible(functions.fma_flops(), notes.next("FMA peak"));
  notes.measure("host.fma_tflops", "FP32 on registers, best of several");
}

void measure_device(const DeviceProbe& functions, const Notes& notes, const HostRates& host, DeviceRates& device) {
  device.kind = functions.kind;
  device.memory_bytes = functions.memory_bytes;
  device.compute_units = std::max<int64_t>(1, functions.compute_units);
  if (functions.memory_read_bytes_per_s) {
    device.memory_bytes_per_s = sensible(functions.memory_read_bytes_per_s(), notes.next("device memory reads"));
    notes.measure("device.memory_gib_s", "2 GiB read once, best of several");
  } else {
    device.memory_bytes_per_s = host.dram_bytes_per_s;
    notes.say("device.memory_gib_s", "the host's memory is the device's");
  }
  device.launch_gap_s = sensible(functions.launch_seconds(), notes.next("op launches"));
  notes.measure("device.launch_gap_us", "ops with next to nothing to do, in a row");

  notes.next("large matrix products");
  const int64_t size = functions.large_product;
  for (const GemmMath math : {GemmMath::bf16, GemmMath::fp16}) {
    const auto at = static_cast<size_t>(math);
    const double seconds = sensible(functions.large_gemm_seconds(math, size), "a large matrix product");
    device.gemm_flops[at] = 2.0 * std::pow(static_cast<double>(size), 3) / seconds;
    notes.measure(fmt::format("device.gemm_tflops.{}", kGemmMathNames[at]).c_str(),
                  fmt::format("[{0}, {0}] x [{0}, {0}]", size));
  }

  notes.next("product of one row");
  constexpr int64_t kRows = 32768, kColumns = 4096;  // 256 MiB of weights: larger than caches
  const double gemv_s = sensible(functions.gemm_seconds(1, kRows, kColumns), "a product of one row");
  device.gemv_efficiency = std::clamp(2.0 * kRows * kColumns / gemv_s / device.memory_bytes_per_s, 0.01, 1.0);
  notes.measure("device.gemv_efficiency",
                fmt::format("[1, {}] x [{}, {}], of the memory's rate", kColumns, kRows, kColumns));

  notes.next("small matrix products");
  std::vector<GemmTiming> timings;
  std::string shapes;
  for (const int64_t rows : {16, 48, 160}) {
    constexpr int64_t kN = 320, kK = 1024;
    timings.push_back({rows, kN, kK, sensible(functions.gemm_seconds(rows, kN, kK), "a small matrix product")});
    shapes += fmt::format(" {}x{}x{} {:.0f} us", rows, kN, kK, timings.back().seconds * 1e6);
  }
  fit_tile(device, timings);
  notes.measure("device.tile_rows", "fitted to" + shapes);
  notes.say("device.tile_columns", "as tile_rows");
}

// Writes to every page, from several threads.
void touch(std::span<std::byte> memory, int64_t threads) {
  constexpr size_t kPage = 4096, kPiece = size_t{64} << 20;
  std::atomic<size_t> next{0};
  std::vector<std::thread> team;
  for (int64_t t = 0; t < threads; ++t)
    team.emplace_back([&] {
      for (size_t begin = next.fetch_add(kPiece); begin < memory.size(); begin = next.fetch_add(kPiece))
        for (size_t at = begin; at < std::min(begin + kPiece, memory.size()); at += kPage) memory[at] = std::byte{1};
    });
  for (std::thread& thread : team) thread.join();
}

// Touches and pins `bytes` of fresh memory; nothing where the system pins no more.
std::optional<double> pin_seconds(const LinkProbe& functions, int64_t bytes, int64_t threads) {
  const HostMemory memory(bytes, "pages to pin");
  PinnedPieces pinned;
  const std::array<std::span<std::byte>, 1> spans{memory.span()};
  const auto start = std::chrono::steady_clock::now();
  touch(spans[0], threads);
  if (!pinned.pin(spans, functions.pinning, {}).pinned) return {};
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure_link(const LinkProbe& functions, int64_t pin_bytes, const Notes& notes, LinkRates& link, HostRates& host) {
  notes.next("copies to the device");
  constexpr int64_t kLong = int64_t{256} << 20, kShort = int64_t{64} << 10;
  const double long_s = sensible(functions.copy_seconds(kLong), "copies to the device");
  const double short_s = sensible(functions.copy_seconds(kShort), "copies to the device");
  link.h2d_bytes_per_s = static_cast<double>(kLong) / long_s;
  link.copy_overhead_s = std::max(0.0, short_s - static_cast<double>(kShort) / link.h2d_bytes_per_s);
  notes.measure("link.h2d_gib_s", "pinned copies of 256 MiB in a row");
  notes.measure("link.copy_overhead_us", "pinned copies of 64 KiB in a row, less their bytes at the full rate");

  host.dram_with_h2d_bytes_per_s =
      sensible(functions.dram_read_while_copying_bytes_per_s(), notes.next("memory reads beside copies"));
  notes.measure("host.dram_with_h2d_gib_s", "all threads read while the link copies");
  host.wait_s = sensible(functions.wait_seconds(), notes.next("waits for the device"));
  notes.measure("host.wait_us", "one op, then a wait for it, median");

  if (pin_bytes == 0) return;
  notes.next(fmt::format("touching and pinning {}", bytes_text(pin_bytes)));
  const auto pinned_s = pin_seconds(functions, pin_bytes, std::max<int64_t>(1, host.cores));
  host.pin_bytes_per_s = pinned_s ? static_cast<double>(pin_bytes) / sensible(*pinned_s, "pinning") : 0;
  if (pinned_s)
    notes.measure("host.pin_gib_s", fmt::format("{} touched by all threads, then pinned", bytes_text(pin_bytes)));
}

}  // namespace

Machine probe_machine(const ProbeFunctions& functions, const ProbeOptions& options,
                      const std::function<void(std::string_view)>& progress) {
  const auto next = [&](std::string_view what) {
    if (progress) progress(what);
    return what;
  };
  Machine out;
  out.name = options.name;

  if (!options.disk_file.empty()) {  // first: a wrong name shows at once
    next("disk");
    const DiskRate disk = measure_disk_read(options.disk_file, kDiskBytesMax);
    out.disk_bytes_per_s = sensible(disk.bytes_per_s, "disk reads");
    out.sources["disk_gib_s"] =
        "measured " + options.when + (disk.is_direct ? ": direct reads" : ": reads after dropping cached pages");
  }
  const Notes notes{next, out.sources, "measured " + options.when};
  measure_host(functions.host, notes, out.host);
  measure_device(functions.device, notes, out.host, out.device);
  if (functions.link) measure_link(*functions.link, options.pin_bytes, notes, out.link, out.host);
  return out;
}

}  // namespace offload
