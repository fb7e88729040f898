#include "offload/engine.h"

#include <algorithm>

#include "core/canonical.h"
#include "core/models/registry.h"
#include "offload/system_memory.h"

namespace offload {
namespace {

constexpr int64_t kLogitTile = 64;  // rows that pass through lm_head at once

}  // namespace

int64_t Engine::context_of(const EngineOptions& options, const ModelSpec& spec) {
  if (options.context == 0) return std::min(spec.context_max, kContextDefault);
  if (options.context < 1 || options.context > spec.context_max)
    throw_error(ErrorCode::usage, "--context {} is outside 1..{}, the model's max_position_embeddings", options.context,
                spec.context_max);
  return options.context;
}

Engine::Engine(const EngineOptions& options, Backend& backend)
    : backend_(backend),
      spec_(load_model_spec(options.model_dir)),
      warnings_(spec_.warnings),
      arithmetic_(options.arithmetic),
      chunk_(std::min(options.chunk == 0 ? kChunkDefault : options.chunk, context_of(options, spec_))),
      layout_(context_of(options, spec_), options.arithmetic.activations) {
  if (chunk_ < 1) throw_error(ErrorCode::usage, "--chunk {} must be at least 1", options.chunk);
  if (options.dummy_weights) {
    source_ = dummy_source(options.seed);
  } else {
    checkpoint_ = Checkpoint::open(options.model_dir);
    for (const std::string& warning : checkpoint_->warnings()) warnings_.push_back(warning);
    tensors_.emplace(checkpoint_->tensors(), checkpoint_->path());
    source_ = checkpoint_source(*checkpoint_, *tensors_);
  }
  plan();
  budget(options).require_fit();
  if (!options.plan_only) load(options);
}

Engine::~Engine() = default;

// The plan's bytes against what the host has. What a device has, its backend alone knows: no limit is set there yet.
Budget Engine::budget(const EngineOptions& options) const {
  Budget budget;
  const MemoryPlace host = MemoryPlace::ram();
  const MemoryPlace device = backend_.name() == "cpu" ? host : MemoryPlace::vram(0);
  if (options.ram_budget_bytes) {
    budget.limit(host, *options.ram_budget_bytes, "--ram-budget");
  } else {
    const SystemMemory system = read_system_memory();
    budget.limit(host, system.available_bytes, system.decided_by);
  }
  budget.add("weights", memory_.weights, device);
  budget.add("experts", memory_.experts, host);
  budget.add("tables", memory_.tables, host);
  budget.add("sequence state", memory_.sequence, device, {"lower --context", memory_.sequence});
  budget.add("workspace", memory_.workspace, device, {"lower --chunk", memory_.workspace});
  budget.add("load staging", residency_->load_staging_bytes(expert_load_options(options)), host);
  return budget;
}

ResidencyLoadOptions Engine::expert_load_options(const EngineOptions& options) const {
  return {.threads = options.load_threads};
}

// Builds the model on measuring arenas: every name and shape is checked and every byte counted before any is taken.
void Engine::plan() {
  Arena weights;
  WeightLoader loader(*source_, backend_, weights);
  StateLayout layout(layout_.context(), layout_.activations());
  Model model(spec_, RankSlice{}, loader, layout);
  const std::vector<ExpertLayer> layers = Model::expert_layers(spec_);
  residency_.emplace(*source_, layers, Model::expert_shape(spec_, expert_dtype(*source_, layers.front())));
  executor_.emplace(backend_, *residency_);
  for (NgramEmbedding* user : model.table_users()) {
    tables_.push_back(
        std::make_unique<RamTable>(*source_, user->table_stem(), user->table_rows(), user->table_columns()));
    user->set_table(*tables_.back());
    memory_.tables += tables_.back()->bytes();
  }
  memory_.weights = weights.peak_bytes();
  memory_.experts = residency_->bytes();
  memory_.sequence = layout.bytes();
  plan_steps(model, layout, workspace_);
  memory_.workspace = workspace_.peak_bytes() + backend_.ops().scratch_peak_bytes();
}

void Engine::load(const EngineOptions& options) {
  const int64_t total = memory_.weights + memory_.experts + memory_.tables;
  int64_t done = 0;
  const auto progress = [&](int64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(std::min(done, total), total);
  };
  weights_memory_ = backend_.allocate(memory_.weights, "weights");
  workspace_memory_ = backend_.allocate(workspace_.peak_bytes(), "workspace");
  scratch_memory_ = backend_.allocate(backend_.ops().scratch_peak_bytes(), "op scratch");
  Arena weights(weights_memory_.data(), weights_memory_.bytes());
  WeightLoader loader(*source_, backend_, weights, progress);
  model_.emplace(spec_, RankSlice{}, loader, layout_);
  size_t table = 0;
  for (NgramEmbedding* user : model_->table_users()) user->set_table(*tables_[table++]);
  for (const auto& each : tables_) each->load(progress);
  residency_->load(expert_load_options(options), progress);
  warnings_.insert(warnings_.end(), residency_->warnings().begin(), residency_->warnings().end());

  workspace_ = Arena(workspace_memory_.data(), workspace_memory_.bytes());
  backend_.ops().set_scratch(Tensor(scratch_memory_.data(), DType::u8, {scratch_memory_.bytes()}));
  logits_.resize(static_cast<size_t>(std::min(kLogitTile, chunk_) * spec_.vocab));
  Arena measuring;
  plan_steps(*model_, layout_, measuring);  // lets the real model size its host buffers
  backend_.ops().reset_cost();
}

// Runs the forward pass in planning mode for the step sizes whose needs differ: each canonical row count and the chunk,
// at the end of the context where selection sees the most blocks.
void Engine::plan_steps(Model& model, const StateLayout& layout, Arena& arena) {
  Ops& ops = backend_.ops();
  ops.set_planning(true);
  SequenceState sequence(layout);
  const std::vector<int32_t> tokens(static_cast<size_t>(chunk_), 0);
  for (int64_t rows = 1; rows <= chunk_; rows = rows <= kCanonicalRowsMax ? rows + 1 : std::max(chunk_, rows + 1)) {
    Step step{.backend = backend_,
              .ops = ops,
              .arena = arena,
              .experts = *executor_,
              .sequence = sequence,
              .arithmetic = arithmetic_,
              .tokens = std::span(tokens).first(static_cast<size_t>(rows)),
              .first = layout_.context() - rows};
    const ArenaScope scope(arena);
    const Tensor hidden = model.forward(step);
    const int64_t tile = std::min(rows, kLogitTile);
    model.logits(step, hidden.narrow(0, 0, tile), arena.take(DType::f32, {tile, model.vocab()}));
  }
  ops.set_planning(false);
}

void Engine::feed(SequenceState& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
                  const Model::LayerTap& tap, const std::function<void()>& between_chunks) {
  OFL_ASSERT(model_.has_value());
  for (const int32_t id : tokens)
    if (id < 0 || id >= spec_.vocab)
      throw_error(ErrorCode::usage, "token id {} is outside the model's vocabulary 0..{}", id, spec_.vocab - 1);
  const auto count = static_cast<int64_t>(tokens.size());
  if (sequence.length() + count > context())
    throw_error(ErrorCode::usage,
                "{} tokens after {} do not fit the context of {}; raise --context or shorten the prompt", count,
                sequence.length(), context());
  for (int64_t begin = 0; begin < count; begin += chunk_) {
    if (begin > 0 && between_chunks) between_chunks();
    const int64_t size = std::min(chunk_, count - begin);
    const bool is_last = begin + size == count;
    const LogitRows wanted = rows == LogitRows::last && !is_last ? LogitRows::none : rows;
    step(sequence, tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(size)), wanted, sink, begin, tap);
  }
}

void Engine::step(SequenceState& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
                  int64_t row_offset, const Model::LayerTap& tap) {
  const ArenaScope scope(workspace_);
  Step step{.backend = backend_,
            .ops = backend_.ops(),
            .arena = workspace_,
            .experts = *executor_,
            .sequence = sequence,
            .arithmetic = arithmetic_,
            .tokens = tokens,
            .first = sequence.length()};
  const Tensor hidden = model_->forward(step, tap);
  if (rows == LogitRows::none) return;
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t begin = rows == LogitRows::last ? count - 1 : 0; begin < count; begin += kLogitTile) {
    const ArenaScope tile_scope(workspace_);
    const int64_t tile = std::min(kLogitTile, count - begin);
    const Tensor out = workspace_.take(DType::f32, {tile, spec_.vocab});
    model_->logits(step, hidden.narrow(0, begin, tile), out);
    const auto host = std::span(logits_).first(static_cast<size_t>(out.elements()));
    backend_.download(out, std::as_writable_bytes(host));
    for (int64_t r = 0; r < tile; ++r)
      sink(row_offset + begin + r,
           host.subspan(static_cast<size_t>(r * spec_.vocab), static_cast<size_t>(spec_.vocab)));
  }
}

}  // namespace offload
