#include "offload/rank.h"

#include <algorithm>
#include <bit>

#include "core/canonical.h"
#include "offload/host_table.h"

namespace offload {

RankContext::RankContext(const ModelSpec& spec, const RankOptions& options, Backend& backend, Ops* host_ops,
                         Collective* collective, const WeightSource& source, const Residency& residency)
    : spec_(spec),
      options_(options),
      backend_(backend),
      collective_(collective),
      source_(source),
      executor_(backend, host_ops, residency, options.slice.rank, spec.layers.front().moe.top_k, options.cache),
      layout_(options.context, options.arithmetic.activations) {
  OFL_ASSERT(options_.group >= options_.chunk);
  if (options_.trace != nullptr && collective_ != nullptr)
    collective_ = &traced_collective_.emplace(*collective_, backend_, *options_.trace);
  if (options_.verify && collective_ != nullptr) selections_.emplace(backend_, options_.trace);
  executor_.set_trace(options_.trace);
  Arena weights, workspace;
  WeightLoader loader(source_, backend_, weights);
  StateLayout layout(options.context, options.arithmetic.activations);
  Model model(spec_, options_.slice, loader, layout);
  for (NgramEmbedding* user : model.table_users()) {
    table_needs_.push_back({user->table_stem(), user->table_rows(), user->table_columns()});
    user->set_table_dtype(RamTable(source_, user->table_stem(), user->table_rows(), user->table_columns()).dtype());
  }
  const int64_t chunk_bytes = plan_steps(model, layout, workspace);
  arena_bytes_ = workspace.peak_bytes();
  scratch_bytes_ = backend_.ops().scratch_peak_bytes();
  memory_ = {.weights = weights.peak_bytes(),
             .sequence = layout.bytes(),
             .workspace = chunk_bytes + scratch_bytes_,
             .slots = executor_.slab_bytes(),
             .stacks = arena_bytes_ - chunk_bytes,
             .staging = executor_.staging_bytes(),
             .host_buffers = staged_count(model) * dtype_bytes(DType::f32)};
  for (const NgramEmbedding* user : model.table_users()) memory_.host_buffers += user->gathered_bytes();
}

// Logits of a tile of rows, this rank's part of the vocabulary.
int64_t RankContext::staged_count(const Model& model) const {
  return std::min(kLogitTile, options_.chunk) * model.vocab().count;
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
  executor_.allocate_staging();
  Arena weights(weights_.data(), weights_.bytes());
  WeightLoader loader(source_, backend_, weights, progress);
  model_.emplace(spec_, options_.slice, loader, layout_);
  const std::vector<NgramEmbedding*> users = model_->table_users();
  int events = executor_.events();
  for (size_t i = 0; i < users.size(); ++i) {
    users[i]->set_table(*tables[i], events);
    events += NgramEmbedding::kEvents;
  }
  backend_.create_events(events);
  has_lanes_ = true;
  staged_.resize(static_cast<size_t>(staged_count(*model_)));
  largest_.resize(kTopkMax);
  Arena measuring;
  plan_steps(*model_, layout_, measuring);  // lets the real model size its host buffers
  OFL_ASSERT(measuring.peak_bytes() == arena_bytes_);
  for (NgramEmbedding* user : users) user->allocate(backend_);
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
          .selections = selections_ ? &*selections_ : nullptr,
          .overlap_rows_min = options_.overlap_rows_min};
}

// Runs the forward pass in planning mode for the step sizes whose needs differ: each canonical row count, the most rows
// that the arm's rules treat alike, the chunk and the group, at the end of the context where selection sees the most
// blocks. Returns the arena's peak without the group.
int64_t RankContext::plan_steps(Model& model, const StateLayout& layout, Arena& arena) {
  backend_.ops().set_planning(true);
  SequenceState sequence(layout);
  const int64_t chunk = options_.chunk;
  const std::vector<int32_t> tokens(static_cast<size_t>(options_.group), 0);
  const auto plan = [&](int64_t rows) {
    plan_step(model, sequence, arena, std::span(tokens).first(static_cast<size_t>(rows)));
  };
  for (int64_t rows = 1; rows <= std::min(chunk, kCanonicalRowsMax + 1); ++rows) plan(rows);
  for (const MathRule& rule : options_.arithmetic.rules.rules())
    if (rule.rows_min - 1 > kCanonicalRowsMax && rule.rows_min - 1 < chunk) plan(rule.rows_min - 1);
  // The most rows that pass whole where a whole chunk does not.
  if (options_.overlap_rows_min <= chunk) plan(options_.overlap_rows_min - 1);
  if (chunk > kCanonicalRowsMax + 1) plan(chunk);
  const int64_t chunk_bytes = arena.peak_bytes();
  if (options_.group > chunk) plan(options_.group);
  backend_.ops().set_planning(false);
  return chunk_bytes;
}

void RankContext::plan_step(Model& model, SequenceState& sequence, Arena& arena, std::span<const int32_t> tokens) {
  const ArenaScope scope(arena);
  Step step = step_of(sequence, tokens, arena, options_.context - static_cast<int64_t>(tokens.size()));
  const int64_t rows = std::min(step.rows(), options_.chunk), tile = std::min(rows, kLogitTile);
  const Tensor stacks = model.forward(step, options_.chunk);
  const Tensor hidden = arena.take(step.dtype(), {rows, spec_.hidden});
  model.read_out(step, stacks.narrow(0, 0, rows), hidden);
  const Tensor logits = arena.take(DType::f32, {tile, model.vocab().count});
  step.linear(hidden.narrow(0, 0, tile), model.lm_head(), logits);
  find_largest(logits.narrow(0, 0, 1), kTopkMax, arena);
}

void RankContext::forward(SequenceState& sequence, std::span<const int32_t> tokens, Phase phase, bool continues,
                          const Model::LayerTap& tap) {
  const auto rows = static_cast<int64_t>(tokens.size());
  std::optional<StepSpan> span;
  executor_.begin_step({.phase = phase, .continues = continues, .all_could_run_on_device = all_could_run_on_device_});
  arena_ = Arena(workspace_.data(), arena_bytes_);
  step_.emplace(step_of(sequence, tokens, arena_, sequence.length()));
  if (options_.trace != nullptr)
    span.emplace(*options_.trace, rows, static_cast<int64_t>(spec_.layers.size()),
                 Model::visits(*step_, options_.chunk));
  try {
    stacks_ = model_->forward(*step_, options_.chunk, span ? span->tap(tap) : tap);
  } catch (...) {
    drain_lanes();
    throw;
  }
  hidden_ = arena_.take(step_->dtype(), {std::min(step_->rows(), options_.chunk), spec_.hidden});
  hidden_first_ = -1;
  compare_routings();
  if (selections_ && !collective_->all_equal(selections_->value()))
    throw_error(ErrorCode::internal,
                "the ranks selected different blocks in a step; this is a bug of the build or the hardware");
}

// The ranks agree, too, on whose word the next step's experts run: a device's that reads the routing itself or a host's
// that has seen it. Both numbers are compared in one meeting, as they are alike but for the steps in which the last
// experts of a rank come.
void RankContext::compare_routings() {
  const bool could = executor_.could_run_on_device();
  const uint64_t hash = executor_.routing_hash();
  const bool is_alike = collective_ == nullptr || collective_->all_equal(could ? ~hash : hash);
  all_could_run_on_device_ = could && is_alike;
  if (!is_alike && !collective_->all_equal(hash))
    throw_error(ErrorCode::internal, "the ranks routed a step differently; this is a bug of the build or the hardware");
}

// After a step that was cut short: what it has on a lane must not write into the next one's workspace.
void RankContext::drain_lanes() noexcept {
  Lane* const sums = collective_ == nullptr ? nullptr : collective_->sum_lane();
  for (Lane* lane : {&backend_.copy_lane(), &backend_.compute_lane(), sums}) {
    if (lane == nullptr) continue;
    try {
      lane->drain();
    } catch (const std::exception&) {  // the lane's own failure is thrown again by the next step that uses it
    }
  }
}

// F32 [count, vocab().count] in the arena.
Tensor RankContext::logit_tile(int64_t begin, int64_t count) {
  OFL_ASSERT(count <= kLogitTile);
  const int64_t chunk = options_.chunk, first = begin / chunk * chunk;
  OFL_ASSERT(begin + count <= first + chunk);
  if (hidden_first_ != first) {
    const int64_t rows = std::min(chunk, step_->rows() - first);
    model_->read_out(*step_, stacks_.narrow(0, first, rows), hidden_.narrow(0, 0, rows));
    hidden_first_ = first;
  }
  const Tensor tile = arena_.take(DType::f32, {count, model_->vocab().count});
  step_->linear(hidden_.narrow(0, begin - first, count), model_->lm_head(), tile);
  return tile;
}

// The ids of the `count` largest of logits [1, n], then the bits of their values: I32 [2, count or n] in the arena.
Tensor RankContext::find_largest(const Tensor& logits, int64_t count, Arena& arena) {
  const int64_t k = std::min(count, logits.dim(1));
  const Tensor found = arena.take(DType::i32, {2, k});
  const Tensor values(found.row<int32_t>(1), DType::f32, {1, k});
  backend_.ops()(TopkArgs{.x = logits, .values = values, .ids = found.narrow(0, 0, 1)});
  return found;
}

std::span<const Logit> RankContext::largest_logits(int64_t row, int64_t count) {
  const ArenaScope scope(arena_);
  const Tensor found = find_largest(logit_tile(row, 1), count, arena_);
  const auto k = static_cast<size_t>(found.dim(1));
  int32_t words[2 * kTopkMax];
  {
    const HostSpan wait(options_.trace, "wait_logits", {.rows = 1});
    backend_.download(found, std::as_writable_bytes(std::span(words).first(2 * k)));
  }
  if (words[0] < 0) return {};
  for (size_t i = 0; i < k; ++i)
    largest_[i] = {words[i] + static_cast<int32_t>(model_->vocab().begin), std::bit_cast<float>(words[k + i])};
  return std::span(largest_).first(k);
}

void RankContext::logits(int64_t begin, int64_t count, int64_t stride, std::span<float> out) {
  const ArenaScope scope(arena_);
  const Range mine = model_->vocab();
  const Tensor tile = logit_tile(begin, count);
  if (stride == mine.count) {  // all of the vocabulary: no need to gather
    const HostSpan wait(options_.trace, "wait_logits", {.rows = static_cast<int32_t>(count)});
    backend_.download(tile, std::as_writable_bytes(out.first(static_cast<size_t>(tile.elements()))));
    return;
  }
  const auto host = std::span(staged_).first(static_cast<size_t>(tile.elements()));
  {
    const HostSpan wait(options_.trace, "wait_logits", {.rows = static_cast<int32_t>(count)});
    backend_.download(tile, std::as_writable_bytes(host));
  }
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(host.begin() + r * mine.count, mine.count, out.begin() + r * stride + mine.begin);
}

}  // namespace offload
