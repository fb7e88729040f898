// Scores of blocks of positions and the choice of the best:
//   block_scores: out[r][b] = (sum_h max(0, q[r][h] . keys[b])) * scale for b < complete(r) = (first + r + 1) / ratio
//   block_topk:   the min(budget, complete(r)) blocks of highest score, in ascending order
//
// block_scores has two kernels. In FP32 FMAs, for few rows (bound by reading the keys: each is loaded once per row,
// straight into registers) and for every dtype, size and alignment. On tensor cores for chunks of BF16 rows: a warp
// keeps 32 keys in registers and runs over rows and heads, so the sum over heads never leaves the registers; bound by
// the products. block_topk is one block of threads per row: a radix select on bits that order as the scores do, then
// a compaction in index order; bound by reading the scores once where they fit shared memory.
#include <algorithm>

#include "cuda/cuda_ops.h"
#include "cuda/half.cuh"
#include "cuda/mma.cuh"

namespace offload::cuda {
namespace {

struct ScoresCall {
  const void *q = nullptr, *keys = nullptr;
  float* out = nullptr;
  int64_t q_row = 0, q_head = 0, key_row = 0, out_row = 0;  // strides, in elements
  int64_t first = 0;
  int32_t rows = 0, heads = 0, n = 0, ratio = 1;
  float scale = 1;

  // Blocks that are complete at a row.
  __device__ int complete(int row) const { return static_cast<int>((first + row + 1) / ratio); }
};

// --- scores in FMAs ---

constexpr int kFmaWarps = 4, kFmaHeads = 4;
constexpr int kFmaKeys = 16 * kFmaWarps;  // per block of threads: two per quad of lanes

// grid (rows, keys). Lane (g, t) of a warp has 8 of every 32 dimensions of keys g and g + 8; shared memory the row's
// queries, kFmaHeads at a time.
template <typename T, bool kVector>
__global__ void __launch_bounds__(kFmaWarps* kWarp) scores_fma_kernel(const ScoresCall a) {
  after_previous();
  extern __shared__ float4 memory[];
  float* q = reinterpret_cast<float*>(memory);  // [kFmaHeads][width]
  const int row = static_cast<int>(blockIdx.x), complete = a.complete(row), thread = static_cast<int>(threadIdx.x);
  const int begin = static_cast<int>(blockIdx.y) * kFmaKeys;
  if (begin >= complete) return;
  const int width = (a.n + kWarp - 1) / kWarp * kWarp, quad = thread % 4;
  const int low = begin + thread / kWarp * 16 + thread % kWarp / 4, high = low + 8;
  const T* keys = static_cast<const T*>(a.keys);
  float total[2] = {};
  for (int head = 0; head < a.heads; head += kFmaHeads) {
    __syncthreads();
    for (int i = thread; i < kFmaHeads * width; i += kFmaWarps * kWarp) {
      const int h = head + i / width, d = i % width;
      const T* from = static_cast<const T*>(a.q) + row * a.q_row + h * a.q_head + d;
      q[i] = h < a.heads && d < a.n ? load_float(from) : 0.0f;
    }
    __syncthreads();
    float sums[kFmaHeads][2] = {};
    for (int d = 8 * quad; d < width; d += kWarp) {
      float x[8], y[8];
      load_piece<kVector>(keys + low * a.key_row + d, low < complete ? a.n - d : 0, x);
      load_piece<kVector>(keys + high * a.key_row + d, high < complete ? a.n - d : 0, y);
#pragma unroll
      for (int h = 0; h < kFmaHeads; ++h) {
        const float4* from = reinterpret_cast<const float4*>(q + h * width + d);
        const float4 q0 = from[0], q1 = from[1];
        const float w[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums[h][0] = fmaf(w[j], x[j], sums[h][0]);
          sums[h][1] = fmaf(w[j], y[j], sums[h][1]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kFmaHeads; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sums[h][i];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        total[i] += fmaxf(0.0f, sum);
      }
  }
  float* out = a.out + row * a.out_row;
  if (quad == 0 && low < complete) out[low] = total[0] * a.scale;
  if (quad == 1 && high < complete) out[high] = total[1] * a.scale;
}

// --- scores on tensor cores ---

constexpr int kMmaWarps = 8, kMmaHeads = 4, kMmaRows = 16, kMmaDims = 128;
constexpr int kMmaKeys = 32 * kMmaWarps;   // per block of threads
constexpr int kRowTiles = 4;               // of kMmaRows rows, per block of threads
constexpr int kPieces = kMmaDims / 32;     // of a key
constexpr int kMmaStride = kMmaDims + 32;  // of a query in shared memory: rows 64 bytes apart in the banks

struct MmaQueries {
  alignas(16) uint16_t q[kMmaHeads][kMmaRows][kMmaStride];  // BF16, or FP16 times a power of two
  float inverse[kMmaHeads][kMmaRows];                       // of that power
};

// d += a b over 16 dimensions. Half: FP16 operands, in two steps of 8.
template <bool kHalf>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kHalf) {
    mma_f16_1688(d, {a[0], a[1]}, b[0]);
    mma_f16_1688(d, {a[2], a[3]}, b[1]);
  } else {
    mma_bf16_16816(d, a, b);
  }
}

// grid (keys, rows). Lane (g, t) of a warp has dimensions 32 j + 8 t .. + 7 of the keys that are column g of its four
// tiles: the order of the summed dimensions is free, and so is that of the columns. They are laid so that lanes t of a
// row store neighbouring scores.
template <bool kHalf>
class ScoresMma {
 public:
  __device__ ScoresMma(const ScoresCall& a, MmaQueries& shared)
      : a_(a),
        s_(shared),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4),
        block_begin_(static_cast<int>(blockIdx.x) * kMmaKeys),
        begin_(block_begin_ + static_cast<int>(threadIdx.x) / kWarp * 32) {}

  __device__ void run() {
    const int first_row = static_cast<int>(blockIdx.y) * kRowTiles * kMmaRows;
    const int last_row = min(first_row + kRowTiles * kMmaRows, a_.rows) - 1;
    if (block_begin_ >= a_.complete(last_row)) return;
    load_keys(a_.complete(last_row));
    for (int row = first_row; row <= last_row; row += kMmaRows) {
      if (block_begin_ >= a_.complete(min(row + kMmaRows - 1, last_row))) continue;
      float sums[4][4] = {};
      for (int head = 0; head < a_.heads; head += kMmaHeads) {
        __syncthreads();
        stage_queries(row, head);
        __syncthreads();
        for (int h = 0; h < min(kMmaHeads, a_.heads - head); ++h) add_head(h, sums);
      }
      store(row + g_, sums, 0);
      store(row + g_ + 8, sums, 2);
    }
  }

 private:
  // The key of column `column` of tile `tile`.
  __device__ int key_of(int tile, int column) const { return begin_ + column / 2 + 4 * (2 * tile + column % 2); }

  __device__ void load_keys(int complete) {
    const bf16* keys = static_cast<const bf16*>(a_.keys);
    float inverse[4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int key = key_of(tile, g_);
      uint32_t most = 0;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int d = 32 * j + 8 * t_;
        keys_[tile][j] = key < complete && d < a_.n ? __ldg(reinterpret_cast<const uint4*>(keys + key * a_.key_row + d))
                                                    : make_uint4(0, 0, 0, 0);
        most = largest_bits(keys_[tile][j], most);
      }
      if constexpr (kHalf) {
        most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
        most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
        const HalfScale scale(most);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) keys_[tile][j] = half_pairs(keys_[tile][j], scale.factor);
        inverse[tile] = scale.inverse;
      }
    }
    if constexpr (kHalf) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) inverse_[tile][i] = __shfl_sync(kAllLanes, inverse[tile], 4 * (2 * t_ + i));
    }
  }

  // 16 lanes take a query, a piece of 8 dimensions each.
  __device__ void stage_queries(int row, int head) {
    constexpr int kLanes = kMmaDims / 8;
    const bf16* q = static_cast<const bf16*>(a_.q);
    const int piece = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x) / kLanes; i < kMmaHeads * kMmaRows; i += kMmaWarps * kWarp / kLanes) {
      const int h = i / kMmaRows, r = i % kMmaRows;
      const bool there = head + h < a_.heads && row + r < a_.rows && 8 * piece < a_.n;
      const bf16* from = q + (row + r) * a_.q_row + (head + h) * a_.q_head + 8 * piece;
      uint4 x = there ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
      if constexpr (kHalf) {
        uint32_t most = largest_bits(x, 0);
#pragma unroll
        for (int width = kLanes / 2; width > 0; width /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, width));
        const HalfScale scale(most);
        x = half_pairs(x, scale.factor);
        if (piece == 0) s_.inverse[h][r] = scale.inverse;
      }
      *reinterpret_cast<uint4*>(&s_.q[h][r][8 * piece]) = x;
    }
  }

  // sums += max(0, q . k) of one head.
  __device__ void add_head(int h, float (&sums)[4][4]) const {
    float d[4][4] = {};
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint4 x = *reinterpret_cast<const uint4*>(&s_.q[h][g_][32 * j + 8 * t_]);
      const uint4 y = *reinterpret_cast<const uint4*>(&s_.q[h][g_ + 8][32 * j + 8 * t_]);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const uint4& key = keys_[tile][j];
        multiply<kHalf>(d[tile], {x.x, y.x, x.y, y.y}, {key.x, key.y});
        multiply<kHalf>(d[tile], {x.z, y.z, x.w, y.w}, {key.z, key.w});
      }
    }
    const float low = kHalf ? s_.inverse[h][g_] : 1.0f, high = kHalf ? s_.inverse[h][g_ + 8] : 1.0f;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float dot = kHalf ? d[tile][i] * (i < 2 ? low : high) : d[tile][i];
        sums[tile][i] += fmaxf(0.0f, kHalf ? dot * inverse_[tile][i % 2] : dot);
      }
  }

  // The row's two columns of each tile, sums[tile][at] and the next.
  __device__ void store(int row, const float (&sums)[4][4], int at) const {
    if (row >= a_.rows) return;
    const int complete = a_.complete(row);
    float* out = a_.out + row * a_.out_row;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = key_of(tile, 2 * t_ + i);
        if (key < complete) out[key] = sums[tile][at + i] * a_.scale;
      }
  }

  const ScoresCall& a_;
  MmaQueries& s_;
  const int g_, t_, block_begin_, begin_;
  uint4 keys_[4][kPieces];
  float inverse_[4][2] = {};  // of the power of two in the keys of columns 2 t and 2 t + 1
};

template <bool kHalf>
__global__ void __launch_bounds__(kMmaWarps* kWarp, 2) scores_mma_kernel(const ScoresCall a) {
  __shared__ MmaQueries shared;
  ScoresMma<kHalf>(a, shared).run();
}

}  // namespace

int64_t CudaOps::scratch_bytes(const BlockScoresArgs&) const {
  return 0;
}

void CudaOps::execute(const BlockScoresArgs& a) {
  const int64_t rows = a.q.dim(0), n = a.q.dim(2), blocks = (a.first + rows) / a.ratio;
  if (rows == 0 || blocks == 0) return;
  ScoresCall call;
  call.q = a.q.data(), call.keys = a.keys.data(), call.out = data_of<float>(a.out);
  call.q_row = a.q.stride(0), call.q_head = a.q.stride(1);
  call.key_row = a.keys.stride(0), call.out_row = a.out.stride(0);
  call.first = a.first;
  call.rows = static_cast<int32_t>(rows), call.heads = static_cast<int32_t>(a.q.dim(1));
  call.n = static_cast<int32_t>(n), call.ratio = static_cast<int32_t>(a.ratio);
  call.scale = a.scale;
  const bool are_bf16 = a.q.dtype() == DType::bf16 && a.keys.dtype() == DType::bf16;
  if (are_bf16 && rows > kCanonicalRowsMax && n <= kMmaDims && in_vectors(a.q) && in_vectors(a.keys)) {
    const dim3 grid(blocks_for(blocks, kMmaKeys), blocks_for(rows, kRowTiles * kMmaRows));
    const auto kernel = caps_.has_bf16_mma() ? scores_mma_kernel<false> : scores_mma_kernel<true>;
    return launch(kernel, grid, dim3(kMmaWarps * kWarp), 0, stream_, call);
  }
  OFL_ASSERT(a.q.dtype() == a.keys.dtype() && n <= 4096);  // the queries of kFmaHeads heads fill 64 KiB
  const int64_t shared_bytes = kFmaHeads * ((n + kWarp - 1) / kWarp * kWarp) * int64_t{sizeof(float)};
  with_float_type(a.keys.dtype(), [&](auto element) {
    using T = decltype(element);
    const auto kernel = in_vectors(a.keys) ? scores_fma_kernel<T, true> : scores_fma_kernel<T, false>;
    const dim3 grid(static_cast<unsigned>(rows), blocks_for(blocks, kFmaKeys));
    launch_early(kernel, grid, dim3(kFmaWarps * kWarp), shared_bytes, stream_, call);
  });
}

namespace {

// --- selection ---

struct TopkCall {
  const float* scores = nullptr;
  int32_t *blocks = nullptr, *counts = nullptr;
  int64_t scores_row = 0, blocks_row = 0;  // strides, in elements
  int64_t first = 0;
  int32_t budget = 0, ratio = 1;
  bool stages = false;  // whether shared memory holds a row's keys
};

// Orders as the score; -0 equals +0. A NaN is below every number.
__device__ inline uint32_t order_bits(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kTopkWarpsMost = 32;

struct TopkShared {
  int digits[2][kTopkWarpsMost][kDigits];  // elements of each digit in a warp's part, by the parity of the pass
  int above[kTopkWarpsMost], equal[kTopkWarpsMost];
  unsigned long long best[kTopkWarpsMost];
  int lowest[kTopkWarpsMost];
};

// A row of one block of threads. Each warp has a contiguous part of the row, its lanes every 32nd element of that.
class RowSelection {
 public:
  __device__ RowSelection(const TopkCall& a, TopkShared& shared, uint32_t* memory)
      : a_(a),
        s_(shared),
        memory_(memory),
        row_(static_cast<int>(blockIdx.x)),
        scores_(a.scores + row_ * a.scores_row),
        complete_(static_cast<int>((a.first + row_ + 1) / a.ratio)),
        warps_(static_cast<int>(blockDim.x) / kWarp),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int part = (complete_ + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x) * kWarp;
    begin_ = min(warp_ * part, complete_);
    end_ = min(begin_ + part, complete_);
  }

  __device__ void run() {
    const int count = min(a_.budget, complete_);
    int32_t* blocks = a_.blocks + row_ * a_.blocks_row;
    if (threadIdx.x == 0) a_.counts[row_] = count;
    if (complete_ <= a_.budget) {
      for (int b = static_cast<int>(threadIdx.x); b < complete_; b += static_cast<int>(blockDim.x)) blocks[b] = b;
      return;
    }
    if (stage()) {
      choose_one_by_one(count);
      compact(
          blocks, 0, [&](int i) { return is_taken(i); }, [](int) { return false; });
      return;
    }
    int ties = count;
    const uint32_t threshold = find_threshold(ties);
    compact(
        blocks, ties, [&](int i) { return key(i) > threshold; }, [&](int i) { return key(i) == threshold; });
  }

 private:
  __device__ uint32_t key(int i) const { return a_.stages ? memory_[i] : order_bits(scores_[i]); }

  // Fills shared memory where the keys fit; whether there is a NaN among the scores.
  __device__ bool stage() {
    int has_nan = 0;
    for (int i = static_cast<int>(threadIdx.x); i < complete_; i += static_cast<int>(blockDim.x)) {
      const uint32_t bits = order_bits(scores_[i]);
      has_nan |= bits == 0;
      if (a_.stages) memory_[i] = bits;
    }
    return __syncthreads_or(has_nan) != 0;
  }

  // Elements of this warp's part by their digit at `shift`, those whose higher bits are `prefix`; of digit d in lane d.
  __device__ int count_digits(uint32_t prefix, uint32_t mask, int shift) const {
    constexpr int kRound = 255 * kWarp;  // a lane counts in bytes
    int total = 0;
    for (int begin = begin_; begin < end_; begin += kRound) {
      uint64_t low = 0, high = 0;  // digits 0..7 and 8..15
      for (int i = begin + lane_; i < min(begin + kRound, end_); i += kWarp) {
        const uint32_t bits = key(i);
        if ((bits & mask) != prefix) continue;
        const uint32_t digit = bits >> shift & (kDigits - 1);
        const uint64_t one = uint64_t{1} << 8 * (digit & 7);
        if (digit < 8)
          low += one;
        else
          high += one;
      }
      total += digit_of_lane(low, high);
    }
    return total;
  }

  // Sums bytes over the warp; lane d gets that of digit d.
  __device__ int digit_of_lane(uint64_t low, uint64_t high) const {
    constexpr uint64_t kEven = 0x00ff00ff00ff00ffu;  // a sum of 32 bytes needs 16 bits
    uint64_t sums[4] = {low & kEven, low >> 8 & kEven, high & kEven, high >> 8 & kEven};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int width = kWarp / 2; width > 0; width /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], width);
    const uint64_t even = lane_ < 8 ? sums[0] : sums[2], odd = lane_ < 8 ? sums[1] : sums[3];
    const uint64_t fields = lane_ % 2 == 0 ? even : odd;
    return lane_ < kDigits ? static_cast<int>(fields >> 16 * (lane_ % 8 / 2) & 0xffff) : 0;
  }

  // The key of the element in place `wanted` from the top; `wanted` becomes how many elements of that key are wanted.
  // May stop at a lower key when all elements from it up are wanted.
  __device__ uint32_t find_threshold(int& wanted) {
    uint32_t prefix = 0, mask = 0;
    int parity = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits, parity ^= 1) {
      const int mine = count_digits(prefix, mask, shift);
      if (lane_ < kDigits) s_.digits[parity][warp_][lane_] = mine;
      __syncthreads();
      int count = 0;
      if (lane_ < kDigits)
        for (int w = 0; w < warps_; ++w) count += s_.digits[parity][w][lane_];
      int from_here = count;  // elements of this digit and higher ones
#pragma unroll
      for (int width = 1; width < kDigits; width *= 2) {
        const int more = __shfl_down_sync(kAllLanes, from_here, width);
        if (lane_ + width < kDigits) from_here += more;
      }
      const unsigned enough = __ballot_sync(kAllLanes, lane_ < kDigits && from_here >= wanted);
      const int digit = 31 - __clz(static_cast<int>(enough));
      const int in_digit = __shfl_sync(kAllLanes, count, digit);
      wanted -= __shfl_sync(kAllLanes, from_here, digit) - in_digit;
      prefix |= static_cast<uint32_t>(digit) << shift;
      mask |= static_cast<uint32_t>(kDigits - 1) << shift;
      if (wanted == in_digit) break;
    }
    return prefix;
  }

  // Writes the indices of all elements that are `above` and the first `ties` that are `equal`, ascending.
  template <typename Above, typename Equal>
  __device__ void compact(int32_t* blocks, int ties, const Above& above, const Equal& equal) {
    int above_count = 0, equal_count = 0;
    for (int i = begin_ + lane_; i - lane_ < end_; i += kWarp) {
      above_count += __popc(__ballot_sync(kAllLanes, i < end_ && above(i)));
      equal_count += __popc(__ballot_sync(kAllLanes, i < end_ && equal(i)));
    }
    if (lane_ == 0) s_.above[warp_] = above_count, s_.equal[warp_] = equal_count;
    __syncthreads();
    int above_before = 0, equal_before = 0;
    for (int w = 0; w < warp_; ++w) above_before += s_.above[w], equal_before += s_.equal[w];
    const unsigned lower_lanes = (1u << lane_) - 1;
    for (int i = begin_ + lane_; i - lane_ < end_; i += kWarp) {
      const bool is_above = i < end_ && above(i), is_equal = i < end_ && equal(i);
      const unsigned aboves = __ballot_sync(kAllLanes, is_above), equals = __ballot_sync(kAllLanes, is_equal);
      const int rank = equal_before + __popc(equals & lower_lanes);
      if (is_above || (is_equal && rank < ties))
        blocks[above_before + __popc(aboves & lower_lanes) + min(rank, ties)] = i;
      above_before += __popc(aboves);
      equal_before += __popc(equals);
    }
  }

  // --- with NaN among the scores: the definition, step by step. A NaN compares with nothing, so it is chosen only
  // where every lower block has been, and it keeps its place against those behind it. ---

  __device__ bool is_taken(int i) const {
    return (memory_[taken_at() + i / kWarp] >> i % kWarp & 1) != 0;
  }
  __device__ int taken_at() const {
    return a_.stages ? complete_ : 0;
  }

  __device__ void choose_one_by_one(int count) {
    for (int i = static_cast<int>(threadIdx.x); i <= complete_ / kWarp; i += static_cast<int>(blockDim.x))
      memory_[taken_at() + i] = 0;
    for (int s = 0; s < count; ++s) {
      __syncthreads();
      unsigned long long best = 0;  // key and index, so that the lower of equals is the larger
      int lowest = complete_;
      for (int i = static_cast<int>(threadIdx.x); i < complete_; i += static_cast<int>(blockDim.x)) {
        if (is_taken(i)) continue;
        lowest = min(lowest, i);
        best = max(best, static_cast<unsigned long long>(key(i)) << 32 | (0xffffffffu - static_cast<uint32_t>(i)));
      }
      for (int width = kWarp / 2; width > 0; width /= 2) {
        best = max(best, __shfl_xor_sync(kAllLanes, best, width));
        lowest = min(lowest, __shfl_xor_sync(kAllLanes, lowest, width));
      }
      if (lane_ == 0) s_.best[warp_] = best, s_.lowest[warp_] = lowest;
      __syncthreads();
      if (threadIdx.x != 0) continue;
      for (int w = 1; w < warps_; ++w) best = max(best, s_.best[w]), lowest = min(lowest, s_.lowest[w]);
      const int chosen = key(lowest) == 0 ? lowest : static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
      memory_[taken_at() + chosen / kWarp] |= 1u << chosen % kWarp;
    }
    __syncthreads();
  }

  const TopkCall& a_;
  TopkShared& s_;
  uint32_t* memory_;  // keys of the row where they are staged, then room for a bit per element
  const int row_;
  const float* scores_;
  const int complete_, warps_, warp_, lane_;
  int begin_, end_;
};

__global__ void __launch_bounds__(kTopkWarpsMost* kWarp) topk_kernel(const TopkCall a) {
  extern __shared__ float4 memory[];
  __shared__ TopkShared shared;
  after_previous();
  RowSelection(a, shared, reinterpret_cast<uint32_t*>(memory)).run();
}

}  // namespace

int64_t CudaOps::scratch_bytes(const BlockTopkArgs&) const {
  return 0;
}

void CudaOps::execute(const BlockTopkArgs& a) {
  constexpr int64_t kStagedMost = 10 << 10;  // keys: 40 KiB
  const int64_t rows = a.counts.dim(0), blocks = (a.first + rows) / a.ratio;
  if (rows == 0) return;
  OFL_ASSERT(blocks <= 320 << 10);  // their bits fit 40 KiB
  TopkCall call;
  call.scores = data_of<const float>(a.scores);
  call.blocks = data_of<int32_t>(a.blocks), call.counts = data_of<int32_t>(a.counts);
  call.scores_row = a.scores.stride(0), call.blocks_row = a.blocks.stride(0);
  call.first = a.first;
  call.budget = static_cast<int32_t>(std::min<int64_t>(a.blocks.dim(1), INT32_MAX));
  call.ratio = static_cast<int32_t>(a.ratio);
  call.stages = blocks <= kStagedMost;
  const int64_t words = (call.stages ? blocks : 0) + blocks / kWarp + 1;
  // Many rows fill the device with small blocks of threads; few rows, or long ones, want all threads of one.
  const bool many = rows >= 2 * caps_.multiprocessors && call.stages;
  launch_early(topk_kernel, dim3(static_cast<unsigned>(rows)), dim3(many ? 256 : 1024), words * 4, stream_, call);
}

}  // namespace offload::cuda
