#include "offload/residency.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "offload/numa.h"
#include "offload/tensor_reader.h"

namespace offload {
namespace {

constexpr int64_t kBlockAlignment = 64;    // a cache line; vector loads of a block's start are aligned
constexpr int64_t kPageBytes = 4096;       // the smallest page: one write per page touches them all
constexpr int64_t kTouchBytes = 32 << 20;  // between two looks at the user's stop: 10 ms at 3 GiB/s
constexpr double kShareOnNodeMin = 0.95;   // below this a shard counts as not bound

}  // namespace

Residency::Residency(const WeightSource& source, std::vector<ExpertLayer> layers, const ExpertShape& shape,
                     ResidencyOptions options)
    : source_(source), layers_(std::move(layers)), shape_(shape), options_(std::move(options)) {
  OFL_ASSERT(options_.world >= 1);
  OFL_ASSERT(options_.numa_nodes.empty() || std::ssize(options_.numa_nodes) == options_.world);
  if (form() == ShardForm::slice && shape_.intermediate % world() != 0)
    throw_error(ErrorCode::usage,
                "--shard slice cannot cut the experts' intermediate size {} into {} equal parts; use --shard expert or "
                "another --tp",
                shape_.intermediate, world());
  if (form() == ShardForm::expert && shape_.experts < world())
    throw_error(ErrorCode::usage, "--shard expert cannot give each of {} ranks one of {} experts; lower --tp", world(),
                shape_.experts);
  block_stride_ = (local_shape().block_bytes() + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  for (const ExpertLayer& layer : layers_)
    for (int64_t e = 0; e < shape_.experts; ++e) expert_pieces(source_, layer, shape_, e);
}

ExpertShape Residency::local_shape() const {
  ExpertShape local = shape_;
  if (form() == ShardForm::slice) local.intermediate /= world();
  return local;
}

std::optional<int> Residency::owner(int64_t expert) const {
  OFL_ASSERT(expert >= 0 && expert < shape_.experts);
  switch (form()) {
    case ShardForm::expert:
      return static_cast<int>(expert % world());
    case ShardForm::slice:
      return std::nullopt;
  }
  return std::nullopt;
}

int64_t Residency::blocks_per_layer(int rank) const {
  OFL_ASSERT(rank >= 0 && rank < world());
  if (form() == ShardForm::slice) return shape_.experts;
  return (shape_.experts - rank + world() - 1) / world();
}

int64_t Residency::bytes() const {
  int64_t sum = 0;
  for (int rank = 0; rank < world(); ++rank) sum += bytes(rank);
  return sum;
}

std::vector<ExpertPiece> Residency::pieces(int rank, int64_t layer, int64_t expert) const {
  const ExpertSlice slice = form() == ShardForm::slice ? ExpertSlice{rank, world()} : ExpertSlice{};
  return expert_pieces(source_, layers_[static_cast<size_t>(layer)], shape_, expert, slice);
}

std::byte* Residency::block_data(int rank, int64_t layer, int64_t expert) const {
  const int64_t local = form() == ShardForm::slice ? expert : expert / world();
  return shards_[static_cast<size_t>(rank)].data() + (layer * blocks_per_layer(rank) + local) * block_stride_;
}

const std::byte* Residency::block(int rank, int64_t layer, int64_t expert) const {
  OFL_ASSERT(std::ssize(shards_) == world() && rank >= 0 && rank < world() && layer >= 0 && layer < layers());
  return owns(rank, expert) ? block_data(rank, layer, expert) : nullptr;
}

int64_t Residency::load_staging_bytes(const ResidencyLoadOptions& options) const {
  if (source_.checkpoint() == nullptr) return 0;
  DirectReaderOptions reader = options.reader;
  reader.threads = options.threads;
  return DirectReader({}, std::move(reader)).staging_bytes();
}

void Residency::load(const ResidencyLoadOptions& options, const LoadProgressSink& progress) {
  OFL_ASSERT(options.threads >= 1);
  pinned_.release();
  warnings_.clear();
  try {
    allocate();
    place(options.threads, progress);
    if (source_.checkpoint() != nullptr) {
      read_files(options, progress);
    } else {
      read_source(options.threads, progress);
    }
    check_placement();
    if (options.pinning.pin) pin(options, progress);
  } catch (...) {
    shards_.clear();
    throw;
  }
}

void Residency::allocate() {
  if (!shards_.empty()) return;
  for (int rank = 0; rank < world(); ++rank)
    shards_.emplace_back(bytes(rank), fmt::format("the routed experts of rank {}", rank));
}

// Where the pages of each shard are to come from. They are first touched by the fill, in parallel; where the system
// takes no such orders, the first touch by threads that run on the node decides, and precedes the fill.
void Residency::place(int threads, const LoadProgressSink& progress) {
  if (options_.numa_nodes.empty()) return;
  const NumaBinding numa;
  for (int rank = 0; rank < world(); ++rank) {
    const int node = options_.numa_nodes[static_cast<size_t>(rank)];
    if (node < 0) continue;
    const std::span<std::byte> shard = shards_[static_cast<size_t>(rank)].span();
    const std::string refusal = numa.bind_memory(shard, node);
    if (refusal.empty()) continue;
    warnings_.push_back(fmt::format("rank {}: {}", rank, refusal));
    std::atomic<size_t> next{0};
    run_load(
        threads,
        [&](int, LoadMeter& meter) {
          if (!numa.bind_thread(node)) return;
          while (!meter.stopped()) {
            const size_t begin = next.fetch_add(static_cast<size_t>(kTouchBytes));
            if (begin >= shard.size()) break;
            const size_t end = std::min(begin + static_cast<size_t>(kTouchBytes), shard.size());
            for (size_t at = begin; at < end; at += static_cast<size_t>(kPageBytes)) shard[at] = std::byte{0};
          }
        },
        progress);
  }
}

void Residency::check_placement() {
  if (options_.numa_nodes.empty()) return;
  const NumaBinding numa;
  for (int rank = 0; rank < world(); ++rank) {
    const int node = options_.numa_nodes[static_cast<size_t>(rank)];
    if (node < 0) continue;
    const double share = numa.share_on_node(shards_[static_cast<size_t>(rank)].span(), node);
    if (share >= kShareOnNodeMin) continue;
    warnings_.push_back(
        fmt::format("rank {}: {:.0f} % of its experts lie on NUMA node {}, expected 95 %; free memory there or expect "
                    "slower copies",
                    rank, 100 * share, node));
  }
}

void Residency::read_files(const ResidencyLoadOptions& options, const LoadProgressSink& progress) {
  std::vector<ReadRequest> requests;
  for (int64_t layer = 0; layer < layers(); ++layer)
    for (int64_t expert = 0; expert < shape_.experts; ++expert)
      for (int rank = 0; rank < world(); ++rank) {
        if (!owns(rank, expert)) continue;
        std::byte* const block = block_data(rank, layer, expert);
        for (const ExpertPiece& piece : pieces(rank, layer, expert))
          requests.push_back({.file = piece.tensor.file_index,
                              .offset = piece.tensor.offset + piece.tensor_offset,
                              .row_bytes = piece.row_bytes,
                              .dest = block + piece.block_offset,
                              .rows = piece.rows,
                              .file_stride = piece.tensor_stride});
      }
  DirectReaderOptions reader = options.reader;
  reader.threads = options.threads;
  report_ = read_tensors(*source_.checkpoint(), requests, std::move(reader), progress);
}

// For weights that no file holds: block by block through the source, in parallel.
void Residency::read_source(int threads, const LoadProgressSink& progress) {
  const int64_t experts = layers() * shape_.experts;
  std::atomic<int64_t> next{0};
  run_load(
      threads,
      [&](int, LoadMeter& meter) {
        for (int64_t i = next++; i < experts && !meter.stopped(); i = next++) {
          const int64_t layer = i / shape_.experts, expert = i % shape_.experts;
          for (int rank = 0; rank < world(); ++rank) {
            if (!owns(rank, expert)) continue;
            for (const ExpertPiece& piece : pieces(rank, layer, expert)) {
              std::byte* dest = block_data(rank, layer, expert) + piece.block_offset;
              for (int64_t row = 0; row < piece.rows; ++row, dest += piece.row_bytes)
                source_.read(piece.tensor, piece.tensor_offset + row * piece.tensor_stride,
                             {dest, static_cast<size_t>(piece.row_bytes)});
            }
            meter.add(local_shape().block_bytes());
          }
        }
      },
      progress);
}

void Residency::pin(const ResidencyLoadOptions& options, const LoadProgressSink& progress) {
  std::vector<std::span<std::byte>> spans;
  for (const HostMemory& shard : shards_) spans.push_back(shard.span());
  // A copy must not cross from one pinned piece into the next, so pieces are of whole blocks, and of whole pages.
  PinHooks pinning = options.pinning;
  const int64_t step = std::lcm(block_stride_, int64_t{1} << 12);
  pinning.piece_bytes = std::max(step, pinning.piece_bytes / step * step);
  const auto outcome = pinned_.pin(spans, std::move(pinning), [&] {
    if (progress) progress(0);
  });
  if (!outcome.pinned) warnings_.push_back(pinning_warning(outcome.refused_at_bytes, bytes(), options.memlock_bytes));
}

uint64_t Residency::checksum(int rank) const {
  OFL_ASSERT(std::ssize(shards_) == world() && rank >= 0 && rank < world());
  const std::span<const std::byte> shard = shards_[static_cast<size_t>(rank)].span();
  // Four independent multiply-rotate chains, so that memory and not the multiplier's latency bounds it. Blocks are
  // multiples of 64 bytes, so is the shard.
  constexpr uint64_t kPrime = 0x9E3779B97F4A7C15u;
  uint64_t lanes[4] = {1, 2, 3, 4};
  for (size_t at = 0; at < shard.size(); at += 32) {
    uint64_t words[4];
    std::memcpy(words, shard.data() + at, sizeof words);
    for (size_t i = 0; i < 4; ++i) {
      const uint64_t mixed = (lanes[i] ^ words[i]) * kPrime;
      lanes[i] = mixed << 29 | mixed >> 35;
    }
  }
  uint64_t sum = shard.size();
  for (const uint64_t lane : lanes) {
    sum = (sum ^ lane) * kPrime;
    sum ^= sum >> 32;
  }
  return sum;
}

}  // namespace offload
