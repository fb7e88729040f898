#include "offload/load_bench.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include "core/model.h"
#include "core/models/registry.h"

namespace offload {
namespace {

constexpr int64_t kPlainChunkBytes = 1 << 20;
constexpr unsigned kPlainDepth = 32;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A line "KEY: N kB" of /proc/self/status; 0 when absent.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (status >> word)
    if (word == key && status >> kib) return kib * 1024;
  return 0;
}

// Sequential reads of the whole file, dropped; returns the bytes. Throws Error{resource} where the system has no
// io_uring or no O_DIRECT: there is no plain rate to compare with then.
int64_t read_plain(const std::string& path, io_uring& ring, const HostMemory& buffers) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  struct stat status;
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0)
    throw_error(ErrorCode::resource, "{}: cannot be read directly: {}", printable(path, 4096), std::strerror(errno));
  int64_t next = 0, done = 0;
  unsigned in_flight = 0;
  const auto submit = [&](uint64_t slot) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring);
    OFL_ASSERT(entry != nullptr);
    io_uring_prep_read(entry, file.get(), buffers.data() + static_cast<int64_t>(slot) * kPlainChunkBytes,
                       static_cast<unsigned>(kPlainChunkBytes), static_cast<uint64_t>(next));
    io_uring_sqe_set_data64(entry, slot);
    io_uring_submit(&ring);
    next += kPlainChunkBytes;
    ++in_flight;
  };
  int failure = 0;
  for (unsigned slot = 0; slot < kPlainDepth && next < status.st_size; ++slot) submit(slot);
  while (in_flight > 0) {
    io_uring_cqe* entry = nullptr;
    if (io_uring_wait_cqe(&ring, &entry) < 0) continue;
    const uint64_t slot = io_uring_cqe_get_data64(entry);
    if (entry->res < 0) failure = -entry->res;
    done += std::max(0, entry->res);
    io_uring_cqe_seen(&ring, entry);
    --in_flight;
    if (failure == 0 && next < status.st_size) submit(slot);
  }
  if (failure != 0)
    throw_error(ErrorCode::resource, "{}: cannot be read directly: {}", printable(path, 4096), std::strerror(failure));
  return done;
}

double plain_rate(const Checkpoint& checkpoint, int64_t& file_bytes) {
  const HostMemory buffers(kPlainDepth * kPlainChunkBytes, "plain reads");  // 2 MiB aligned
  io_uring ring{};
  if (const int status = io_uring_queue_init(kPlainDepth, &ring, 0); status < 0)
    throw_error(ErrorCode::resource, "io_uring is not to be had: {}", std::strerror(-status));
  struct Exit {
    io_uring* ring;
    ~Exit() { io_uring_queue_exit(ring); }
  } const exit{&ring};
  const auto start = std::chrono::steady_clock::now();
  file_bytes = 0;
  for (int i = 0; i < checkpoint.files(); ++i) file_bytes += read_plain(checkpoint.file_path(i), ring, buffers);
  return static_cast<double>(file_bytes) / seconds_since(start);
}

// O_DIRECT does not look into the page cache for clean pages, but a fallback would.
void drop_cache(const Checkpoint& checkpoint) {
  for (int i = 0; i < checkpoint.files(); ++i)
    static_cast<void>(::posix_fadvise(checkpoint.file_descriptor(i), 0, 0, POSIX_FADV_DONTNEED));
}

}  // namespace

double load_efficiency(const LoadBenchResult& result) {
  std::vector<double> ratios;
  for (const LoadBenchRound& round : result.rounds)
    ratios.push_back(round.reload_bytes_per_s / round.plain_bytes_per_s);
  OFL_ASSERT(!ratios.empty());
  std::nth_element(ratios.begin(), ratios.begin() + std::ssize(ratios) / 2, ratios.end());
  return ratios[ratios.size() / 2];
}

LoadBenchResult load_bench(const Checkpoint& checkpoint, const std::vector<ExpertLayer>& layers,
                           const ExpertShape& shape, const LoadBenchOptions& options) {
  const TextTensors tensors(checkpoint.tensors(), checkpoint.path());
  const auto source = checkpoint_source(checkpoint, tensors);
  LoadBenchResult result;
  result.rss_before_bytes = status_bytes("VmRSS:");
  for (int round = 0; round < std::max(1, options.repeat); ++round) {
    Residency residency(*source, layers, shape, options.residency);
    result.expert_bytes = residency.bytes();
    result.staging_bytes = residency.load_staging_bytes(options.load);
    LoadBenchRound rates;
    const auto timed_load = [&] {
      drop_cache(checkpoint);
      const auto start = std::chrono::steady_clock::now();
      residency.load(options.load, {});
      return static_cast<double>(result.expert_bytes) / seconds_since(start);
    };
    rates.load_bytes_per_s = timed_load();
    drop_cache(checkpoint);
    rates.plain_bytes_per_s = plain_rate(checkpoint, result.file_bytes);
    rates.reload_bytes_per_s = timed_load();
    result.rounds.push_back(rates);
    result.read = residency.read_report();
    result.checksum = 0;
    for (int rank = 0; rank < residency.world(); ++rank) result.checksum ^= residency.checksum(rank);
  }
  result.rss_peak_bytes = status_bytes("VmHWM:");
  return result;
}

LoadBenchResult load_bench(const std::string& model_dir, const LoadBenchOptions& options) {
  const ModelSpec spec = load_model_spec(model_dir);
  const Checkpoint checkpoint = Checkpoint::open(model_dir);
  const TextTensors tensors(checkpoint.tensors(), checkpoint.path());
  const std::vector<ExpertLayer> layers = Model::expert_layers(spec);
  const DType dtype = expert_dtype(*checkpoint_source(checkpoint, tensors), layers.front());
  return load_bench(checkpoint, layers, Model::expert_shape(spec, dtype), options);
}

}  // namespace offload
