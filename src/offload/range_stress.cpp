#include "offload/range_stress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/checkpoint.h"
#include "core/checkpoint_names.h"
#include "core/experts.h"
#include "core/model.h"
#include "core/models/registry.h"

namespace offload {
namespace {

// [rows, columns] BF16 in a file, read whole and written back.
class Matrix {
 public:
  // Rows [first_row, first_row + rows) of a matrix, or of all matrices of a 3-D tensor one below the other.
  Matrix(const Checkpoint& checkpoint, const TensorEntry& tensor, int64_t first_row, int64_t rows)
      : checkpoint_(checkpoint),
        tensor_(tensor),
        columns_(tensor.shape.back()),
        begin_(first_row * columns_ * dtype_bytes(DType::bf16)),
        values_(static_cast<size_t>(rows * columns_)) {
    if (tensor.dtype != DType::bf16)
      throw_error(ErrorCode::input, "{}: tensor {} has type {}; only BF16 weights can be stressed", checkpoint.path(),
                  printable(tensor.name), dtype_name(tensor.dtype));
    checkpoint.read(tensor, begin_, std::as_writable_bytes(std::span(values_)));
  }

  bf16& at(int64_t row, int64_t column) { return values_[static_cast<size_t>(row * columns_ + column)]; }
  int64_t columns() const { return columns_; }
  int64_t rows() const { return static_cast<int64_t>(values_.size()) / columns_; }

  void write() const {
    const std::string& path = checkpoint_.file_path(tensor_.file_index);
    const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
    const auto bytes = std::as_bytes(std::span(values_));
    for (size_t done = 0; file.get() >= 0 && done < bytes.size();) {
      const ssize_t count = pwrite(file.get(), bytes.data() + done, bytes.size() - done,
                                   static_cast<off_t>(tensor_.offset + begin_) + static_cast<off_t>(done));
      if (count <= 0) break;
      done += static_cast<size_t>(count);
      if (done == bytes.size()) return;
    }
    throw_error(ErrorCode::resource, "{}: {}", printable(path, 4096), std::strerror(errno));
  }

 private:
  const Checkpoint& checkpoint_;
  const TensorEntry& tensor_;
  int64_t columns_, begin_;
  std::vector<bf16> values_;
};

// Whether `weight` is a zero, or a normal number that stays one times 2^a.
bool can_scale(bf16 weight, int a) {
  if ((weight.bits & 0x7fffu) == 0) return true;
  const int exponent = weight.bits >> 7 & 0xff;
  return exponent >= 1 && exponent <= 254 && exponent + a >= 1 && exponent + a <= 254;
}

void scale(bf16& weight, int a) {
  if ((weight.bits & 0x7fffu) != 0) weight.bits = static_cast<uint16_t>(weight.bits + a * 128);
}

// splitmix64 (Steele et al. 2014) over the seed and a running number.
class Exponents {
 public:
  explicit Exponents(const RangeStressOptions& options)
      : state_(options.seed), span_(2 * static_cast<uint64_t>(options.exponent_max) + 1), max_(options.exponent_max) {}
  int next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int>((x ^ (x >> 31)) % span_) - max_;
  }

 private:
  uint64_t state_, span_;
  int max_;
};

class Stress {
 public:
  Stress(const std::string& model_dir, const RangeStressOptions& options,
         const std::function<void(const RangeStressCounts&)>& progress)
      : spec_(load_model_spec(model_dir)),
        checkpoint_(Checkpoint::open(model_dir)),
        tensors_(checkpoint_.tensors(), checkpoint_.path()),
        exponents_(options),
        progress_(progress) {}

  RangeStressCounts run() {
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      const LayerSpec& layer = spec_.layers[i];
      const std::string prefix = fmt::format("layers.{}.", i);
      stress_experts(prefix + "mlp.experts", layer.moe);
      const std::string shared = prefix + "mlp.shared_expert.";
      Matrix up = whole(shared + "up_proj.weight", layer.moe.shared_intermediate, spec_.hidden);
      Matrix down = whole(shared + "down_proj.weight", spec_.hidden, layer.moe.shared_intermediate);
      stress_pair(up, down);
      if (const auto* qsa = std::get_if<QsaSpec>(&layer.mixer)) stress_attention(prefix + "self_attn.", *qsa);
    }
    return counts_;
  }

 private:
  const TensorEntry& require(const std::string& name, const std::vector<int64_t>& shape) const {
    const TensorEntry& tensor = tensors_.at(name);
    if (tensor.shape != shape)
      throw_error(ErrorCode::input, "{}: tensor {} is [{}], expected [{}]", checkpoint_.path(), printable(tensor.name),
                  fmt::join(tensor.shape, ", "), fmt::join(shape, ", "));
    return tensor;
  }
  Matrix whole(const std::string& name, int64_t rows, int64_t columns) const {
    return {checkpoint_, require(name, {rows, columns}), 0, rows};
  }

  void stress_experts(const std::string& prefix, const MoeSpec& moe) {
    const int64_t inter = moe.intermediate, hidden = spec_.hidden;
    const bool fused = tensors_.find(prefix + ".gate_up_proj") != nullptr;
    for (int64_t e = 0; e < moe.experts; ++e) {
      const std::string stem = fmt::format("{}.{}.", prefix, e);
      Matrix up = fused ? Matrix(checkpoint_, require(prefix + ".gate_up_proj", {moe.experts, 2 * inter, hidden}),
                                 (2 * e + 1) * inter, inter)
                        : whole(stem + "up_proj.weight", inter, hidden);
      Matrix down =
          fused ? Matrix(checkpoint_, require(prefix + ".down_proj", {moe.experts, hidden, inter}), e * hidden, hidden)
                : whole(stem + "down_proj.weight", hidden, inter);
      stress_pair(up, down);
    }
  }

  // Row i of `in` against column i of `out`.
  void stress_pair(Matrix& in, Matrix& out) {
    for (int64_t i = 0; i < in.rows(); ++i) stress_channel(in, i, out, std::vector<int64_t>{i});
    in.write();
    out.write();
    if (progress_) progress_(counts_);
  }

  void stress_attention(const std::string& prefix, const QsaSpec& qsa) {
    Matrix v = whole(prefix + "v_proj.weight", qsa.kv_heads * qsa.head_dim, spec_.hidden);
    Matrix out = whole(prefix + "o_proj.weight", spec_.hidden, qsa.query_heads * qsa.head_dim);
    const int64_t group = qsa.query_heads / qsa.kv_heads;
    for (int64_t i = 0; i < v.rows(); ++i) {
      std::vector<int64_t> columns;
      for (int64_t h = 0; h < group; ++h)
        columns.push_back((i / qsa.head_dim * group + h) * qsa.head_dim + i % qsa.head_dim);
      stress_channel(v, i, out, columns);
    }
    v.write();
    out.write();
    if (progress_) progress_(counts_);
  }

  void stress_channel(Matrix& in, int64_t row, Matrix& out, const std::vector<int64_t>& columns) {
    const int a = exponents_.next();
    ++counts_.channels;
    bool can = true;
    for (int64_t j = 0; j < in.columns(); ++j) can = can && can_scale(in.at(row, j), a);
    for (const int64_t column : columns)
      for (int64_t j = 0; j < out.rows(); ++j) can = can && can_scale(out.at(j, column), -a);
    if (!can) {
      ++counts_.channels_kept;
      return;
    }
    for (int64_t j = 0; j < in.columns(); ++j) scale(in.at(row, j), a);
    for (const int64_t column : columns)
      for (int64_t j = 0; j < out.rows(); ++j) scale(out.at(j, column), -a);
  }

  ModelSpec spec_;
  Checkpoint checkpoint_;
  TextTensors tensors_;
  Exponents exponents_;
  std::function<void(const RangeStressCounts&)> progress_;
  RangeStressCounts counts_;
};

}  // namespace

RangeStressCounts stress_in_place(const std::string& model_dir, const RangeStressOptions& options,
                                  const std::function<void(const RangeStressCounts&)>& progress) {
  OFL_ASSERT(options.exponent_max >= 0 && options.exponent_max <= 100);
  return Stress(model_dir, options, progress).run();
}

}  // namespace offload
