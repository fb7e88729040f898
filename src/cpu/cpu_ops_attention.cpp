// Rotary positions and attention, dense and over selected blocks.
//
// Attention takes a row and some heads of one key/value group at a time: all scores of the visible positions lie in
// scratch (heads x positions, never rows x positions), then the softmax, then the weighted values. Each piece of keys
// or values is converted once for its heads. How many heads go together is a choice of speed; no sum depends on it.
#include <cmath>

#include "cpu/cpu_ops.h"
#include "cpu/cpu_ops_rows.h"

namespace offload::cpu {

void CpuOps::execute(const RopeTableArgs& a) {
  const int64_t half = a.inv_freq.dim(0);
  const auto rounded = [&](double value) {
    const auto narrow = static_cast<float>(value);
    return a.round_to == DType::bf16 ? to_float(to_bf16(narrow)) : narrow;
  };
  OFL_ASSERT(a.round_to == DType::f32 || a.round_to == DType::bf16);
  for_each_row(threads_, a.out.dim(0), 32 * half, [&](int64_t r, int) {
    float* out = a.out.row<float>(r);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(a.first + r * a.step) * a.inv_freq.as<float>()[i];
      const double scale = static_cast<double>(a.scale), wide = static_cast<double>(angle);
      out[2 * i] = rounded(scale * std::cos(wide));
      out[2 * i + 1] = rounded(scale * std::sin(wide));
    }
  });
}

namespace {

// One head of norm_rope: y = the elements at `from`, normalised when w is given.
struct RotatedHead {
  const NormRopeArgs& a;
  const CpuKernels& kernels;
  Rnd rnd;
  int64_t from;
  int64_t to;
  float scale;

  void load(int64_t begin, int64_t count, RowBuffer& y) const {
    load_row(kernels, a.x, from + begin, y, count);
    if (!a.w) return;
    RowBuffer w;
    std::memcpy(w.f, a.w.as<float>() + begin, static_cast<size_t>(count) * sizeof(float));
    kernels.scale(y, scale, count);
    kernels.mul_add(y, y, w, count);
    rnd(y, count);
  }
  // x * y, rounded, into x.
  void multiply(RowBuffer& x, RowBuffer& y, int64_t count) const {
    kernels.mul(x, y, count);
    rnd(x, count);
  }
  void rotate(const float* table, int64_t half) const {
    RowBuffer low, high, cosine, sine, low_sine;
    for_each_chunk(half, [&](int64_t begin, int64_t count) {
      load(begin, count, low);
      load(half + begin, count, high);
      for (int64_t i = 0; i < count; ++i) {
        cosine.f[i] = table[2 * (begin + i)];
        sine.f[i] = table[2 * (begin + i) + 1];
      }
      low_sine = low;
      multiply(low_sine, sine, count);
      multiply(low, cosine, count);
      multiply(sine, high, count);
      multiply(high, cosine, count);
      kernels.axpy(low, -1.0f, sine, count);
      kernels.add(high, low_sine, count);
      store_row(kernels, low, a.out, to + begin, count);
      store_row(kernels, high, a.out, to + half + begin, count);
    });
  }
};

}  // namespace

void CpuOps::execute(const NormRopeArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t heads = a.x.dim(1), n = a.x.dim(2), half = a.table.dim(1);
  for_each_row(threads_, a.x.dim(0) * heads, n, [&](int64_t item, int) {
    const int64_t r = item / heads, h = item % heads, from = row_offset(a.x, r, h), to = row_offset(a.out, r, h);
    RowBuffer y;
    float squares = 0;
    if (a.w) {
      for_each_chunk(n, [&](int64_t begin, int64_t count) {
        load_row(kernels_, a.x, from + begin, y, count);
        squares += kernels_.dot(y, y, count);
      });
    }
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + a.eps);
    const RotatedHead head{a, kernels_, rnd, from, to, scale};
    head.rotate(a.table.row<float>(r), half);
    for_each_chunk(n - 2 * half, [&](int64_t begin, int64_t count) {
      head.load(2 * half + begin, count, y);
      store_row(kernels_, y, a.out, to + 2 * half + begin, count);
    });
  });
}

namespace {

constexpr int64_t kHeadsMax = 8;  // heads that share one pass over keys and values
// Positions per kernel call. Rows of a cache lie a power of two apart and share few sets of the L1 cache: 16 of them
// fit.
constexpr int64_t kPositionPiece = 16;

void score_positions(const CpuKernels& kernels, const float* q, int64_t q_stride, int64_t heads, const Tensor& k,
                     int64_t offset, int64_t k_stride, int64_t count, int64_t n, float* out, int64_t out_stride) {
  if (k.dtype() == DType::bf16)
    kernels.scores_bf16(q, q_stride, heads, static_cast<const uint16_t*>(element_at(k, offset)), k_stride, count, n,
                        out, out_stride);
  else
    kernels.scores_f32(q, q_stride, heads, k.as<float>() + offset, k_stride, count, n, out, out_stride);
}

// Loads `heads` rows of q from head `first` on -> [heads][padded n], zeros behind.
void load_heads(const CpuKernels& kernels, const Tensor& q, int64_t row, int64_t first, int64_t heads, float* out) {
  const int64_t n = q.dim(2), stride = round_to_lanes(n);
  for (int64_t h = 0; h < heads; ++h) {
    load_row(kernels, q, row_offset(q, row, first + h), out + h * stride, n);
    std::fill(out + h * stride + n, out + (h + 1) * stride, 0.0f);
  }
}

}  // namespace

int64_t CpuOps::scratch_bytes(const BlockScoresArgs& a) const {
  Arena arena;
  arena.take(DType::f32, {threads_, a.q.dim(1), round_to_lanes(a.q.dim(2)) + kPositionPiece});
  return arena.peak_bytes();
}

void CpuOps::execute(const BlockScoresArgs& a) {
  constexpr int64_t kBlocksPerItem = 32 * kPositionPiece;
  const int64_t rows = a.q.dim(0), heads = a.q.dim(1), n = a.q.dim(2), stride = round_to_lanes(n);
  if (rows == 0) return;
  Arena arena = scratch_arena();
  const Tensor buffers = arena.take(DType::f32, {threads_, heads, stride + kPositionPiece});
  const int64_t blocks_max = (a.first + rows) / a.ratio;
  const int64_t pieces = (blocks_max + kBlocksPerItem - 1) / kBlocksPerItem;
  for_each_item(threads_, rows * pieces, rows * blocks_max * heads * n >= 262144, [&](int64_t item, int thread) {
    const int64_t r = item / pieces, begin = item % pieces * kBlocksPerItem;
    const int64_t end = std::min(begin + kBlocksPerItem, (a.first + r + 1) / a.ratio);
    if (begin >= end) return;
    float* q = buffers.row<float>(thread);
    float* products = q + heads * stride;  // [heads][kPositionPiece]
    load_heads(kernels_, a.q, r, 0, heads, q);
    for (int64_t b = begin; b < end; b += kPositionPiece) {
      const int64_t count = std::min(kPositionPiece, end - b);
      score_positions(kernels_, q, stride, heads, a.keys, row_offset(a.keys, b), a.keys.stride(0), count, n, products,
                      kPositionPiece);
      float* out = a.out.row<float>(r) + b;
      for (int64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int64_t h = 0; h < heads; ++h) sum += std::max(0.0f, products[h * kPositionPiece + i]);
        out[i] = sum * a.scale;
      }
    }
  });
}

namespace {

// The scratch of one thread of attention, in floats.
struct AttentionScratch {
  int64_t positions;  // that one row may see, padded
  int64_t stride;     // n padded

  explicit AttentionScratch(const AttentionArgs& a) : stride(round_to_lanes(a.q.dim(2))) {
    const int64_t visible = a.first + a.q.dim(0);
    positions = round_to_lanes(a.blocks ? std::min(visible, (a.blocks.dim(1) + 1) * a.ratio) : visible);
  }
  int64_t heads(const AttentionArgs& a) const { return std::min(kHeadsMax, a.q.dim(1) / a.k.dim(1)); }
  int64_t floats(const AttentionArgs& a) const { return heads(a) * (2 * stride + positions); }
};

// One row and `heads` heads of one key/value group.
class AttentionItem {
 public:
  AttentionItem(const AttentionArgs& a, const CpuKernels& kernels, const AttentionScratch& sizes, float* scratch,
                int64_t row, int64_t first_head, int64_t heads)
      : a_(a),
        kernels_(kernels),
        rnd_(kernels, a.q.dtype(), a.rounding),
        row_(row),
        first_head_(first_head),
        heads_(heads),
        group_(first_head / (a.q.dim(1) / a.k.dim(1))),
        stride_(sizes.stride),
        scores_stride_(sizes.positions),
        q_(scratch),
        out_(q_ + heads * stride_),
        scores_(out_ + heads * stride_) {}

  void run() {
    const int64_t n = a_.q.dim(2);
    load_heads(kernels_, a_.q, row_, first_head_, heads_, q_);
    std::fill_n(out_, heads_ * stride_, 0.0f);
    int64_t seen = 0;
    for_each_piece([&](int64_t position, int64_t count) {
      OFL_ASSERT(seen + count <= scores_stride_);
      score_positions(kernels_, q_, stride_, heads_, a_.k, row_offset(a_.k, position, group_), a_.k.stride(0), count, n,
                      scores_ + seen, scores_stride_);
      seen += count;
    });
    for (int64_t h = 0; h < heads_; ++h) softmax(scores_ + h * scores_stride_, seen);
    seen = 0;
    for_each_piece([&](int64_t position, int64_t count) {
      weigh(position, count, scores_ + seen);
      seen += count;
    });
    for (int64_t h = 0; h < heads_; ++h)
      store_row(kernels_, out_ + h * stride_, a_.out, row_offset(a_.out, row_, first_head_ + h), n);
  }

 private:
  // body(position, count) for the visible positions in ascending order, up to kPositionPiece at a time.
  template <typename Body>
  void for_each_piece(const Body& body) const {
    const auto split = [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p += kPositionPiece) body(p, std::min(kPositionPiece, end - p));
    };
    const int64_t visible = a_.first + row_ + 1;
    if (!a_.blocks) {
      split(0, visible);
      return;
    }
    const int32_t* blocks = a_.blocks.row<int32_t>(row_);
    const int32_t count = a_.counts.as<int32_t>()[row_];
    for (int32_t s = 0; s < count;) {  // neighbouring blocks are one range
      int32_t last = s;
      while (last + 1 < count && blocks[last + 1] == blocks[last] + 1) ++last;
      split(blocks[s] * a_.ratio, (blocks[last] + 1) * a_.ratio);
      s = last + 1;
    }
    split(visible / a_.ratio * a_.ratio, visible);
  }

  void softmax(float* scores, int64_t count) const {
    if (count == 0) return;
    rnd_(scores, count);
    kernels_.scale(scores, a_.scale, count);
    rnd_(scores, count);
    const float sum = kernels_.exp_sum(scores, kernels_.max(scores, count), count);
    kernels_.scale(scores, 1.0f / sum, count);
    rnd_(scores, count);
  }

  void weigh(int64_t position, int64_t count, const float* weights) const {
    const int64_t at = row_offset(a_.v, position, group_), n = a_.q.dim(2);
    if (a_.v.dtype() == DType::bf16)
      kernels_.weigh_bf16(weights, scores_stride_, heads_, static_cast<const uint16_t*>(element_at(a_.v, at)),
                          a_.v.stride(0), count, n, out_, stride_);
    else
      kernels_.weigh_f32(weights, scores_stride_, heads_, a_.v.as<float>() + at, a_.v.stride(0), count, n, out_,
                         stride_);
  }

  const AttentionArgs& a_;
  const CpuKernels& kernels_;
  Rnd rnd_;
  int64_t row_;
  int64_t first_head_;
  int64_t heads_;
  int64_t group_;
  int64_t stride_;
  int64_t scores_stride_;
  float* q_;       // [heads][stride]
  float* out_;     // [heads][stride]
  float* scores_;  // [heads][scores_stride]
};

}  // namespace

int64_t CpuOps::scratch_bytes(const AttentionArgs& a) const {
  Arena arena;
  arena.take(DType::f32, {threads_, AttentionScratch(a).floats(a)});
  return arena.peak_bytes();
}

void CpuOps::execute(const AttentionArgs& a) {
  const int64_t rows = a.q.dim(0), kv_heads = a.k.dim(1), group = a.q.dim(1) / kv_heads;
  if (rows == 0 || group == 0) return;
  const AttentionScratch sizes(a);
  Arena arena = scratch_arena();
  const Tensor buffers = arena.take(DType::f32, {threads_, sizes.floats(a)});
  int64_t heads = sizes.heads(a);
  const auto parts_of_group = [&] { return (group + heads - 1) / heads; };
  while (heads > 1 && rows * kv_heads * parts_of_group() < 2 * int64_t{threads_}) heads = (heads + 1) / 2;
  const int64_t parts = parts_of_group();
  // Late rows see the most positions: they are handed out first, so that the team ends together.
  for_each_item(threads_, rows * kv_heads * parts, true, [&](int64_t item, int thread) {
    const int64_t row = rows - 1 - item / (kv_heads * parts), part = item % (kv_heads * parts);
    const int64_t begin = part % parts * heads, count = std::min(heads, group - begin);
    AttentionItem(a, kernels_, sizes, buffers.row<float>(thread), row, part / parts * group + begin, count).run();
  });
}

}  // namespace offload::cpu
