#include "core/weights.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstring>

namespace offload {
namespace {

constexpr int64_t kStagingBytes = 8 << 20;

std::string shape_text(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool is_loadable(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::f64;
}

class CheckpointSource final : public WeightSource {
 public:
  CheckpointSource(const Checkpoint& checkpoint, const TextTensors& tensors)
      : checkpoint_(checkpoint), tensors_(tensors) {}

  TensorEntry require(const std::string& name, std::span<const int64_t> shape) const override {
    const TensorEntry& entry = tensors_.at(name);
    const std::string& file = checkpoint_.file_path(entry.file_index);
    if (!std::equal(entry.shape.begin(), entry.shape.end(), shape.begin(), shape.end()))
      throw_error(ErrorCode::input, "{}: tensor {} has shape {}, config.json asks for {}", printable(file, 4096),
                  printable(entry.name), shape_text(entry.shape), shape_text(shape));
    if (!is_loadable(entry.dtype))
      throw_error(ErrorCode::input, "{}: tensor {} has type {}; supported here: BF16, F32, F16, F64",
                  printable(file, 4096), printable(entry.name), dtype_name(entry.dtype));
    return entry;
  }
  void read(const TensorEntry& tensor, int64_t byte_offset, std::span<std::byte> out) const override {
    checkpoint_.read(tensor, byte_offset, out);
  }
  const TextTensors* tensors() const override { return &tensors_; }
  const Checkpoint* checkpoint() const override { return &checkpoint_; }

 private:
  const Checkpoint& checkpoint_;
  const TextTensors& tensors_;
};

class DummySource final : public WeightSource {
 public:
  explicit DummySource(uint64_t seed) : seed_(seed) {}

  TensorEntry require(const std::string& name, std::span<const int64_t> shape) const override {
    TensorEntry entry{name, DType::bf16, {shape.begin(), shape.end()}, 0, 0, 2};
    for (const int64_t extent : shape) entry.bytes *= extent;
    return entry;
  }
  void read(const TensorEntry& tensor, int64_t byte_offset, std::span<std::byte> out) const override {
    const int64_t columns = tensor.shape.size() >= 2 ? tensor.shape.back() : 0;
    OFL_ASSERT(byte_offset % 2 == 0 && reinterpret_cast<uintptr_t>(out.data()) % alignof(bf16) == 0);
    fill_dummy(seed_, tensor.name, columns, byte_offset / 2,
               {reinterpret_cast<bf16*>(out.data()), out.size() / sizeof(bf16)});
  }
  const TextTensors* tensors() const override { return nullptr; }

 private:
  uint64_t seed_;
};

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
  return x ^ (x >> 33);
}

// value i of a float tensor of type `dtype` at `bytes`.
float value_at(DType dtype, const std::byte* bytes, int64_t i) {
  const auto load = [&](auto sample) {
    std::memcpy(&sample, bytes + i * static_cast<int64_t>(sizeof sample), sizeof sample);
    return sample;
  };
  if (dtype == DType::bf16) return to_float(load(bf16{}));
  if (dtype == DType::f16) return to_float(load(fp16{}));
  if (dtype == DType::f64) return static_cast<float>(load(double{}));
  OFL_ASSERT(dtype == DType::f32);
  return load(float{});
}

int64_t rows_in(const std::vector<Range>& ranges, int64_t all) {
  if (ranges.empty()) return all;
  int64_t rows = 0;
  for (const Range& range : ranges) rows += range.count;
  return rows;
}

}  // namespace

std::unique_ptr<WeightSource> checkpoint_source(const Checkpoint& checkpoint, const TextTensors& tensors) {
  return std::make_unique<CheckpointSource>(checkpoint, tensors);
}

std::unique_ptr<WeightSource> dummy_source(uint64_t seed) {
  return std::make_unique<DummySource>(seed);
}

void fill_dummy(uint64_t seed, std::string_view name, int64_t columns, int64_t first_element, std::span<bf16> out) {
  uint64_t key = mix64(seed + 0x9E3779B97F4A7C15u);
  for (const char c : name) key = mix64(key ^ static_cast<unsigned char>(c));
  const float bound = columns > 0 ? std::sqrt(3.0f / static_cast<float>(columns)) : 0.1f;
  const float step = bound * 0x1p-15f;  // 16 random bits, centred
  for (size_t i = 0; i < out.size();) {
    // One mix serves four elements; the counter is the element's index, so any split of the work gives the same values.
    const uint64_t index = static_cast<uint64_t>(first_element) + i;
    uint64_t bits = mix64(key + (index / 4 + 1) * 0x9E3779B97F4A7C15u) >> (16 * (index % 4));
    for (uint64_t lane = index % 4; lane < 4 && i < out.size(); ++lane, ++i, bits >>= 16)
      out[i] = to_bf16((static_cast<float>(bits & 0xFFFF) - 32767.5f) * step);
  }
}

WeightLoader::WeightLoader(const WeightSource& source, Backend& backend, Arena& arena,
                           std::function<void(int64_t)> progress)
    : source_(source), backend_(backend), arena_(arena), progress_(std::move(progress)) {}

Tensor WeightLoader::matrix(std::initializer_list<MatrixPart> parts) {
  int64_t rows = 0, columns = 0;
  bool all_bf16 = true;
  std::vector<TensorEntry> entries;
  for (const MatrixPart& part : parts) {
    entries.push_back(source_.require(part.name, std::array{part.rows, part.columns}));
    all_bf16 &= entries.back().dtype == DType::bf16;
    const int64_t width = part.column_range.count == 0 ? part.columns : part.column_range.count;
    OFL_ASSERT(columns == 0 || columns == width);
    columns = width;
    rows += rows_in(part.row_ranges, part.rows);
  }
  const Tensor out = arena_.take(all_bf16 ? DType::bf16 : DType::f32, {rows, columns});
  if (planning()) return out;
  int64_t at = 0;
  auto entry = entries.begin();
  for (const MatrixPart& part : parts) {
    const Range column_range = part.column_range.count == 0 ? Range{0, part.columns} : part.column_range;
    const std::vector<Range> ranges = part.row_ranges.empty() ? std::vector{Range{0, part.rows}} : part.row_ranges;
    for (const Range& range : ranges) {
      load_rows(*entry, range, column_range, part.columns, out.narrow(0, at, range.count));
      at += range.count;
    }
    ++entry;
  }
  return out;
}

Tensor WeightLoader::vector(const std::string& name, std::initializer_list<int64_t> shape, std::vector<Range> ranges) {
  const TensorEntry entry = source_.require(name, {shape.begin(), shape.size()});
  int64_t rest = 1;
  for (size_t i = 1; i < entry.shape.size(); ++i) rest *= entry.shape[i];
  const int64_t all = entry.shape.empty() ? 1 : entry.shape[0];
  if (ranges.empty()) ranges = {{0, all}};
  const Tensor out = arena_.take(DType::f32, {rows_in(ranges, all) * rest});
  if (planning()) return out;
  int64_t at = 0;
  for (const Range& range : ranges) {
    load_rows(entry, range, {0, rest}, rest, out.narrow(0, at, range.count * rest).reshaped({range.count, rest}));
    at += range.count * rest;
  }
  return out;
}

Tensor WeightLoader::constant(std::span<const float> values) {
  const Tensor out = arena_.take(DType::f32, {static_cast<int64_t>(values.size())});
  if (!planning()) backend_.upload(std::as_bytes(values), out);
  return out;
}

// out [rows.count, columns.count] = the block of `entry` seen as [*, columns_in_file], converted to out's type, staged
// in pieces of whole rows.
void WeightLoader::load_rows(const TensorEntry& entry, Range rows, Range columns, int64_t columns_in_file,
                             const Tensor& out) {
  const int64_t source_bytes = dtype_bytes(entry.dtype);
  const bool whole_rows = columns.count == columns_in_file;
  const int64_t rows_per_piece = std::max<int64_t>(1, kStagingBytes / (columns_in_file * source_bytes));
  for (int64_t done = 0; done < rows.count;) {
    const int64_t count = std::min(rows_per_piece, rows.count - done);
    const Tensor target = out.narrow(0, done, count);
    staging_.resize(static_cast<size_t>(count * columns.count * source_bytes));
    for (int64_t r = 0; r < (whole_rows ? 1 : count); ++r) {
      const int64_t offset = ((rows.begin + done + r) * columns_in_file + columns.begin) * source_bytes;
      const int64_t bytes = (whole_rows ? count : 1) * columns.count * source_bytes;
      source_.read(entry, offset,
                   std::span(staging_).subspan(static_cast<size_t>(r * columns.count * source_bytes),
                                               static_cast<size_t>(bytes)));
    }
    if (entry.dtype == target.dtype()) {
      backend_.upload(staging_, target);
    } else {
      OFL_ASSERT(target.dtype() == DType::f32);
      converted_.resize(static_cast<size_t>(target.bytes()));
      for (int64_t i = 0; i < target.elements(); ++i) {
        const float value = value_at(entry.dtype, staging_.data(), i);
        std::memcpy(converted_.data() + i * 4, &value, 4);
      }
      backend_.upload(converted_, target);
    }
    if (progress_) progress_(static_cast<int64_t>(staging_.size()));
    done += count;
  }
}

}  // namespace offload
