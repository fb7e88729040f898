#include "offload/engine.h"

#include <fmt/format.h>
#include <algorithm>

#include "core/models/registry.h"
#include "offload/numa.h"
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

// Bytes that a rank may use of its device.
int64_t device_budget(const EngineOptions& options, Backend& backend) {
  if (options.vram_budget_bytes) return *options.vram_budget_bytes;
  return std::max<int64_t>(0, *backend.free_bytes() - Engine::kDeviceReserveBytes);
}

// The nodes of the ranks' devices as residency counts them.
std::vector<int> nodes_of(const Devices& devices) {
  std::vector<int> nodes;
  if (devices.numa_nodes.empty()) return nodes;
  const NumaBinding numa;
  for (const int node : devices.numa_nodes) nodes.push_back(numa.node_of_system(node));
  return nodes;
}

int64_t overlap_rows_min(const EngineOptions& options, Collective* collective) {
  const bool pays = collective != nullptr && collective->sums_are_slow();
  return options.overlap_rows_min.value_or(pays ? Engine::kOverlapRows : INT64_MAX);
}

// A feed of more rows than experts have a canonical order for is a prompt.
Phase phase_of(int64_t tokens) {
  return tokens <= kCanonicalRowsMax ? Phase::decode : Phase::prefill;
}

int64_t chunk_of(const EngineOptions& options, const Devices& devices, int64_t context) {
  const bool on_host = devices.backends.front()->uses_host_memory();
  const int64_t unasked = on_host ? Engine::kChunkDefault : Engine::kDeviceChunkDefault;
  return std::min(options.chunk == 0 ? unasked : options.chunk, context);
}

int64_t group_of(const EngineOptions& options, const Devices& devices, int64_t chunk, int64_t context) {
  const bool has_cache = options.cache.slots > 0 || !devices.backends.front()->uses_host_memory();
  const int64_t asked = options.prefill_group > 0 ? options.prefill_group
                        : has_cache               ? Engine::kGroupChunks * chunk
                                                  : chunk;
  // Beyond the context it would never be full.
  return asked >= context ? context : std::min(context, (asked + chunk - 1) / chunk * chunk);
}

}  // namespace

void Engine::require_world(const ModelSpec& spec, int world, ShardForm shard) {
  const std::vector<int> worlds = tensor_parallel_worlds(spec, shard == ShardForm::slice);
  if (std::find(worlds.begin(), worlds.end(), world) != worlds.end()) return;
  throw_error(ErrorCode::usage, "--tp {}: the model's {} cannot be split so; it runs with --tp {}", world,
              tensor_parallel_obstacle(spec), fmt::join(worlds, ", "));
}

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
      chunk_(chunk_of(options, devices, context_)),
      group_(group_of(options, devices, std::max<int64_t>(1, chunk_), context_)),
      collectives_(devices.collectives) {
  if (chunk_ < 1) throw_error(ErrorCode::usage, "--chunk {} must be at least 1", options.chunk);
  require_world(spec_, static_cast<int>(devices.backends.size()), options.shard);
  open(options);
  plan(options, devices);
  plan_budget(options);
  budget_.require_fit();
  if (!options.plan_only) load(options, devices);
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
  OFL_ASSERT(devices.host_ops.empty() || devices.host_ops.size() == devices.backends.size());
  if (options.cache.host_permille > 0 && devices.host_ops.empty())
    throw_error(ErrorCode::usage, "--cpu-experts: the CPU cannot compute experts beside this device; use off");
  for (const Backend* backend : devices.backends)
    if (options.cache.zero_copy_permille > 0 && !backend->reads_pinned_memory())
      throw_error(ErrorCode::usage, "--zero-copy-experts: {} cannot compute out of host memory where it lies; use off",
                  backend->name());
  const int64_t origin_ns = RankTrace::now_ns();
  for (int r = 0; r < world && options.trace_events > 0; ++r)
    traces_.push_back(
        std::make_unique<RankTrace>(*devices.backends[static_cast<size_t>(r)], r, options.trace_events, origin_ns));
  const std::vector<ExpertLayer> layers = Model::expert_layers(spec_);
  residency_.emplace(*source_, layers, Model::expert_shape(spec_, expert_dtype(*source_, layers.front())),
                     ResidencyOptions{.form = options.shard, .world = world, .numa_nodes = nodes_of(devices)});
  // Once, so that a plan made for what is free is not measured against what is free a moment later.
  for (Backend* backend : devices.backends)
    device_bytes_.push_back(backend->uses_host_memory() ? 0 : device_budget(options, *backend));
  for (int r = 0; r < world; ++r) {
    ranks_.push_back(plan_rank(options, devices, r));
    const RankMemory& memory = ranks_.back()->memory();
    memory_.weights += memory.weights;
    memory_.sequence += memory.sequence;
    memory_.workspace += memory.workspace;
    memory_.slots += memory.slots;
    memory_.stacks += memory.stacks;
    memory_.staging += memory.staging;
    memory_.host_buffers += memory.host_buffers;
  }
  memory_.host_buffers += logits_bytes();
  for (const RankContext::TableNeed& need : ranks_.front()->table_needs()) {
    tables_.push_back(std::make_unique<RamTable>(*source_, need.stem, need.rows, need.columns));
    memory_.tables += tables_.back()->bytes();
  }
  memory_.experts = residency_->bytes();
}

// A rank's plan. On a device whose cache was given no size, as many slots as its memory has room for beside the rest.
std::unique_ptr<RankContext> Engine::plan_rank(const EngineOptions& options, const Devices& devices, int rank) const {
  const auto world = static_cast<int>(devices.backends.size());
  Backend& backend = *devices.backends[static_cast<size_t>(rank)];
  Collective* collective = world == 1 ? nullptr : devices.collectives[static_cast<size_t>(rank)];
  RankOptions rank_options{.slice = {rank, world},
                           .arithmetic = options.arithmetic,
                           .context = context_,
                           .chunk = chunk_,
                           .group = group_,
                           .overlap_rows_min = overlap_rows_min(options, collective),
                           .cache = options.cache,
                           .verify = options.verify_ranks,
                           .trace = traces_.empty() ? nullptr : traces_[static_cast<size_t>(rank)].get()};
  // Ranks that are to be verified show their hosts what they route.
  if (!backend.uses_host_memory() && (world == 1 || !options.verify_ranks)) rank_options.cache.routes_on_device = true;
  Ops* host_ops = devices.host_ops.empty() ? nullptr : devices.host_ops[static_cast<size_t>(rank)];
  const auto make = [&] {
    return std::make_unique<RankContext>(spec_, rank_options, backend, host_ops, collective, *source_, *residency_);
  };
  if (backend.uses_host_memory() || options.cache.slots > 0) return make();
  rank_options.cache.slots = 1;
  std::unique_ptr<RankContext> planned = make();
  const RankMemory& least = planned->memory();
  const int64_t room =
      device_bytes_[static_cast<size_t>(rank)] - least.weights - least.sequence - least.workspace - least.stacks;
  rank_options.cache.slots = std::clamp<int64_t>(planned->executor().slots_in(room), 1, residency_->blocks(rank));
  planned.reset();
  return make();
}

// Of a tile of rows, which the host is shown.
int64_t Engine::logits_bytes() const {
  return std::min(RankContext::kLogitTile, chunk_) * spec_.vocab * dtype_bytes(DType::f32);
}

// The plan's bytes against what the host and the devices have.
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
  memory_.load_staging = residency_->load_staging_bytes(expert_load_options(options));
  const int64_t of_thread = memory_.load_staging / std::max(1, options.load_threads);
  budget_.add("load staging", memory_.load_staging, host, {"lower --threads", memory_.load_staging - of_thread});
  budget_.add("host buffers", memory_.host_buffers, host,
              {"lower --prefill-group", memory_.host_buffers - logits_bytes()});
  if (options.trace_events > 0) {
    memory_.trace = world() * TraceBuffer::bytes_of(options.trace_events);
    budget_.add("trace", memory_.trace, host);
  }
  for (int r = 0; r < world(); ++r) {
    const RankMemory& memory = rank(r).memory();
    Backend& backend = rank(r).backend();
    const MemoryPlace place = backend.uses_host_memory() ? host : MemoryPlace::vram(r);
    if (!backend.uses_host_memory())
      budget_.limit(place, device_bytes_[static_cast<size_t>(r)],
                    options.vram_budget_bytes ? "--vram-budget" : "the device");
    const std::string of = world() == 1 ? "" : fmt::format(" of rank {}", r);
    budget_.add("weights" + of, memory.weights, place);
    budget_.add("expert slots" + of, memory.slots, place, {"lower --expert-slots", memory.slots});
    budget_.add("sequence state" + of, memory.sequence, place, {"lower --context", memory.sequence});
    budget_.add("workspace" + of, memory.workspace, place, {"lower --chunk", memory.workspace});
    if (memory.stacks > 0)
      budget_.add("residual stacks" + of, memory.stacks, place, {"lower --prefill-group", memory.stacks});
    if (memory.staging > 0) budget_.add("experts on the CPU" + of, memory.staging, host);
  }
}

void Engine::require_free_device_memory() const {
  for (int r = 0; r < world(); ++r) {
    Backend& backend = rank(r).backend();
    if (backend.uses_host_memory()) continue;
    const int64_t needed = budget_.total(MemoryPlace::vram(r)), free = *backend.free_bytes();
    if (needed > free)
      throw_error(ErrorCode::resource,
                  "the plan takes {} of {}, which has {} free: lower --vram-budget, or stop what else uses it",
                  bytes_text(needed), backend.name(), bytes_text(free));
  }
}

void Engine::load(const EngineOptions& options, const Devices& devices) {
  require_free_device_memory();
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
  ResidencyLoadOptions experts = expert_load_options(options);
  experts.pinning = devices.pinning;
  if (experts.pinning.pin) experts.memlock_bytes = read_system_memory().memlock_bytes;
  residency_->load(experts, progress);
  warnings_.insert(warnings_.end(), residency_->warnings().begin(), residency_->warnings().end());
  if (options.cache.zero_copy_permille > 0 && experts.pinning.pin && !residency_->pinned())
    throw_error(ErrorCode::resource, "--zero-copy-experts needs the experts' memory page-locked: {}; or leave it out",
                warnings_.back());
  logits_memory_ = ranks_.front()->backend().allocate_host(logits_bytes(), "logits");
  logits_ = {static_cast<float*>(logits_memory_.data()), static_cast<size_t>(logits_bytes()) / sizeof(float)};
  largest_.reserve(static_cast<size_t>(world() * kTopkMax));
  if (world() > 1) collectives_.front()->reserve(chunk_ * spec_.hidden);
  team_ = std::make_unique<RankTeam>(world(), options.on_stuck);
}

int64_t Engine::cpu_expert_bytes() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks_) {
    const ExpertExecutor& executor = rank->executor();
    bytes += rank->backend().name() == "cpu" ? executor.expert_bytes() : executor.host_expert_bytes();
  }
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
    const auto bound_work = [&](int rank) {
      ranks_[static_cast<size_t>(rank)]->backend().bind_thread();
      work(rank);
    };
    team_->run(bound_work, [&](int rank) {
      if (world() > 1) collectives_[static_cast<size_t>(rank)]->abort();
    });
  } catch (...) {
    if (world() > 1) collectives_.front()->recover();
    throw;
  }
}

void Engine::feed(Sequence& sequence, std::span<const int32_t> tokens, LogitRows rows, const LogitSink& sink,
                  const Model::LayerTap& tap) {
  for (const int32_t id : tokens)
    if (id < 0 || id >= spec_.vocab)
      throw_error(ErrorCode::usage, "token id {} is outside the model's vocabulary 0..{}", id, spec_.vocab - 1);
  const auto count = static_cast<int64_t>(tokens.size());
  if (sequence.length() + count > context())
    throw_error(ErrorCode::usage,
                "{} tokens after {} do not fit the context of {}; raise --context or shorten the prompt", count,
                sequence.length(), context());
  const Phase phase = phase_of(count);
  for (int64_t begin = 0; begin < count; begin += group_) {
    const int64_t size = std::min(group_, count - begin);
    run_ranks([&](int rank) {
      const auto r = static_cast<size_t>(rank);
      ranks_[r]->forward(sequence.ranks_[r], tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(size)),
                         phase, begin + size < count, rank == 0 ? tap : Model::LayerTap{});
    });
    last_row_ = size - 1;
    if (rows == LogitRows::all) emit_logits(0, size, begin, sink);
    if (rows == LogitRows::last && begin + size == count) emit_logits(size - 1, size, begin, sink);
  }
}

std::span<const Logit> Engine::largest_logits(int64_t count) {
  OFL_ASSERT(count >= 1 && count <= kTopkMax);
  std::vector<std::span<const Logit>> of_ranks(ranks_.size());
  run_ranks([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    of_ranks[r] = ranks_[r]->largest_logits(last_row_, count);
  });
  largest_.clear();
  for (const std::span<const Logit> each : of_ranks) {
    if (each.empty()) return {};
    largest_.insert(largest_.end(), each.begin(), each.end());
  }
  std::sort(largest_.begin(), largest_.end(), comes_first);
  return std::span(largest_).first(std::min(static_cast<size_t>(count), largest_.size()));
}

void Engine::last_logits(const LogitSink& sink) {
  emit_logits(last_row_, last_row_ + 1, -last_row_, sink);
}

// Of rows [begin, end) of the last forward pass, in tiles that lie in one chunk.
void Engine::emit_logits(int64_t begin, int64_t end, int64_t row_offset, const LogitSink& sink) {
  for (int64_t next = begin; begin < end; begin = next) {
    next = std::min({end, begin + RankContext::kLogitTile, (begin / chunk_ + 1) * chunk_});
    run_ranks([&](int rank) { ranks_[static_cast<size_t>(rank)]->logits(begin, next - begin, spec_.vocab, logits_); });
    for (int64_t r = begin; r < next; ++r)
      sink(row_offset + r,
           logits_.subspan(static_cast<size_t>((r - begin) * spec_.vocab), static_cast<size_t>(spec_.vocab)));
  }
}

}  // namespace offload
