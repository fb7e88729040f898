#include "offload/host_table.h"

#include <algorithm>
#include <cstring>

namespace offload {
namespace {

constexpr int64_t kReadBytes = 8 << 20;

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

void RamTable::load(const std::function<void(int64_t)>& progress) {
  memory_ = HostMemory(bytes(), stem_);
  int64_t at = 0;
  const auto read = [&](const TensorEntry& entry) {
    for (int64_t done = 0; done < entry.bytes;) {
      const int64_t count = std::min(kReadBytes, entry.bytes - done);
      source_.read(entry, done, memory_.span().subspan(static_cast<size_t>(at + done), static_cast<size_t>(count)));
      done += count;
      if (progress) progress(count);
    }
    at += entry.bytes;
  };
  if (source_.tensors() == nullptr) {
    const int64_t shape[] = {rows_, columns_};
    read(source_.require(stem_ + ".weight", shape));
    return;
  }
  const RowTable table(*source_.tensors(), stem_);
  for (const TensorEntry* shard : table.shards()) read(*shard);
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
