// Convolution and the gated delta rule: the ops with a state. The team splits channels and value heads.
#include <cmath>

#include "cpu/cpu_ops.h"
#include "cpu/cpu_ops_rows.h"

namespace offload::cpu {
namespace {

// Channels of one item: long rows stream better, short ones make items for a larger team.
constexpr int64_t kChannelsMost = 512, kChannelsLeast = 128;
int64_t channel_chunk(int64_t channels, int threads) {
  return channels >= 4 * kChannelsMost * threads ? kChannelsMost : kChannelsLeast;
}

// Channels [begin, begin + count) of one convolution, over all rows; then their history.
struct ConvChunk {
  const CausalConvSiluArgs& a;
  const CpuKernels& kernels;
  int64_t begin;
  int64_t count;
  int64_t width;  // of a row of scratch, a multiple of kLanes, at least count

  // Row t of the history followed by x; t >= -history_rows.
  const Tensor& source(int64_t t) const { return t >= 0 ? a.x : a.history; }
  int64_t source_at(int64_t t) const {
    return (t >= 0 ? row_offset(a.x, t) : row_offset(a.history, a.history.dim(0) + t)) + begin;
  }
  // Each row is widened once, into a ring of the rows that a sum reaches back to. scratch: [ring_rows + taps][width]
  void convolve(float* scratch) const {
    const Rnd rnd(kernels, a.x.dtype(), a.rounding);
    const int64_t taps = a.w.dim(1), history_rows = a.history.dim(0), ring_rows = history_rows + 1;
    float* w = scratch + ring_rows * width;
    for (int64_t ch = 0; ch < count; ++ch)
      for (int64_t j = 0; j < taps; ++j) w[j * width + ch] = load_one(a.w, (begin + ch) * taps + j);
    const auto ring_row = [&](int64_t t) { return scratch + (t + history_rows) % ring_rows * width; };
    for (int64_t t = -history_rows; t < 0; ++t) load_row(kernels, source(t), source_at(t), ring_row(t), count);
    for (int64_t t = 0; t < a.x.dim(0); ++t) {
      alignas(64) float sum[kChannelsMost];
      std::fill_n(sum, round_to_lanes(count), 0.0f);
      load_row(kernels, a.x, source_at(t), ring_row(t), count);
      for (int64_t j = 0; j < taps; ++j)
        kernels.mul_add(sum, w + j * width, ring_row(t - a.dilation * (taps - 1 - j)), count);
      rnd(sum, count);
      kernels.silu(sum, count);
      store_row(kernels, sum, a.out, row_offset(a.out, t) + begin, count);
    }
  }
  // Row i becomes position rows - history_rows + i; in ascending i, none is read after it was replaced.
  void advance_history() const {
    const int64_t rows = a.x.dim(0), history_rows = a.history.dim(0), bytes = count * dtype_bytes(a.x.dtype());
    for (int64_t i = 0; i < history_rows; ++i) {
      const int64_t t = rows - history_rows + i;
      std::memmove(const_cast<void*>(element_at(a.history, row_offset(a.history, i) + begin)),
                   element_at(source(t), source_at(t)), static_cast<size_t>(bytes));
    }
  }
};

}  // namespace

int64_t CpuOps::scratch_bytes(const CausalConvSiluArgs& a) const {
  Arena arena;
  arena.take(DType::f32, {threads_, a.history.dim(0) + 1 + a.w.dim(1), channel_chunk(a.x.dim(1), threads_)});
  return arena.peak_bytes();
}

void CpuOps::execute(const CausalConvSiluArgs& a) {
  const int64_t rows = a.x.dim(0), channels = a.x.dim(1), width = channel_chunk(channels, threads_);
  if (rows == 0) return;
  Arena arena = scratch_arena();
  const Tensor buffers = arena.take(DType::f32, {threads_, a.history.dim(0) + 1 + a.w.dim(1), width});
  for_each_item(threads_, (channels + width - 1) / width, rows * channels >= 16384, [&](int64_t item, int thread) {
    const int64_t begin = item * width;
    const ConvChunk chunk{a, kernels_, begin, std::min(width, channels - begin), width};
    chunk.convolve(buffers.row<float>(thread));
    chunk.advance_history();
  });
}

namespace {

// exp() of less is 0 in FP32.
constexpr float kForgetsAll = -104.0f;

// One thread's buffers for one head. Columns are padded with zeros to kLanes, so that every product has whole vectors.
struct DeltaScratch {
  int64_t n = 0;  // rows of a chunk (1 for the recurrence)
  int64_t np = 0, dkp = 0, dvp = 0;
  float* q = nullptr;             // [n][dkp]
  float* k = nullptr;             // [n][dkp]
  float* k_transposed = nullptr;  // [dk][np]
  float* state = nullptr;         // [dk][dvp], for a value_dim that is no multiple of kLanes
  float* a = nullptr;             // [n][np]: -beta_i (k_i . k_l) exp(G_i - G_l), l < i
  float* p = nullptr;             // [n][np]: (q_i . k_l) exp(G_i - G_l), l <= i
  float* solved = nullptr;        // [n][dvp + dkp]: U then V', and -W
  float* out = nullptr;           // [n][dvp]
  float* decay = nullptr;         // [np]: exp(G_i - G_l) of one row i
  float* total = nullptr;         // [np]: G, counted from the row that forgot all before it
  int32_t* remembered = nullptr;  // [np]: the first row that row i remembers; -1: M, too
  float* beta = nullptr;          // [np]

  DeltaScratch(Arena& arena, const GatedDeltaArgs& args) {
    const int64_t dk = args.state.dim(1), dv = args.state.dim(2);
    n = std::min(std::max<int64_t>(args.chunk_rows, 1), std::max<int64_t>(args.qkv.dim(0), 1));
    np = round_to_lanes(n);
    dkp = round_to_lanes(dk);
    dvp = round_to_lanes(dv);
    const auto take = [&](int64_t rows, int64_t columns) {
      return static_cast<float*>(arena.take(DType::f32, {rows, columns}).data());
    };
    q = take(n, dkp);
    k = take(n, dkp);
    k_transposed = take(dk, np);
    state = take(dk, dvp);
    a = take(n, np);
    p = take(n, np);
    solved = take(n, dvp + dkp);
    out = take(n, dvp);
    decay = take(1, np);
    total = take(1, np);
    remembered = static_cast<int32_t*>(arena.take(DType::i32, {np}).data());
    beta = take(1, np);
  }
};

class DeltaHead {
 public:
  DeltaHead(const GatedDeltaArgs& args, const CpuKernels& kernels, const DeltaScratch& scratch, int64_t head)
      : args_(args),
        kernels_(kernels),
        s_(scratch),
        head_(head),
        key_head_(head / (args.state.dim(0) / args.key_heads)),
        dk_(args.state.dim(1)),
        dv_(args.state.dim(2)),
        rnd_(kernels, args.qkv.dtype(), args.rounding),
        user_state_(args.state.as<float>() + head * dk_ * dv_),
        m_(dv_ == s_.dvp ? user_state_ : s_.state) {}

  void run() {
    if (m_ != user_state_) {
      for (int64_t i = 0; i < dk_; ++i) {
        std::copy_n(user_state_ + i * dv_, dv_, m_ + i * s_.dvp);
        std::fill(m_ + i * s_.dvp + dv_, m_ + (i + 1) * s_.dvp, 0.0f);
      }
    }
    const int64_t rows = args_.qkv.dim(0);
    for (int64_t first = 0; first < rows; first += s_.n) {
      const int64_t n = std::min(s_.n, rows - first);
      load(first, n);
      if (args_.chunk_rows == 0)
        step();
      else
        chunk(n);
      for (int64_t i = 0; i < n; ++i)
        store_row(kernels_, s_.out + i * s_.dvp, args_.out, row_offset(args_.out, first + i) + head_ * dv_, dv_);
    }
    if (m_ != user_state_)
      for (int64_t i = 0; i < dk_; ++i) std::copy_n(m_ + i * s_.dvp, dv_, user_state_ + i * dv_);
  }

 private:
  // v of row i; the columns of `solved` that become U.
  float* value(int64_t i) const { return s_.solved + i * (s_.dvp + s_.dkp); }

  // dim elements of qkv -> out [padded], zeros behind; L2-normalised and scaled when scale is not 0.
  void load_slice(int64_t row, int64_t begin, int64_t dim, int64_t padded, float* out, float scale) const {
    load_row(kernels_, args_.qkv, row_offset(args_.qkv, row) + begin, out, dim);
    std::fill(out + dim, out + padded, 0.0f);
    if (scale != 0) kernels_.scale(out, scale / std::sqrt(kernels_.dot(out, out, dim) + 1e-6f), dim);
  }

  void load(int64_t first, int64_t n) const {
    const float root = 1.0f / std::sqrt(static_cast<float>(dk_));
    double total = 0;  // of log-decays; F64 costs nothing here
    int32_t remembered = -1;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = first + i;
      load_slice(row, key_head_ * dk_, dk_, s_.dkp, s_.q + i * s_.dkp, root);
      load_slice(row, (args_.key_heads + key_head_) * dk_, dk_, s_.dkp, s_.k + i * s_.dkp, 1.0f);
      load_slice(row, 2 * args_.key_heads * dk_ + head_ * dv_, dv_, s_.dvp, value(i), 0);
      s_.beta[i] = rnd_.one(sigmoid_one(kernels_, load_one(args_.b, row_offset(args_.b, row) + head_)));
      const float t = load_one(args_.a, row_offset(args_.a, row) + head_) + args_.dt_bias.as<float>()[head_];
      const float softplus = t > 20.0f ? t : std::log1p(std::exp(t));
      const float g = -(std::exp(args_.a_log.as<float>()[head_]) * softplus);
      total += static_cast<double>(g);
      if (g < kForgetsAll) {
        total = 0;
        remembered = static_cast<int32_t>(i);
      }
      s_.total[i] = static_cast<float>(total);
      s_.remembered[i] = remembered;
    }
  }

  // What is left of M at row i: exp(G_i).
  float since_start(int64_t i) const { return s_.remembered[i] < 0 ? std::exp(s_.total[i]) : 0.0f; }

  void step() const { kernels_.delta_step(m_, dk_, s_.dvp, since_start(0), s_.q, s_.k, value(0), s_.beta[0], s_.out); }

  // exp(G_i - G_l) for l <= i -> s_.decay.
  void decay_row(int64_t i) const {
    const int64_t first = std::max(s_.remembered[i], 0);
    std::fill_n(s_.decay, first, 0.0f);
    for (int64_t l = first; l <= i; ++l) s_.decay[l] = s_.total[i] - s_.total[l];
    kernels_.exp_sum(s_.decay + first, 0.0f, i + 1 - first);
  }

  void chunk(int64_t n) const {
    const int64_t np = s_.np, dkp = s_.dkp, dvp = s_.dvp, ld = dvp + dkp;
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t l = 0; l < n; ++l) s_.k_transposed[i * np + l] = s_.k[l * dkp + i];
      std::fill(s_.k_transposed + i * np + n, s_.k_transposed + (i + 1) * np, 0.0f);
    }
    kernels_.matmul(n, np, dk_, s_.k, dkp, 1, s_.k_transposed, np, s_.a, np, 0);
    kernels_.matmul(n, np, dk_, s_.q, dkp, 1, s_.k_transposed, np, s_.p, np, 0);
    for (int64_t i = 0; i < n; ++i) {
      decay_row(i);
      kernels_.mul(s_.a + i * np, s_.decay, i);
      kernels_.scale(s_.a + i * np, -s_.beta[i], i);
      kernels_.mul(s_.p + i * np, s_.decay, i + 1);
      std::fill(s_.p + i * np + i + 1, s_.p + (i + 1) * np, 0.0f);
      kernels_.scale(value(i), s_.beta[i], dvp);
      std::copy_n(s_.k + i * dkp, dkp, value(i) + dvp);
      kernels_.scale(value(i) + dvp, -s_.beta[i] * since_start(i), dkp);
      kernels_.scale(s_.q + i * dkp, since_start(i), dkp);
    }
    solve(n);
    // V' = U - W M; O = exp(G) q M + P V'; M = exp(G_last) M + sum_l exp(G_last - G_l) k_l V'_l^T
    kernels_.matmul(n, dvp, dk_, value(0) + dvp, ld, 1, m_, dvp, value(0), ld, 1);
    kernels_.matmul(n, dvp, dk_, s_.q, dkp, 1, m_, dvp, s_.out, dvp, 0);
    kernels_.matmul(n, dvp, n, s_.p, np, 1, value(0), ld, s_.out, dvp, 1);
    decay_row(n - 1);
    for (int64_t l = 0; l < n; ++l) kernels_.scale(s_.k + l * dkp, s_.decay[l], dkp);
    kernels_.scale(m_, since_start(n - 1), dk_ * dvp);
    kernels_.matmul(dk_, dvp, n, s_.k, 1, dkp, value(0), ld, m_, dvp, 1);
  }

  // (I + A) X = right-hand sides, in place, by forward substitution in blocks of rows.
  void solve(int64_t n) const {
    constexpr int64_t kBlock = 4;
    const int64_t np = s_.np, ld = s_.dvp + s_.dkp;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      kernels_.matmul(count, ld, begin, s_.a + begin * np, np, 1, value(0), ld, value(begin), ld, 1);
      for (int64_t i = begin + 1; i < begin + count; ++i)
        for (int64_t l = begin; l < i; ++l) kernels_.axpy(value(i), s_.a[i * np + l], value(l), ld);
    }
  }

  const GatedDeltaArgs& args_;
  const CpuKernels& kernels_;
  const DeltaScratch& s_;
  int64_t head_;
  int64_t key_head_;
  int64_t dk_;
  int64_t dv_;
  Rnd rnd_;
  float* user_state_;
  float* m_;  // [dk][dvp]
};

}  // namespace

int64_t CpuOps::scratch_bytes(const GatedDeltaArgs& a) const {
  Arena arena;
  for (int thread = 0; thread < threads_; ++thread) DeltaScratch(arena, a);
  return arena.peak_bytes();
}

void CpuOps::execute(const GatedDeltaArgs& a) {
  if (a.qkv.dim(0) == 0) return;
  Arena arena = scratch_arena();
  const int64_t one = [&] {
    Arena measuring;
    DeltaScratch(measuring, a);
    return measuring.peak_bytes();
  }();
  const Tensor blocks = arena.take(DType::u8, {threads_, one});
  for_each_item(threads_, a.state.dim(0), true, [&](int64_t head, int thread) {
    Arena own(blocks.row<uint8_t>(thread), one);
    const DeltaScratch scratch(own, a);
    DeltaHead(a, kernels_, scratch, head).run();
  });
}

}  // namespace offload::cpu
