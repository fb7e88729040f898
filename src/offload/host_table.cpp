#include "offload/host_table.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "offload/tensor_reader.h"

namespace offload {
namespace {

constexpr int64_t kPieceBytes = 8 << 20;  // between two looks at the user's stop

// A part of one tensor and where it belongs.
struct Piece {
  const TensorEntry* tensor;
  int64_t offset;
  std::span<std::byte> dest;
};

// For weights that no file holds: through the source, in parallel.
void read_source(const WeightSource& source, std::span<const Piece> pieces, int threads,
                 const LoadProgressSink& progress) {
  std::atomic<size_t> next{0};
  run_load(
      threads,
      [&](int, LoadMeter& meter) {
        for (size_t i = next++; i < pieces.size() && !meter.stopped(); i = next++) {
          source.read(*pieces[i].tensor, pieces[i].offset, pieces[i].dest);
          meter.add(std::ssize(pieces[i].dest));
        }
      },
      progress);
}

}  // namespace

RamTable::RamTable(const WeightSource& source, std::string stem, int64_t rows, int64_t columns)
    : source_(source), stem_(std::move(stem)), rows_(rows), columns_(columns) {
  if (source_.tensors() == nullptr) return;
  const RowTable table(*source_.tensors(), stem_);
  dtype_ = table.dtype();
  if (table.rows() != rows || table.columns() != columns)
    throw_error(ErrorCode::input, "{}: table {} is [{}, {}], config.json asks for [{}, {}]",
                source_.tensors()->origin(), stem_, table.rows(), table.columns(), rows, columns);
  if (dtype_ != DType::bf16 && dtype_ != DType::f32)
    throw_error(ErrorCode::input, "{}: table {} has type {}; supported here: BF16, F32", source_.tensors()->origin(),
                stem_, dtype_name(dtype_));
}

std::vector<TensorEntry> RamTable::parts() const {
  if (source_.tensors() == nullptr) {
    const int64_t shape[] = {rows_, columns_};
    return {source_.require(stem_ + ".weight", shape)};
  }
  const RowTable table(*source_.tensors(), stem_);
  std::vector<TensorEntry> parts;
  for (const TensorEntry* shard : table.shards()) parts.push_back(*shard);
  return parts;
}

void RamTable::load(const DirectReaderOptions& reader, const LoadProgressSink& progress) {
  HostMemory memory(bytes(), stem_);
  std::vector<Piece> pieces;
  std::vector<ReadRequest> requests;
  std::byte* dest = memory.data();
  const std::vector<TensorEntry> tensors = parts();
  for (const TensorEntry& tensor : tensors) {
    requests.push_back({.file = tensor.file_index, .offset = tensor.offset, .row_bytes = tensor.bytes, .dest = dest});
    for (int64_t at = 0; at < tensor.bytes; at += kPieceBytes)
      pieces.push_back({&tensor, at, {dest + at, static_cast<size_t>(std::min(kPieceBytes, tensor.bytes - at))}});
    dest += tensor.bytes;
  }
  if (source_.checkpoint() != nullptr) {
    report_ = read_tensors(*source_.checkpoint(), requests, reader, progress);
  } else {
    read_source(source_, pieces, reader.threads, progress);
  }
  memory_ = std::move(memory);
}

void RamTable::gather(std::span<const int64_t> ids, std::span<std::byte> out) {
  const auto bytes = static_cast<size_t>(row_bytes());
  OFL_ASSERT(out.size() == ids.size() * bytes);
  for (size_t i = 0; i < ids.size(); ++i) {
    OFL_ASSERT(ids[i] >= 0 && ids[i] < rows_);
    std::memcpy(out.data() + i * bytes, memory_.data() + ids[i] * row_bytes(), bytes);
  }
}

}  // namespace offload
