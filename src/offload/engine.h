// Engine: one model, loaded and planned over its ranks, ready to advance sequences.
//
// Owns everything a step needs, allocated and checked by the constructor; steps allocate nothing. One calling thread,
// which is rank 0; the other ranks have threads of their own.
#ifndef OFFLOAD_OFFLOAD_ENGINE_H_
#define OFFLOAD_OFFLOAD_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint.h"
#include "core/model_spec.h"
#include "offload/budget.h"
#include "offload/rank.h"
#include "offload/rank_team.h"

namespace offload {

// The devices of an engine, one per rank. Outlive it.
struct Devices {
  std::vector<Backend*> backends;
  std::vector<Collective*> collectives;  // empty for one rank
  std::vector<Ops*> host_ops;            // on host memory, each for its rank's thread; empty: no expert runs there
  PinHooks pinning = {};                 // of host memory that the devices copy from
  // The system's number of the NUMA node of each rank's device, -1 where it is not known; empty: no preference.
  std::vector<int> numa_nodes = {};

  Devices(Backend& one) : backends{&one} {}  // NOLINT: one backend is a world of one
  Devices(std::vector<Backend*> all, std::vector<Collective*> ends, std::vector<Ops*> host = {})
      : backends(std::move(all)), collectives(std::move(ends)), host_ops(std::move(host)) {}
};

struct EngineOptions {
  std::string model_dir;       // a checkpoint folder; for a dummy only its config.json is read
  bool dummy_weights = false;  // made up from `seed` instead of read
  uint64_t seed = 0;
  int64_t context = 0;  // positions a sequence may have; 0: the model's own, at most kContextDefault
  int64_t chunk = 0;    // rows of a prompt computed at once, at most; 0: kChunkDefault or kDeviceChunkDefault
  // Tokens of a prompt that pass each layer together, in chunks, so that an expert is copied once for all of them; at
  // least a chunk, rounded up to whole ones. 0: kGroupChunks chunks with expert slots, one chunk without.
  int64_t prefill_group = 0;
  // Chunks of so many rows pass the layers in halves, so that the ranks' sums of one run beside the other's work.
  // Nothing: kOverlapRows where sums are slow, else never.
  std::optional<int64_t> overlap_rows_min = {};
  int load_threads = 1;
  ShardForm shard = ShardForm::expert;
  ExpertCacheOptions cache;
  // Host memory that may be used; nothing: what the system has available.
  std::optional<int64_t> ram_budget_bytes = {};
  // Device memory that each rank may use; nothing: what its device has free, less kDeviceReserveBytes.
  std::optional<int64_t> vram_budget_bytes = {};
  bool plan_only = false;  // checks the checkpoint and fills memory(), then stops; feed() and new_sequence() are off
  Arithmetic arithmetic;
  // Events of each rank that trace() keeps; 0: nothing is recorded.
  int64_t trace_events = 0;
  // Compares after every step what attention selected on each rank, too: the host then waits for the device at each
  // layer that selects. For tests, and for a build or a machine in doubt.
  bool verify_ranks = false;
  // For tests: see ReadFault.
  ReadFault read_fault = {};
  // See RankTeam; empty: a rank that hangs is waited for.
  StuckHook on_stuck = {};
  // Told the bytes loaded so far and in all. May throw Error{interrupted} to stop the load.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Bytes by purpose over all ranks, before anything is allocated. The sequence is one conversation's state.
struct MemoryPlan {
  int64_t weights = 0, experts = 0, tables = 0, sequence = 0, workspace = 0, slots = 0, stacks = 0, staging = 0;
  int64_t host_buffers = 0;             // rows of tables and logits on their way
  int64_t load_staging = 0, trace = 0;  // while experts are read; of all ranks
  int64_t total() const {
    return weights + experts + tables + sequence + workspace + slots + stacks + staging + host_buffers + load_staging +
           trace;
  }
};

// One sequence's state on every rank.
class Sequence {
 public:
  int64_t length() const { return ranks_.front().length(); }
  int64_t context() const { return ranks_.front().context(); }
  void reset() {
    for (SequenceState& state : ranks_) state.reset();
  }

 private:
  friend class Engine;
  std::vector<SequenceState> ranks_;
};

class Engine {
 public:
  static constexpr int64_t kContextDefault = 32768;
  static constexpr int64_t kChunkDefault = 512;
  static constexpr int64_t kDeviceChunkDefault = 2048;  // where memory is not the host's
  // Of a device's free memory, for what the driver takes as the run goes on.
  static constexpr int64_t kDeviceReserveBytes = int64_t{512} << 20;
  static constexpr int64_t kGroupChunks = 4;
  // Fewer rows make products too small for what is gained. On two H200 (2026-11-30, README's cut of 6 layers, resident,
  // 16,384 tokens in chunks of 8,192) halves took a prompt from 92,300 to 118,400 tok/s with sums through host memory
  // and from 130,600 to 119,400 over NVLink, where sums are quick.
  static constexpr int64_t kOverlapRows = 512;

  // Throws Error: input for the checkpoint, usage for options that it cannot meet, resource for memory.
  Engine(const EngineOptions& options, const Devices& devices);
  ~Engine();

  // The positions that an engine with these options would have. Throws Error{usage}.
  static int64_t context_of(const EngineOptions& options, const ModelSpec& spec);

  // Throws Error{usage} when the model cannot be split over so many ranks, naming the numbers that it can.
  static void require_world(const ModelSpec& spec, int world, ShardForm shard);

  const ModelSpec& spec() const { return spec_; }
  int world() const { return static_cast<int>(ranks_.size()); }
  const MemoryPlan& memory() const { return memory_; }
  const Budget& budget() const { return budget_; }
  int64_t context() const { return context_; }
  int64_t chunk() const { return chunk_; }
  int64_t prefill_group() const { return group_; }
  std::span<const std::string> warnings() const { return warnings_; }
  const RankContext& rank(int r) const { return *ranks_[static_cast<size_t>(r)]; }
  const Residency& residency() const { return *residency_; }
  // Of routed experts that the host's cores computed so far, on all ranks: each run of one expert counts its weights
  // once. On the CPU backend these are all.
  int64_t cpu_expert_bytes() const;
  RoutingShape routing_shape() const;
  // Each step's routing goes to `recorder` from now on; null: no longer. The recorder outlives its use.
  void record_routing(RoutingRecorder* recorder) {
    for (const auto& rank : ranks_) rank->record_routing(recorder);
  }
  // Empties the ranks' expert slots, for measurements of a cold cache: what follows is as behind a load.
  void forget_experts() {
    run_ranks([this](int rank) { ranks_[static_cast<size_t>(rank)]->forget_experts(); });
  }
  // What ran since the load or the last clear_trace(), one buffer per rank; none without trace_events. Waits for the
  // work under way.
  std::vector<const TraceBuffer*> trace();
  void clear_trace();

  // A fresh sequence; the engine outlives it. Throws Error{resource}.
  Sequence new_sequence();

  // Which rows of a feed have their logits computed.
  enum class LogitRows { none, last, all };
  // row: index into the tokens fed; logits: F32 [vocab]. May throw to stop.
  using LogitSink = std::function<void(int64_t row, std::span<const float> logits)>;

  // Advances `sequence` over `tokens` in chunks of at most chunk(), prefill_group() tokens layer by layer. Throws
  // Error{usage} when an id is outside the vocabulary or the context would be exceeded (then the sequence is
  // unchanged). `tap` is called on the calling thread with rank 0's stack of a chunk after each layer; a layer's chunks
  // come in order. It may throw to stop early; the sequence is then between two tokens and good for reset() alone.
  void feed(Sequence& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
            const Model::LayerTap& tap = {});

  // After a feed, of its last row: the `count` largest logits, or all, in the order of comes_first(), without the row
  // going to the host. None where one is NaN or +inf. Valid until the next call. REQUIRES: 1 <= count <= kTopkMax, the
  // sequence fed lives.
  std::span<const Logit> largest_logits(int64_t count);
  // The logits of that row. row: 0.
  void last_logits(const LogitSink& sink);

 private:
  void open(const EngineOptions& options);
  void plan(const EngineOptions& options, const Devices& devices);
  int64_t logits_bytes() const;
  std::unique_ptr<RankContext> plan_rank(const EngineOptions& options, const Devices& devices, int rank) const;
  void plan_budget(const EngineOptions& options);
  // A budget that the user names may be more than a device has: known before a load of minutes.
  void require_free_device_memory() const;
  void load(const EngineOptions& options, const Devices& devices);
  void run_ranks(const std::function<void(int rank)>& work);
  void emit_logits(int64_t begin, int64_t end, int64_t row_offset, const LogitSink& sink);

  ModelSpec spec_;
  std::vector<std::string> warnings_;
  int64_t context_, chunk_, group_;
  MemoryPlan memory_;
  std::vector<int64_t> device_bytes_;  // that each rank may use; 0 where its memory is the host's
  Budget budget_;

  std::optional<Checkpoint> checkpoint_;
  std::optional<TextTensors> tensors_;
  std::unique_ptr<WeightSource> source_;
  std::optional<Residency> residency_;
  std::vector<std::unique_ptr<RamTable>> tables_;
  std::vector<Collective*> collectives_;
  std::vector<std::unique_ptr<RankTrace>> traces_;  // by rank; empty: nothing is recorded
  std::vector<std::unique_ptr<RankContext>> ranks_;
  std::unique_ptr<RankTeam> team_;
  int64_t last_row_ = 0;        // of the last forward pass
  std::vector<Logit> largest_;  // of the last row, of each rank and of all
  Buffer logits_memory_;
  std::span<float> logits_;  // [kLogitTile, vocab] on the host
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_ENGINE_H_
