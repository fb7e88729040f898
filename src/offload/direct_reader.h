// DirectReader: file ranges into memory at the speed of the disk.
//
// The ranges of all requests are joined, cut into aligned chunks and read once each, past the page cache (O_DIRECT)
// through io_uring with a deep queue; every request that overlaps a chunk copies its part out of it, so requests may
// have any alignment, overlap, or be strided. Where the system has no io_uring the same chunks are read by a pool of
// threads with pread, and where a file system has no O_DIRECT through the page cache: the bytes are the same on every
// path. Owns its staging buffers and second file descriptors only while read() runs. One read() at a time.
#ifndef OFFLOAD_OFFLOAD_DIRECT_READER_H_
#define OFFLOAD_OFFLOAD_DIRECT_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "offload/load_pool.h"

namespace offload {

// A file open for buffered reading; the descriptor is the caller's.
struct ReadFile {
  std::string path;  // for messages
  int descriptor = -1;
};

// `rows` runs of `row_bytes` bytes, the first at byte `offset` of the file and each `file_stride` bytes after the one
// before, to `dest` one after another. REQUIRES: with several rows, file_stride >= row_bytes.
struct ReadRequest {
  int file = 0;  // index among the reader's files
  int64_t offset = 0;
  int64_t row_bytes = 0;
  std::byte* dest = nullptr;
  int64_t rows = 1;
  int64_t file_stride = 0;

  int64_t bytes() const { return rows * row_bytes; }
  int64_t end() const { return offset + (rows - 1) * file_stride + row_bytes; }
};

struct DirectReaderOptions {
  bool use_uring = true;   // when the system has it
  bool use_direct = true;  // when the file system has it
  int threads = 1;         // that wait for reads and copy out of the staging buffers
  int queue_depth = 32;    // reads in flight per thread
  // 1 MiB: sequential direct reads of a disk reach their full rate from 512 KiB on. A multiple of kReadAlignment.
  int64_t chunk_bytes = 1 << 20;
  // "tensor NAME" at a byte of a file, for messages; may be empty.
  std::function<std::string(int file, int64_t offset)> name_at = {};
  // For tests: the errno with which read number `n` (0, 1, ... in the order they were issued) shall fail, 0 for none.
  std::function<int(int64_t n)> fault = {};
};

// How the last read() went.
struct ReadReport {
  int64_t reads = 0;       // chunks
  int64_t file_bytes = 0;  // read from files, gaps and aligned edges included
  bool used_uring = false;
  bool used_direct = false;  // for every chunk but those at the end of a file
};

class DirectReader {
 public:
  static constexpr int64_t kReadAlignment = 4096;  // of O_DIRECT offsets, sizes and memory; no disk here needs more

  DirectReader(std::vector<ReadFile> files, DirectReaderOptions options);

  // Fills all destinations. `progress` is told the requests' bytes. Throws Error{input} naming file, tensor, offset and
  // reason for the first read that fails or finds the file too short; and what `progress` throws. All reads have ended
  // by then, so the destinations may go.
  ReadReport read(std::span<const ReadRequest> requests, const LoadProgressSink& progress);

  // Memory that read() takes beside the destinations: threads * depth * chunk (a pread thread has depth 1 and there are
  // at least kPoolThreads of them), and up to 64 bytes per chunk of the plan.
  int64_t staging_bytes() const;

  static constexpr int kPoolThreads = 8;  // pread waits for one read at a time; several make the queue

 private:
  struct Chunk;
  class Worker;

  std::vector<Chunk> plan(std::span<const ReadRequest> sorted) const;

  std::vector<ReadFile> files_;
  DirectReaderOptions options_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_DIRECT_READER_H_
