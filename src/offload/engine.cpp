#include "offload/engine.h"

#include <algorithm>

#include "core/models/registry.h"
#include "offload/system_memory.h"

namespace offload {
namespace {

// How experts and tables are read, one after the other, so that one staging serves both.
DirectReaderOptions reader_options(const EngineOptions& options) {
  DirectReaderOptions reader{.threads = options.load_threads};
  if (options.read_fault) reader.fault = [fault = options.read_fault](int64_t) { return fault(); };
  return reader;
}

ResidencyLoadOptions expert_load_options(const EngineOptions& options) {
  return {.threads = options.load_threads, .reader = reader_options(options)};
}

// Refuses a world that the model cannot be split over, naming those that it can.
void check_world(const ModelSpec& spec, int world, ShardForm form) {
  const std::vector<int> worlds = tensor_parallel_worlds(spec, form == ShardForm::slice);
  if (std::find(worlds.begin(), worlds.end(), world) != worlds.end()) return;
  throw_error(ErrorCode::usage, "--tp {}: the model's {} cannot be split so; it runs with --tp {}", world,
              tensor_parallel_obstacle(spec), fmt::join(worlds, ", "));
}

}  // namespace

int64_t Engine::context_of(const EngineOptions& options, const ModelSpec& spec) {
  if (options.context == 0) return std::min(spec.context_max, kContextDefault);
  if (options.context < 1 || options.context > spec.context_max)
    throw_error(ErrorCode::usage, "--context {} is outside 1..{}, the model's max_position_embeddings", options.context,
                spec.context_max);
  return options.context;
}

Engine::Engine(const EngineOptions& options, const Devices& devices)
    : spec_(load_model_spec(options.model_dir)),
      warnings_(spec_.warnings),
      context_(context_of(options, spec_)),
      chunk_(std::min(options.chunk == 0 ? kChunkDefault : options.chunk, context_)),
      collectives_(devices.collectives) {
  if (chunk_ < 1) throw_error(ErrorCode::usage, "--chunk {} must be at least 1", options.chunk);
  check_world(spec_, static_cast<int>(devices.backends.size()), options.shard);
  open(options);
  plan(options, devices);
  plan_budget(options);
  budget_.require_fit();
  if (!options.plan_only) load(options);
}

Engine::~Engine() = default;

void Engine::open(const EngineOptions& options) {
  if (options.dummy_weights) {
    source_ = dummy_source(options.seed);
    return;
  }
  checkpoint_ = Checkpoint::open(options.model_dir, options.read_fault);
  for (const std::string& warning : checkpoint_->warnings()) warnings_.push_back(warning);
  tensors_.emplace(checkpoint_->tensors(), checkpoint_->path());
  source_ = checkpoint_source(*checkpoint_, *tensors_);
}

// Every name and shape is checked and every byte counted before any is taken.
void Engine::plan(const EngineOptions& options, const Devices& devices) {
  const int world = static_cast<int>(devices.backends.size());
  OFL_ASSERT(world == 1 || devices.collectives.size() == devices.backends.size());
  const int64_t origin_ns = RankTrace::now_ns();
  for (int r = 0; r < world && options.trace_events > 0; ++r)
    traces_.push_back(
        std::make_unique<RankTrace>(*devices.backends[static_cast<size_t>(r)], r, options.trace_events, origin_ns));
  const std::vector<ExpertLayer> layers = Model::expert_layers(spec_);
  residency_.emplace(*source_, layers, Model::expert_shape(spec_, expert_dtype(*source_, layers.front())),
                     ResidencyOptions{.form = options.shard, .world = world});
  for (int r = 0; r < world; ++r) {
    const RankOptions rank{.slice = {r, world},
                           .arithmetic = options.arithmetic,
                           .context = context_,
                           .chunk = chunk_,
                           .cache = options.cache,
                           .verify = options.verify_ranks,
                           .trace = traces_.empty() ? nullptr : traces_[static_cast<size_t>(r)].get()};
    Collective* collective = world == 1 ? nullptr : devices.collectives[static_cast<size_t>(r)];
    ranks_.push_back(std::make_unique<RankContext>(spec_, rank, *devices.backends[static_cast<size_t>(r)], collective,
                                                   *source_, *residency_));
    const RankMemory& memory = ranks_.back()->memory();
    memory_.weights += memory.weights;
    memory_.sequence += memory.sequence;
    memory_.workspace += memory.workspace;
    memory_.slots += memory.slots;
  }
  for (const RankContext::TableNeed& need : ranks_.front()->table_needs()) {
    tables_.push_back(std::make_unique<RamTable>(*source_, need.stem, need.rows, need.columns));
    memory_.tables += tables_.back()->bytes();
  }
  memory_.experts = residency_->bytes();
}

// The plan's bytes against what the host has. What a device has, its backend alone knows: no limit is set there yet.
void Engine::plan_budget(const EngineOptions& options) {
  const MemoryPlace host = MemoryPlace::ram();
  if (options.ram_budget_bytes) {
    budget_.limit(host, *options.ram_budget_bytes, "--ram-budget");
  } else {
    const SystemMemory system = read_system_memory();
    budget_.limit(host, system.available_bytes, system.decided_by);
  }
  budget_.add("experts", memory_.experts, host);
  budget_.add("tables", memory_.tables, host);
  budget_.add("load staging", residency_->load_staging_bytes(expert_load_options(options)), host);
  if (options.trace_events > 0) budget_.add("trace", world() * TraceBuffer::bytes_of(options.trace_events), host);
  for (int r = 0; r < world(); ++r) {
    const RankMemory& memory = rank(r).memory();
    const MemoryPlace place = rank(r).backend().name() == "cpu" ? host : MemoryPlace::vram(r);
    const std::string of = world() == 1 ? "" : fmt::format(" of rank {}", r);
    budget_.add("weights" + of, memory.weights, place);
    budget_.add("expert slots" + of, memory.slots, place, {"lower --expert-slots", memory.slots});
    budget_.add("sequence state" + of, memory.sequence, place, {"lower --context", memory.sequence});
    budget_.add("workspace" + of, memory.workspace, place, {"lower --chunk", memory.workspace});
  }
}

void Engine::load(const EngineOptions& options) {
  const int64_t total = memory_.weights + memory_.experts + memory_.tables;
  int64_t done = 0;
  const auto progress = [&](int64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(std::min(done, total), total);
  };
  std::vector<HostTable*> tables;
  for (const auto& table : tables_) {
    table->load(reader_options(options), progress);
    tables.push_back(table.get());
  }
  for (const auto& rank : ranks_) rank->load(tables, progress);
  residency_->load(expert_load_options(options), progress);
  warnings_.insert(warnings_.end(), residency_->warnings().begin(), residency_->warnings().end());
  logits_.resize(static_cast<size_t>(std::min(RankContext::kLogitTile, chunk_) * spec_.vocab));
  if (world() > 1) collectives_.front()->reserve(chunk_ * spec_.hidden);
  team_ = std::make_unique<RankTeam>(world());
}

int64_t Engine::expert_bytes() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks_) bytes += rank->executor().expert_bytes();
  return bytes;
}

RoutingShape Engine::routing_shape() const {
  return {residency_->layers(), residency_->shape().experts, spec_.layers.front().moe.top_k};
}

std::vector<const TraceBuffer*> Engine::trace() {
  if (traces_.empty()) return {};
  run_ranks([&](int rank) { ranks_[static_cast<size_t>(rank)]->drain_lanes(); });
  std::vector<const TraceBuffer*> buffers;
  for (const auto& trace : traces_) buffers.push_back(&trace->buffer());
  return buffers;
}

void Engine::clear_trace() {
  static_cast<void>(trace());
  for (const auto& each : traces_) each->clear();
}

Sequence Engine::new_sequence() {
  Sequence sequence;
  for (const auto& rank : ranks_) sequence.ranks_.emplace_back(rank->layout(), rank->backend());
  return sequence;
}

void Engine::run_ranks(const std::function<void(int)>& work) {
  try {
    team_->run(work, [&](int rank) {
      if (world() > 1) collectives_[static_cast<size_t>(rank)]->abort();
    });
  } catch (...) {
    if (world() > 1) collectives_.front()->recover();
    throw;
  }
}

void Engine::feed(Sequence& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
                  const Model::LayerTap& tap, const std::function<void()>& between_chunks) {
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

void Engine::step(Sequence& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
                  int64_t row_offset, const Model::LayerTap& tap) {
  run_ranks([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    ranks_[r]->forward(sequence.ranks_[r], tokens, rank == 0 ? tap : Model::LayerTap{});
  });
  if (rows == LogitRows::none) return;
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t begin = rows == LogitRows::last ? count - 1 : 0; begin < count; begin += RankContext::kLogitTile) {
    const int64_t tile = std::min(RankContext::kLogitTile, count - begin);
    run_ranks([&](int rank) { ranks_[static_cast<size_t>(rank)]->logits(begin, tile, spec_.vocab, logits_); });
    for (int64_t r = 0; r < tile; ++r)
      sink(row_offset + begin + r,
           std::span(logits_).subspan(static_cast<size_t>(r * spec_.vocab), static_cast<size_t>(spec_.vocab)));
  }
}

}  // namespace offload
