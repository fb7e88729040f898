#include "offload/direct_reader.h"

#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/base.h"
#include "core/checkpoint.h"
#include "core/host_memory.h"

namespace offload {
namespace {

// Requests this close together are read as one range: the gap costs less than another read would.
constexpr int64_t kGapBytesMax = 64 << 10;

int64_t aligned_down(int64_t value) {
  return value / DirectReader::kReadAlignment * DirectReader::kReadAlignment;
}
int64_t aligned_up(int64_t value) {
  return aligned_down(value + DirectReader::kReadAlignment - 1);
}

// Copies the part of `request` that lies in file bytes [begin, begin + bytes); returns how many bytes that was.
int64_t copy_out(const ReadRequest& request, int64_t begin, const std::byte* chunk, int64_t bytes) {
  const int64_t end = begin + bytes;
  int64_t row = 0;
  if (request.rows > 1 && begin > request.offset) row = (begin - request.offset) / request.file_stride;
  int64_t copied = 0;
  for (; row < request.rows; ++row) {
    const int64_t at = request.offset + row * request.file_stride;
    const int64_t from = std::max(at, begin), to = std::min(at + request.row_bytes, end);
    if (at >= end) break;
    if (from >= to) continue;
    std::memcpy(request.dest + row * request.row_bytes + (from - at), chunk + (from - begin),
                static_cast<size_t>(to - from));
    copied += to - from;
  }
  return copied;
}

// io_uring's own cleanup: waits for nothing; the worker drains before it goes.
class Ring {
 public:
  // False where the kernel, a container's filter or a limit refuses.
  bool open(int depth) {
    open_ = io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0) == 0;
    return open_;
  }
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (open_) io_uring_queue_exit(&ring_);
  }
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
  bool open_ = false;
};

bool uring_works() {
  Ring ring;
  return ring.open(2);
}

}  // namespace

// One aligned read.
struct DirectReader::Chunk {
  int file = 0;
  int64_t begin = 0;    // aligned
  int64_t bytes = 0;    // aligned
  int64_t need = 0;     // bytes from begin on that requests want
  size_t first = 0;     // the first request, by offset, that may overlap
  size_t requests = 0;  // how many from there on
};

// One thread of a read(): its queue, its staging buffers, and what all of them share.
class DirectReader::Worker {
 public:
  struct Shared {
    const DirectReader& reader;
    std::span<const ReadRequest> requests;  // sorted by file and offset
    std::span<const Chunk> chunks;
    std::span<const FileDescriptor> direct;  // -1: not to be had
    int depth = 1;
    std::atomic<size_t> next{0};
    std::atomic<int64_t> issued{0};
    std::atomic<bool> fell_back{false};  // a direct read was refused
    std::atomic<bool> pooled{false};     // a thread got no ring
  };

  Worker(Shared& shared, LoadMeter& meter)
      : shared_(shared),
        meter_(meter),
        staging_(shared.depth * shared.reader.options_.chunk_bytes + kReadAlignment, "reading the checkpoint") {
    const auto address = reinterpret_cast<uintptr_t>(staging_.data());
    base_ = staging_.data() + (kReadAlignment - static_cast<int64_t>(address) % kReadAlignment) % kReadAlignment;
  }

  void run_pool() {
    for (const Chunk* chunk = take(); chunk != nullptr; chunk = take()) {
      const int injected = fault();
      const ssize_t result = injected != 0 ? -injected : read_once(*chunk, base_);
      finish(*chunk, base_, result);
    }
  }

  void run_uring(Ring& ring) {
    std::vector<const Chunk*> in_flight(static_cast<size_t>(shared_.depth), nullptr);
    std::vector<int> injected(in_flight.size(), 0);
    // Also when something throws: the kernel writes into the staging buffers until the last read has ended.
    struct Drain {
      io_uring* ring;
      int count = 0;
      ~Drain() {
        while (count > 0) {
          io_uring_cqe* done = nullptr;
          const int status = io_uring_wait_cqe(ring, &done);
          if (status == -EINTR) continue;
          if (status < 0) return;
          io_uring_cqe_seen(ring, done);
          --count;
        }
      }
    } reads{ring.get()};

    const auto submit = [&](size_t slot, const Chunk& chunk) {
      in_flight[slot] = &chunk;
      injected[slot] = fault();
      io_uring_sqe* entry = io_uring_get_sqe(ring.get());
      OFL_ASSERT(entry != nullptr);  // the queue is as deep as there are slots
      io_uring_prep_read(entry, descriptor(chunk), buffer(slot), static_cast<unsigned>(chunk.bytes),
                         static_cast<uint64_t>(chunk.begin));
      io_uring_sqe_set_data64(entry, slot);
      int status = 0;
      do status = io_uring_submit(ring.get());
      while (status == -EINTR || status == -EAGAIN || status == -EBUSY);
      if (status < 0) fail(chunk, chunk.begin, std::strerror(-status));
      ++reads.count;
    };
    for (size_t slot = 0; slot < in_flight.size(); ++slot) {
      const Chunk* chunk = take();
      if (chunk == nullptr) break;
      submit(slot, *chunk);
    }
    while (reads.count > 0) {
      io_uring_cqe* done = nullptr;
      const int status = io_uring_wait_cqe(ring.get(), &done);
      if (status == -EINTR) continue;
      if (status < 0) throw_error(ErrorCode::resource, "waiting for reads failed: {}", std::strerror(-status));
      const auto slot = static_cast<size_t>(io_uring_cqe_get_data64(done));
      const ssize_t result = injected[slot] != 0 ? -injected[slot] : done->res;
      io_uring_cqe_seen(ring.get(), done);
      --reads.count;
      const Chunk& chunk = *in_flight[slot];
      if (meter_.stopped()) return;
      finish(chunk, buffer(slot), result);
      if (const Chunk* next = take()) submit(slot, *next);
    }
  }

 private:
  const Chunk* take() {
    if (meter_.stopped()) return nullptr;
    const size_t index = shared_.next.fetch_add(1);
    return index < shared_.chunks.size() ? &shared_.chunks[index] : nullptr;
  }

  std::byte* buffer(size_t slot) { return base_ + static_cast<int64_t>(slot) * shared_.reader.options_.chunk_bytes; }

  int plain_descriptor(const Chunk& chunk) const {
    return shared_.reader.files_[static_cast<size_t>(chunk.file)].descriptor;
  }
  int descriptor(const Chunk& chunk) const {
    const int direct = shared_.direct[static_cast<size_t>(chunk.file)].get();
    return direct >= 0 ? direct : plain_descriptor(chunk);
  }

  int fault() {
    const int64_t n = shared_.issued.fetch_add(1);
    return shared_.reader.options_.fault ? shared_.reader.options_.fault(n) : 0;
  }

  ssize_t read_once(const Chunk& chunk, std::byte* out) const {
    const ssize_t count = ::pread(descriptor(chunk), out, static_cast<size_t>(chunk.bytes), chunk.begin);
    return count < 0 ? -errno : count;
  }

  // A read has ended with `result` bytes or -errno. What is missing, if anything, comes through the page cache: the
  // unaligned end of a file, a short read, a file system that takes O_DIRECT at open and refuses it at read.
  void finish(const Chunk& chunk, std::byte* bytes, ssize_t result) {
    if (result < 0 && result != -EINVAL && result != -EINTR && result != -EAGAIN && result != -EOPNOTSUPP)
      fail(chunk, chunk.begin, std::strerror(static_cast<int>(-result)));
    if (result < 0) shared_.fell_back = true;
    for (int64_t have = std::max<int64_t>(0, result); have < chunk.need;) {
      const ssize_t count =
          ::pread(plain_descriptor(chunk), bytes + have, static_cast<size_t>(chunk.need - have), chunk.begin + have);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(chunk, chunk.begin + have, std::strerror(errno));
      if (count == 0) fail(chunk, chunk.begin + have, "the file ends here; fetch it again");
      have += count;
    }
    for (size_t i = chunk.first; i < chunk.first + chunk.requests; ++i)
      meter_.add(copy_out(shared_.requests[i], chunk.begin, bytes, chunk.need));
  }

  [[noreturn]] void fail(const Chunk& chunk, int64_t offset, const std::string& reason) const {
    const DirectReader& reader = shared_.reader;
    // Name what was asked for: the chunk's aligned start may lie in the tensor before it.
    for (size_t i = chunk.first; i < chunk.first + chunk.requests; ++i) {
      if (shared_.requests[i].end() <= offset) continue;
      offset = std::max(offset, shared_.requests[i].offset);
      break;
    }
    const std::string& path = reader.files_[static_cast<size_t>(chunk.file)].path;
    const std::string name = reader.options_.name_at ? reader.options_.name_at(chunk.file, offset) : "";
    throw_error(ErrorCode::input, "{}: reading {}{}at byte {} of the file failed: {}", printable(path, 4096), name,
                name.empty() ? "" : " ", offset, reason);
  }

  Shared& shared_;
  LoadMeter& meter_;
  HostMemory staging_;
  std::byte* base_;
};

DirectReader::DirectReader(std::vector<ReadFile> files, DirectReaderOptions options)
    : files_(std::move(files)), options_(std::move(options)) {
  OFL_ASSERT(options_.threads >= 1 && options_.queue_depth >= 1);
  OFL_ASSERT(options_.chunk_bytes > 0 && options_.chunk_bytes % kReadAlignment == 0 &&
             options_.chunk_bytes <= (int64_t{1} << 30));
}

int64_t DirectReader::staging_bytes() const {
  const int64_t buffers =
      std::max(int64_t{options_.threads} * options_.queue_depth, std::max<int64_t>(options_.threads, kPoolThreads));
  return buffers * (options_.chunk_bytes + kReadAlignment);
}

// The union of the requests' extents, near ones joined, cut into chunks.
std::vector<DirectReader::Chunk> DirectReader::plan(std::span<const ReadRequest> sorted) const {
  std::vector<Chunk> chunks;
  size_t range_first = 0;
  while (range_first < sorted.size()) {
    const ReadRequest& head = sorted[range_first];
    int64_t range_end = head.end();
    size_t range_last = range_first + 1;
    for (; range_last < sorted.size(); ++range_last) {
      const ReadRequest& next = sorted[range_last];
      if (next.file != head.file || next.offset > range_end + kGapBytesMax) break;
      range_end = std::max(range_end, next.end());
    }
    size_t first = range_first, last = range_first;
    for (int64_t begin = aligned_down(head.offset); begin < range_end; begin += options_.chunk_bytes) {
      const int64_t end = std::min(begin + options_.chunk_bytes, range_end);
      while (first < range_last && sorted[first].end() <= begin) ++first;
      last = std::max(last, first);
      while (last < range_last && sorted[last].offset < end) ++last;
      chunks.push_back({head.file, begin, aligned_up(end) - begin, end - begin, first, last - first});
    }
    range_first = range_last;
  }
  return chunks;
}

ReadReport DirectReader::read(std::span<const ReadRequest> requests, const LoadProgressSink& progress) {
  std::vector<ReadRequest> sorted;
  sorted.reserve(requests.size());
  for (const ReadRequest& request : requests) {
    OFL_ASSERT(request.file >= 0 && static_cast<size_t>(request.file) < files_.size());
    OFL_ASSERT(request.offset >= 0 && request.row_bytes >= 0 && request.rows >= 0);
    OFL_ASSERT(request.rows <= 1 || request.file_stride >= request.row_bytes);
    if (request.bytes() > 0) sorted.push_back(request);
  }
  std::sort(sorted.begin(), sorted.end(), [](const ReadRequest& a, const ReadRequest& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  const std::vector<Chunk> chunks = plan(sorted);

  // The second descriptor opens the very file that the first one has, whatever its path names by now.
  std::vector<FileDescriptor> direct;
  bool all_direct = options_.use_direct;
  for (const ReadFile& file : files_) {
    const std::string same = fmt::format("/proc/self/fd/{}", file.descriptor);
    direct.emplace_back(options_.use_direct ? ::open(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT) : -1);
    all_direct = all_direct && direct.back().get() >= 0;
  }
  const bool uring = options_.use_uring && uring_works();
  Worker::Shared shared{*this, sorted, chunks, direct, uring ? options_.queue_depth : 1};
  const int threads_wanted = uring ? options_.threads : std::max(options_.threads, kPoolThreads);
  const int threads =
      std::clamp(threads_wanted, 1, std::max(1, static_cast<int>(std::min<size_t>(chunks.size(), 1024))));
  run_load(
      threads,
      [&](int, LoadMeter& meter) {
        Worker worker(shared, meter);
        Ring ring;
        if (uring && ring.open(shared.depth)) {
          worker.run_uring(ring);
        } else {
          shared.pooled = true;
          worker.run_pool();
        }
      },
      progress);
  ReadReport report{.reads = static_cast<int64_t>(chunks.size()),
                    .used_uring = !shared.pooled,
                    .used_direct = all_direct && !shared.fell_back};
  for (const Chunk& chunk : chunks) report.file_bytes += chunk.bytes;
  return report;
}

}  // namespace offload
