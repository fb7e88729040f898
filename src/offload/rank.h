// RankContext: what one rank of a model owns: its device's memory, its part of the blocks, its experts' executor.
//
// Everything a step needs is allocated by load(); steps allocate nothing. After load() confined to the rank's thread.
// Does not know the other ranks but through the collective.
#ifndef OFFLOAD_OFFLOAD_RANK_H_
#define OFFLOAD_OFFLOAD_RANK_H_

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/backend.h"
#include "core/collective.h"
#include "core/model.h"
#include "core/sampler.h"
#include "core/sequence.h"
#include "offload/expert_executor.h"
#include "offload/host_table.h"
#include "offload/rank_trace.h"
#include "offload/residency.h"
#include "offload/selection_hash.h"

namespace offload {

struct RankOptions {
  RankSlice slice;
  Arithmetic arithmetic;
  int64_t context = 0;
  int64_t chunk = 0;
  int64_t group = 0;                     // tokens that pass each layer together, in chunks; at least `chunk`
  int64_t overlap_rows_min = INT64_MAX;  // see Step
  ExpertCacheOptions cache;
  bool verify = false;         // compares selections across ranks
  RankTrace* trace = nullptr;  // null: nothing is recorded; outlives the rank
};

// Bytes of one rank before anything is allocated: on its device, but for `staging` and `host_buffers` on the host.
struct RankMemory {
  int64_t weights = 0, sequence = 0, workspace = 0, slots = 0;
  int64_t stacks = 0;        // what a group takes beyond the workspace of one chunk, mostly residual stacks
  int64_t staging = 0;       // for experts that the host computes
  int64_t host_buffers = 0;  // rows of tables and logits on their way
};

class RankContext {
 public:
  // Rows that pass through lm_head at once.
  static constexpr int64_t kLogitTile = 64;

  // All references outlive the rank; `collective` is null for a world of one, `host_ops` where no expert runs on the
  // host. Plans: validates every tensor's name and shape and counts every byte, allocates nothing. Throws Error.
  RankContext(const ModelSpec& spec, const RankOptions& options, Backend& backend, Ops* host_ops,
              Collective* collective, const WeightSource& source, const Residency& residency);

  // Waits for the work under way: it uses memory that goes with the rank.
  ~RankContext();
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;

  const RankMemory& memory() const { return memory_; }
  // The host tables that the model wants, in layer order: stem, rows, columns.
  struct TableNeed {
    std::string stem;
    int64_t rows, columns;
  };
  const std::vector<TableNeed>& table_needs() const { return table_needs_; }

  // Allocates and reads the dense weights. `tables` are those of table_needs(). Throws Error.
  void load(std::span<HostTable* const> tables, const std::function<void(int64_t bytes)>& progress);

  Backend& backend() const { return backend_; }
  const StateLayout& layout() const { return layout_; }
  const ExpertExecutor& executor() const { return executor_; }

  // Advances `sequence` by `tokens`, at most a group; `continues` says that more of the same prompt comes next.
  // logits() may be asked for until the next forward(), while `sequence` lives. Throws Error{internal} when the ranks
  // were not routed alike or, with RankOptions::verify, selected other blocks; Aborted when another rank failed.
  void forward(SequenceState& sequence, std::span<const int32_t> tokens, Phase phase, bool continues,
               const Model::LayerTap& tap);

  // For rows [begin, begin + count) of the last forward: out[r * stride + v] for v in vocab(). REQUIRES: count <=
  // kLogitTile, rows of one chunk.
  void logits(int64_t begin, int64_t count, int64_t stride, std::span<float> out);
  // Row `row`'s `count` largest logits of this rank's tokens, or all of them, in the order of comes_first(): found on
  // the device. None where one is NaN or +inf. Valid until the next call. REQUIRES: count <= kTopkMax.
  std::span<const Logit> largest_logits(int64_t row, int64_t count);
  Range vocab() const { return model_->vocab(); }

  void record_routing(RoutingRecorder* recorder) { executor_.set_recorder(recorder); }
  // See ExpertExecutor.
  void forget_experts() {
    drain_lanes();
    executor_.forget();
  }

  // Waits for the work under way. Its failure is thrown by the next step that uses its lane.
  void drain_lanes() noexcept;

 private:
  Step step_of(SequenceState& sequence, std::span<const int32_t> tokens, Arena& arena, int64_t first);
  Tensor logit_tile(int64_t begin, int64_t count);
  Tensor find_largest(const Tensor& logits, int64_t count, Arena& arena);
  void compare_routings();
  int64_t plan_steps(Model& model, const StateLayout& layout, Arena& arena);
  int64_t staged_count(const Model& model) const;
  void plan_step(Model& model, SequenceState& sequence, Arena& arena, std::span<const int32_t> tokens);

  const ModelSpec& spec_;
  RankOptions options_;
  Backend& backend_;
  Collective* collective_;
  const WeightSource& source_;
  std::optional<TracedCollective> traced_collective_;
  std::optional<SelectionHash> selections_;
  ExpertExecutor executor_;
  StateLayout layout_;
  RankMemory memory_;
  std::vector<TableNeed> table_needs_;

  int64_t arena_bytes_ = 0, scratch_bytes_ = 0;
  bool has_lanes_ = false;
  bool all_could_run_on_device_ = false;  // all ranks' experts, when the last step ended
  Buffer weights_, workspace_, scratch_, slab_;
  std::optional<Model> model_;
  Arena arena_;
  std::optional<Step> step_;   // of the last forward
  Tensor stacks_;              // [rows, streams * hidden] of it
  Tensor hidden_;              // [chunk, hidden]: what lm_head reads of ...
  int64_t hidden_first_ = -1;  // ... the chunk from this row on
  std::vector<float> staged_;  // [kLogitTile, vocab of this rank]
  std::vector<Logit> largest_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RANK_H_
