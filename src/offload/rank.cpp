#include "offload/rank.h"

#include <algorithm>

#include "core/canonical.h"

namespace offload {

RankContext::RankContext(const ModelSpec& spec, const RankOptions& options, Backend& backend, Collective* collective,
                         const WeightSource& source, const Residency& residency)
    : spec_(spec),
      options_(options),
      backend_(backend),
      collective_(collective),
      source_(source),
      executor_(backend, residency, options.slice.rank, spec.layers.front().moe.top_k, options.cache),
      layout_(options.context, options.arithmetic.activations) {
  if (options_.trace != nullptr && collective_ != nullptr)
    collective_ = &traced_collective_.emplace(*collective_, backend_, *options_.trace);
  if (options_.verify && collective_ != nullptr) selections_.emplace(backend_, options_.trace);
  executor_.set_trace(options_.trace);
  Arena weights, workspace;
  WeightLoader loader(source_, backend_, weights);
  StateLayout layout(options.context, options.arithmetic.activations);
  Model model(spec_, options_.slice, loader, layout);
  for (const NgramEmbedding* user : model.table_users())
    table_needs_.push_back({user->table_stem(), user->table_rows(), user->table_columns()});
  plan_steps(model, layout, workspace);
  arena_bytes_ = workspace.peak_bytes();
  scratch_bytes_ = backend_.ops().scratch_peak_bytes();
  memory_ = {weights.peak_bytes(), layout.bytes(), arena_bytes_ + scratch_bytes_, executor_.slab_bytes()};
}

RankContext::~RankContext() {
  if (has_lanes_) drain_lanes();
  if (options_.trace != nullptr) backend_.ops().set_observer(nullptr);
}

void RankContext::load(std::span<HostTable* const> tables, const std::function<void(int64_t)>& progress) {
  weights_ = backend_.allocate(memory_.weights, "weights");
  workspace_ = backend_.allocate(arena_bytes_, "workspace");
  scratch_ = backend_.allocate(scratch_bytes_, "op scratch");
  slab_ = backend_.allocate(memory_.slots, "expert slots");
  executor_.set_slab(Tensor(slab_.data(), DType::u8, {slab_.bytes()}));
  Arena weights(weights_.data(), weights_.bytes());
  WeightLoader loader(source_, backend_, weights, progress);
  model_.emplace(spec_, options_.slice, loader, layout_);
  const std::vector<NgramEmbedding*> users = model_->table_users();
  backend_.create_events(executor_.events() + static_cast<int>(users.size()));
  has_lanes_ = true;
  for (size_t i = 0; i < users.size(); ++i) users[i]->set_table(*tables[i], executor_.events() + static_cast<int>(i));
  staged_.resize(static_cast<size_t>(std::min(kLogitTile, options_.chunk) * model_->vocab().count));
  Arena measuring;
  plan_steps(*model_, layout_, measuring);  // lets the real model size its host buffers
  backend_.ops().set_scratch(Tensor(scratch_.data(), DType::u8, {scratch_.bytes()}));
  backend_.ops().reset_cost();
  if (options_.trace != nullptr) backend_.ops().set_observer(options_.trace);
}

Step RankContext::step_of(SequenceState& sequence, std::span<const int32_t> tokens, Arena& arena, int64_t first) {
  return {.backend = backend_,
          .ops = backend_.ops(),
          .arena = arena,
          .experts = executor_,
          .sequence = sequence,
          .collective = collective_,
          .arithmetic = options_.arithmetic,
          .tokens = tokens,
          .first = first,
          .selections = selections_ ? &*selections_ : nullptr};
}

// Runs the forward pass in planning mode for the step sizes whose needs differ: each canonical row count and the chunk,
// at the end of the context where selection sees the most blocks.
void RankContext::plan_steps(Model& model, const StateLayout& layout, Arena& arena) {
  backend_.ops().set_planning(true);
  SequenceState sequence(layout);
  const int64_t chunk = options_.chunk;
  const std::vector<int32_t> tokens(static_cast<size_t>(chunk), 0);
  for (int64_t rows = 1; rows <= chunk; rows = rows <= kCanonicalRowsMax ? rows + 1 : std::max(chunk, rows + 1)) {
    const ArenaScope scope(arena);
    Step step = step_of(sequence, std::span(tokens).first(static_cast<size_t>(rows)), arena, options_.context - rows);
    const Tensor hidden = model.forward(step);
    const int64_t tile = std::min(rows, kLogitTile);
    step.ops(LinearArgs{.x = hidden.narrow(0, 0, tile),
                        .w = model.lm_head(),
                        .out = arena.take(DType::f32, {tile, model.vocab().count})});
  }
  backend_.ops().set_planning(false);
}

void RankContext::forward(SequenceState& sequence, std::span<const int32_t> tokens, const Model::LayerTap& tap) {
  std::optional<StepSpan> span;
  if (options_.trace != nullptr)
    span.emplace(*options_.trace, static_cast<int64_t>(tokens.size()), static_cast<int64_t>(spec_.layers.size()));
  arena_ = Arena(workspace_.data(), arena_bytes_);
  executor_.begin_step(static_cast<int64_t>(tokens.size()));
  Step step = step_of(sequence, tokens, arena_, sequence.length());
  try {
    hidden_ = model_->forward(step, span ? span->tap(tap) : tap);
  } catch (...) {
    drain_lanes();
    throw;
  }
  if (collective_ != nullptr && !collective_->all_equal(executor_.routing_hash()))
    throw_error(ErrorCode::internal, "the ranks routed a step differently; this is a bug of the build or the hardware");
  if (selections_ && !collective_->all_equal(selections_->value()))
    throw_error(ErrorCode::internal,
                "the ranks selected different blocks in a step; this is a bug of the build or the hardware");
}

// After a step that was cut short: what it has on a lane must not write into the next one's workspace.
void RankContext::drain_lanes() noexcept {
  for (Lane* lane : {&backend_.copy_lane(), &backend_.compute_lane()}) {
    try {
      lane->drain();
    } catch (const std::exception&) {  // the lane's own failure is thrown again by the next step that uses it
    }
  }
}

void RankContext::logits(int64_t begin, int64_t count, int64_t stride, std::span<float> out) {
  OFL_ASSERT(count <= kLogitTile);
  const ArenaScope scope(arena_);
  const Range mine = model_->vocab();
  const Tensor tile = arena_.take(DType::f32, {count, mine.count});
  backend_.ops()(LinearArgs{.x = hidden_.narrow(0, begin, count), .w = model_->lm_head(), .out = tile});
  const auto host = std::span(staged_).first(static_cast<size_t>(tile.elements()));
  {
    const HostSpan wait(options_.trace, "wait_logits", {.rows = static_cast<int32_t>(count)});
    backend_.download(tile, std::as_writable_bytes(host));
  }
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(host.begin() + r * mine.count, mine.count, out.begin() + r * stride + mine.begin);
}

}  // namespace offload
