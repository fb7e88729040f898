// Engine: one model, loaded and planned, ready to advance sequences.
//
// Owns everything a step needs, allocated and checked by the constructor; steps allocate nothing. Confined to one
// thread.
#ifndef OFFLOAD_OFFLOAD_ENGINE_H_
#define OFFLOAD_OFFLOAD_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/checkpoint.h"
#include "core/model.h"
#include "core/model_spec.h"
#include "core/sequence.h"
#include "offload/budget.h"
#include "offload/expert_executor.h"
#include "offload/host_table.h"
#include "offload/residency.h"

namespace offload {

struct EngineOptions {
  std::string model_dir;       // a checkpoint folder; for a dummy only its config.json is read
  bool dummy_weights = false;  // made up from `seed` instead of read
  uint64_t seed = 0;
  int64_t context = 0;  // positions a sequence may have; 0: the model's own, at most kContextDefault
  int64_t chunk = 0;    // rows of one step at most; 0: kChunkDefault
  int load_threads = 1;
  // Host memory that may be used; nothing: what the system has available.
  std::optional<int64_t> ram_budget_bytes = {};
  bool plan_only = false;  // checks the checkpoint and fills memory(), then stops; feed() and new_sequence() are off
  Arithmetic arithmetic;
  // Told the bytes loaded so far and in all. May throw Error{interrupted} to stop the load.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Bytes by purpose, before anything is allocated.
struct MemoryPlan {
  int64_t weights = 0, experts = 0, tables = 0, sequence = 0, workspace = 0;
  int64_t total() const { return weights + experts + tables + sequence + workspace; }
};

class Engine {
 public:
  static constexpr int64_t kContextDefault = 32768;
  static constexpr int64_t kChunkDefault = 512;

  // `backend` outlives the engine. Throws Error: input for the checkpoint, usage for options that it cannot meet,
  // resource for memory.
  Engine(const EngineOptions& options, Backend& backend);
  ~Engine();

  // The positions that an engine with these options would have. Throws Error{usage}.
  static int64_t context_of(const EngineOptions& options, const ModelSpec& spec);

  const ModelSpec& spec() const { return spec_; }
  const MemoryPlan& memory() const { return memory_; }
  int64_t context() const { return layout_.context(); }
  int64_t chunk() const { return chunk_; }
  std::span<const std::string> warnings() const { return warnings_; }
  // Of routed experts computed so far: each run of one expert counts its weights once.
  int64_t expert_bytes() const { return executor_->expert_bytes(); }

  // A fresh sequence; the engine outlives it. Throws Error{resource}.
  SequenceState new_sequence() { return SequenceState(layout_, backend_); }

  // Which rows of a feed have their logits computed.
  enum class LogitRows { none, last, all };
  // row: index into the tokens fed; logits: F32 [vocab]. May throw to stop.
  using LogitSink = std::function<void(int64_t row, std::span<const float> logits)>;

  // Advances `sequence` over `tokens` in chunks of at most chunk(). Throws Error{usage} when an id is outside the
  // vocabulary or the context would be exceeded (then the sequence is unchanged). `between_chunks` may throw to stop
  // early.
  void feed(SequenceState& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
            const Model::LayerTap& tap = {}, const std::function<void()>& between_chunks = {});

 private:
  void plan();
  Budget budget(const EngineOptions& options) const;
  ResidencyLoadOptions expert_load_options(const EngineOptions& options) const;
  void load(const EngineOptions& options);
  void plan_steps(Model& model, const StateLayout& layout, Arena& arena);
  void step(SequenceState& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
            int64_t row_offset, const Model::LayerTap& tap);

  Backend& backend_;
  ModelSpec spec_;
  std::vector<std::string> warnings_;
  Arithmetic arithmetic_;
  int64_t chunk_;
  StateLayout layout_;
  MemoryPlan memory_;

  std::optional<Checkpoint> checkpoint_;
  std::optional<TextTensors> tensors_;
  std::unique_ptr<WeightSource> source_;
  std::optional<Residency> residency_;
  std::vector<std::unique_ptr<RamTable>> tables_;

  Buffer weights_memory_, workspace_memory_, scratch_memory_;
  std::optional<ExpertExecutor> executor_;
  std::optional<Model> model_;
  Arena workspace_;
  std::vector<float> logits_;  // [kLogitTile, vocab] on the host
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_ENGINE_H_
