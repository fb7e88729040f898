#include "offload/probe.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

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

Machine probe_machine(const ProbeFunctions& functions, const ProbeOptions& options,
                      const std::function<void(std::string_view)>& progress) {
  const auto next = [&](std::string_view what) {
    if (progress) progress(what);
    return what;
  };
  const std::string measured = "measured " + options.when;
  Machine out;
  out.name = options.name;
  const auto source = [&](const char* field, const std::string& text) { out.sources[field] = text; };

  if (!options.disk_file.empty()) {  // first: a wrong name shows at once
    next("disk");
    const DiskRate disk = measure_disk_read(options.disk_file, kDiskBytesMax);
    out.disk_bytes_per_s = sensible(disk.bytes_per_s, "disk reads");
    source("disk_gib_s", measured + (disk.is_direct ? ": direct reads" : ": reads after dropping cached pages"));
  }
  out.host.cores = functions.cores;
  out.host.ram_bytes = functions.memory_bytes;
  out.host.dram_bytes_per_s = sensible(functions.dram_read_bytes_per_s(), next("memory reads"));
  out.host.fma_flops = sensible(functions.fma_flops(), next("FMA peak"));
  source("host.dram_gib_s", measured + ": all threads read 1 GiB, best of several");
  source("host.fma_tflops", measured + ": FP32 on registers, best of several");

  DeviceRates& device = out.device;
  device.kind = functions.device_kind;
  device.memory_bytes = functions.memory_bytes;
  device.memory_bytes_per_s = out.host.dram_bytes_per_s;
  device.compute_units = std::max<int64_t>(1, functions.cores);
  source("device.memory_gib_s", "the host's memory is the device's");
  device.launch_gap_s = sensible(functions.launch_seconds(), next("op launches"));
  source("device.launch_gap_us", measured + ": an op of one element, median");

  next("large matrix product");
  constexpr int64_t kLarge = 1024;
  const double large_s = sensible(functions.gemm_seconds(kLarge, kLarge, kLarge), "a large matrix product");
  device.gemm_flops.fill(2.0 * kLarge * kLarge * kLarge / large_s);
  source("device.gemm_tflops.bf16", measured + fmt::format(": [{0}, {0}] x [{0}, {0}], median", kLarge));
  source("device.gemm_tflops.fp16", "not measured: as bf16");

  next("product of one row");
  constexpr int64_t kRows = 8192, kColumns = 4096;  // 64 MiB of weights: larger than caches
  const double gemv_s = sensible(functions.gemm_seconds(1, kRows, kColumns), "a product of one row");
  const double gemv_bytes_per_s = 2.0 * kRows * kColumns / gemv_s;
  device.gemv_efficiency = std::clamp(gemv_bytes_per_s / device.memory_bytes_per_s, 0.01, 1.0);
  source("device.gemv_efficiency",
         measured + fmt::format(": [1, {}] x [{}, {}], of the memory's rate", kColumns, kRows, kColumns));

  next("small matrix products");
  std::vector<GemmTiming> timings;
  std::string shapes;
  for (const int64_t rows : {16, 48, 160}) {
    constexpr int64_t kN = 320, kK = 1024;
    timings.push_back({rows, kN, kK, sensible(functions.gemm_seconds(rows, kN, kK), "a small matrix product")});
    shapes += fmt::format(" {}x{}x{} {:.0f} us", rows, kN, kK, timings.back().seconds * 1e6);
  }
  fit_tile(device, timings);
  source("device.tile_rows", measured + ": fitted to" + shapes);
  source("device.tile_columns", "as tile_rows");

  return out;
}

}  // namespace offload
