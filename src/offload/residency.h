// Residency: the routed experts of a model in host memory, one shard per rank, one contiguous block per expert.
//
// Owns the shards of all ranks of this process; immutable once loaded, so any thread may read. A block is
// gate [I, hidden], up [I, hidden], down [hidden, I] with I = local_shape().intermediate. Each checkpoint byte of the
// experts is in exactly one block. Peak memory of a load: bytes() + load_staging_bytes() + 64 bytes per read request
// (3 per block).
#ifndef OFFLOAD_OFFLOAD_RESIDENCY_H_
#define OFFLOAD_OFFLOAD_RESIDENCY_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/experts.h"
#include "core/host_memory.h"
#include "offload/direct_reader.h"
#include "offload/load_pool.h"
#include "offload/pinning.h"

namespace offload {

struct ResidencyOptions {
  ShardForm form = ShardForm::expert;
  int world = 1;
  // The NUMA node of each rank's device; empty, or -1 for a rank: no preference.
  std::vector<int> numa_nodes = {};
};

struct ResidencyLoadOptions {
  int threads = 1;
  // How the files are read; threads and name_at are filled in here.
  DirectReaderOptions reader = {};
  PinHooks pinning = {};
  std::optional<int64_t> memlock_bytes = {};  // RLIMIT_MEMLOCK, for the message when pinning stops
};

class Residency {
 public:
  // Validates every expert's tensors; allocates and loads nothing. `source` outlives the load. Throws Error: input for
  // the checkpoint, usage when the world does not divide the experts as `form` asks.
  Residency(const WeightSource& source, std::vector<ExpertLayer> layers, const ExpertShape& shape,
            ResidencyOptions options = {});

  const ExpertShape& shape() const { return shape_; }
  // A block's sizes: shape() with the intermediate dimension of one slice. `experts` still counts ids.
  ExpertShape local_shape() const;
  int world() const { return options_.world; }
  ShardForm form() const { return options_.form; }
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }

  // The rank that has the expert's whole block; nothing in slice form, where every rank has a part.
  std::optional<int> owner(int64_t expert) const;
  bool owns(int rank, int64_t expert) const { return owner(expert).value_or(rank) == rank; }

  int64_t blocks(int rank) const { return layers() * blocks_per_layer(rank); }
  int64_t bytes(int rank) const { return layers() * blocks_per_layer(rank) * block_stride_; }
  int64_t bytes() const;
  int64_t load_staging_bytes(const ResidencyLoadOptions& options) const;

  // Allocates, places, fills and pins all shards. `progress` is called from this thread, several times a second, with
  // the bytes filled since the last call; it may throw to stop, and so may an Error of a read; nothing is left then.
  // Again: fills the same memory anew.
  void load(const ResidencyLoadOptions& options, const LoadProgressSink& progress);

  // REQUIRES: loaded. Null when `rank` does not own the expert.
  const std::byte* block(int rank, int64_t layer, int64_t expert) const;

  bool pinned() const { return pinned_.bytes() > 0; }
  // One line each, for a log: memory that could not be bound or pinned.
  const std::vector<std::string>& warnings() const { return warnings_; }
  // How the files were read; all zero when none were.
  const ReadReport& read_report() const { return report_; }

  // A number of the shard's content, whichever way it was loaded; for tests and for debugging stray writes. Reads the
  // whole shard. REQUIRES: loaded.
  uint64_t checksum(int rank) const;

 private:
  int64_t blocks_per_layer(int rank) const;
  std::vector<ExpertPiece> pieces(int rank, int64_t layer, int64_t expert) const;
  std::byte* block_data(int rank, int64_t layer, int64_t expert) const;
  void allocate();
  void place(int threads, const LoadProgressSink& progress);
  void check_placement();
  void read_files(const ResidencyLoadOptions& options, const LoadProgressSink& progress);
  void read_source(int threads, const LoadProgressSink& progress);
  void pin(const ResidencyLoadOptions& options, const LoadProgressSink& progress);

  const WeightSource& source_;
  std::vector<ExpertLayer> layers_;
  ExpertShape shape_;
  ResidencyOptions options_;
  int64_t block_stride_ = 0;
  std::vector<HostMemory> shards_;  // by rank
  PinnedPieces pinned_;             // of shards_; goes first
  std::vector<std::string> warnings_;
  ReadReport report_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RESIDENCY_H_
