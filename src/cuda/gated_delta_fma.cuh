// The chunked form of the gated delta rule (gated_delta_chunks.cuh) on the FP32 units: for F32, and for BF16 where
// there are no matrix units for it.
//
// delta_prepare_kernel is the first kernel, delta_chunks_kernel the second: a block of threads has one head and 32
// columns, with its part of the state in shared memory. Both are bound by FP32 FMAs and the shared memory that feeds
// them: per chunk and head 1 M FMAs in the first (per key head) and 33 K per column in the second.
#ifndef OFFLOAD_CUDA_GATED_DELTA_FMA_CUH_
#define OFFLOAD_CUDA_GATED_DELTA_FMA_CUH_

#include "cuda/gated_delta_chunks.cuh"

namespace offload::cuda {

// T, then P, each [kDeltaChunk][kDeltaChunk].
inline constexpr int kFmaProductBytes = 2 * kDeltaChunk * kDeltaChunk * static_cast<int>(sizeof(float));

// --- the first kernel ---

inline constexpr int kPrepareThreads = 256;
inline constexpr int kHalfDims = 64;  // of keys and queries in shared memory at a time

struct DeltaPrepareShared {
  // Keys and queries [row][dimension]; then -A of two heads.
  alignas(16) float x[2][kDeltaChunk][kHalfDims + 4];
  RowScales scales;
  RowDecays decays[2];  // of two heads
};

// grid (chunks, key heads).
template <typename T, bool kVector>
class DeltaPrepare {
 public:
  __device__ DeltaPrepare(const DeltaCall& a, const DeltaSegment& segment, DeltaPrepareShared& shared)
      : a_(a),
        segment_(segment),
        s_(shared),
        chunk_(static_cast<int>(blockIdx.x)),
        key_head_(static_cast<int>(blockIdx.y)),
        rows_(segment.rows(chunk_)),
        thread_(static_cast<int>(threadIdx.x)),
        x_(thread_ % 16),
        y_(thread_ / 16) {}

  __device__ void run() {
    find_scales();
    __syncthreads();
    for (int d = 0; d < a_.key_dim; d += kHalfDims) {
      stage(d);
      __syncthreads();
      multiply();
      __syncthreads();
    }
    const int group = a_.heads / a_.key_heads;
    for (int i = 0; i < group; i += 2) {
      const int head = key_head_ * group + i, heads = min(2, group - i);
      const int warp = thread_ / kWarp;
      if (warp < heads) s_.decays[warp].find<T>(a_, segment_, chunk_, head + warp, s_.scales);
      __syncthreads();
      for (int slot = 0; slot < heads; ++slot) weigh(head + slot, slot);
      __syncthreads();
      if (thread_ / kDeltaChunk < heads) invert(head + thread_ / kDeltaChunk, thread_ / kDeltaChunk);
      __syncthreads();
    }
  }

 private:
  __device__ const T* key_row(int row) const {
    return static_cast<const T*>(a_.qkv) + (segment_.first_row(chunk_) + row) * a_.qkv_row +
           (a_.key_heads + key_head_) * a_.key_dim;
  }
  __device__ const T* query_row(int row) const { return key_row(row) - a_.key_heads * a_.key_dim; }

  __device__ void find_scales() const {
    for (int row = thread_ / kWarp; row < kDeltaChunk; row += kPrepareThreads / kWarp) {
      const bool there = row < rows_;
      const float key = there ? norm_scale(key_row(row), a_.key_dim, 1.0f) : 0.0f;
      const float query = there ? norm_scale(query_row(row), a_.key_dim, a_.query_scale()) : 0.0f;
      if (thread_ % kWarp == 0) s_.scales.key[row] = key, s_.scales.query[row] = query;
    }
  }

  // Dimensions [first, first + kHalfDims) of the normalised keys and queries.
  __device__ void stage(int first) const {
    constexpr int kPieces = kHalfDims / 8;
    for (int i = thread_; i < 2 * kDeltaChunk * kPieces; i += kPrepareThreads) {
      const int which = i / (kDeltaChunk * kPieces), row = i / kPieces % kDeltaChunk, d = i % kPieces * 8;
      float piece[8];
      load_piece<kVector>((which == 0 ? key_row(row) : query_row(row)) + first + d,
                          row < rows_ ? a_.key_dim - first - d : 0, piece);
      const float scale = which == 0 ? s_.scales.key[row] : s_.scales.query[row];
      float* to = &s_.x[which][row][d];
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] = piece[j] * scale;
    }
  }

  // Thread (x, y) has the products of rows y + 16 i with rows x + 16 l.
  __device__ void multiply() {
#pragma unroll 2
    for (int d = 0; d < kHalfDims; d += 4) {
      float4 right[4];
#pragma unroll
      for (int l = 0; l < 4; ++l) right[l] = load4(&s_.x[0][x_ + 16 * l][d]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 key = load4(&s_.x[0][y_ + 16 * i][d]), query = load4(&s_.x[1][y_ + 16 * i][d]);
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          add_dot(keys_[i][l], key, right[l]);
          add_dot(queries_[i][l], query, right[l]);
        }
      }
    }
  }
  __device__ static void add_dot(float& sum, const float4& x, const float4& y) {
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
    sum = fmaf(x.z, y.z, sum);
    sum = fmaf(x.w, y.w, sum);
  }

  // P to memory, -A to shared memory.
  __device__ void weigh(int head, int slot) const {
    float* p = segment_.products_of<float>(a_, chunk_, head) + kDeltaChunk * kDeltaChunk;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const int row = y_ + 16 * i, column = x_ + 16 * l;
        const float decay = s_.decays[slot].between(row, column);
        p[row * kDeltaChunk + column] = queries_[i][l] * decay;
        s_.x[slot][row][column] = column < row ? -s_.decays[slot].beta[row] * keys_[i][l] * decay : 0.0f;
      }
  }

  // T by forward substitution, a column per thread.
  __device__ void invert(int head, int slot) const {
    const int column = thread_ % kDeltaChunk;
    float* to = segment_.products_of<float>(a_, chunk_, head) + column;
    float x[kDeltaChunk];
    substitute_column(s_.x[slot], column, x);
#pragma unroll
    for (int i = 0; i < kDeltaChunk; ++i) to[i * kDeltaChunk] = x[i];
  }

  const DeltaCall& a_;
  const DeltaSegment& segment_;
  DeltaPrepareShared& s_;
  const int chunk_, key_head_, rows_, thread_, x_, y_;
  float keys_[4][4] = {}, queries_[4][4] = {};
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kPrepareThreads) delta_prepare_kernel(const DeltaCall a, const DeltaSegment segment) {
  __shared__ DeltaPrepareShared shared;
  DeltaPrepare<T, kVector>(a, segment, shared).run();
}

// --- the second kernel ---

inline constexpr int kChunkThreads = 128;

struct DeltaChunksShared {
  static constexpr int kRowStride = kKeyDims + 4;
  alignas(16) float x[2 * kDeltaChunk * kProductStride];  // queries or keys [kDeltaChunk][kRowStride], or T and P
  alignas(16) float state[kKeyDims][kDeltaColumns];       // M
  alignas(16) float values[kDeltaChunk][kDeltaColumns];   // beta v - beta exp(G) K M, then V'
  float factors[kDeltaFactors][kDeltaChunk];
};
static_assert(2 * kDeltaChunk * kProductStride >= kDeltaChunk * DeltaChunksShared::kRowStride);
static_assert(sizeof(DeltaChunksShared) <= (64 << 10));

// grid (slices of kDeltaColumns value columns, heads). A thread has columns 4 (lane % 8) .. + 3; of a chunk's rows
// 16 warp + lane / 8 + 4 i, of the state's rows 32 warp + 8 (lane / 8) .. + 7.
template <typename T, bool kVector>
class DeltaChunks {
 public:
  __device__ DeltaChunks(const DeltaCall& a, const DeltaSegment& segment, DeltaChunksShared& shared)
      : a_(a),
        segment_(segment),
        s_(shared),
        head_(static_cast<int>(blockIdx.y)),
        key_head_(head_ / (a.heads / a.key_heads)),
        slice_(static_cast<int>(blockIdx.x) * kDeltaColumns),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / kWarp),
        line_(thread_ % kWarp / 8),
        column_(thread_ % 8 * 4) {}

  __device__ void run() {
    move_state(false);
    const int chunks = segment_.chunks();
    load_rows(0, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      float out[4][4] = {};
      copy_factors(chunk);
      __syncthreads();
      store_rows(s_.factors[kQueryFactor]);
      load_rows(chunk, a_.key_heads);
      __syncthreads();
      multiply(s_.x, DeltaChunksShared::kRowStride, s_.state, a_.key_dim, out);  // exp(G) Q M
      __syncthreads();
      store_rows(s_.factors[kKeyInFactor]);
      __syncthreads();
      read_state(chunk);
      __syncthreads();
      copy_products(chunk);
      __syncthreads();
      solve();
      load_rows(chunk, a_.key_heads);
      __syncthreads();
      multiply(s_.x + kDeltaChunk * kProductStride, kProductStride, s_.values, 16 * (warp_ + 1), out);  // + P V'
      store_out(chunk, out);
      __syncthreads();
      store_rows(s_.factors[kKeyOutFactor]);
      const float decay = s_.factors[kDecayFactor][0];
      if (chunk + 1 < chunks) load_rows(chunk + 1, 0);
      __syncthreads();
      write_state(decay, segment_.rows(chunk));
    }
    __syncthreads();
    move_state(true);
  }

 private:
  __device__ int row_of(int i) const { return 16 * warp_ + line_ + 4 * i; }
  __device__ const T* qkv_row(int chunk, int row) const {
    return static_cast<const T*>(a_.qkv) + (segment_.first_row(chunk) + row) * a_.qkv_row;
  }

  __device__ void move_state(bool out) const {
    float* state = a_.state + int64_t{head_} * a_.key_dim * a_.value_dim + slice_;
    for (int i = thread_; i < kKeyDims * kDeltaColumns; i += kChunkThreads) {
      const int d = i / kDeltaColumns, c = i % kDeltaColumns;
      const bool there = d < a_.key_dim && slice_ + c < a_.value_dim;
      if (!out)
        s_.state[d][c] = there ? state[int64_t{d} * a_.value_dim + c] : 0.0f;
      else if (there)
        state[int64_t{d} * a_.value_dim + c] = s_.state[d][c];
    }
  }

  __device__ void copy_factors(int chunk) const {
    const float* from = segment_.factors_of(a_, chunk, head_);
    float* to = &s_.factors[0][0];
    for (int i = thread_; i < kDeltaFactors * kDeltaChunk; i += kChunkThreads) to[i] = __ldg(from + i);
  }

  // Starts loading the queries (first_head 0) or keys (first_head key_heads) of a chunk.
  __device__ void load_rows(int chunk, int first_head) {
    const int begin = (first_head + key_head_) * a_.key_dim, rows = segment_.rows(chunk);
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      const int row = (thread_ + i * kChunkThreads) / (kKeyDims / 8), d = thread_ % (kKeyDims / 8) * 8;
      pieces_[i].template load<kVector>(qkv_row(chunk, row) + begin + d, row < rows ? a_.key_dim - d : 0);
    }
  }
  // ... and puts them into shared memory, row i times factors[i].
  __device__ void store_rows(const float (&factors)[kDeltaChunk]) const {
#pragma unroll
    for (int i = 0; i < kRowPieces; ++i) {
      const int row = (thread_ + i * kChunkThreads) / (kKeyDims / 8), d = thread_ % (kKeyDims / 8) * 8;
      float x[8];
      pieces_[i].widen(x);
      const float f = factors[row];
      float4* to = reinterpret_cast<float4*>(s_.x + row * DeltaChunksShared::kRowStride + d);
      to[0] = make_float4(x[0] * f, x[1] * f, x[2] * f, x[3] * f);
      to[1] = make_float4(x[4] * f, x[5] * f, x[6] * f, x[7] * f);
    }
  }

  __device__ void copy_products(int chunk) const {
    const float4* from = reinterpret_cast<const float4*>(segment_.products_of<float>(a_, chunk, head_));
#pragma unroll
    for (int i = 0; i < 2 * kDeltaChunk * kDeltaChunk / 4 / kChunkThreads; ++i) {
      const int at = thread_ + i * kChunkThreads, row = at / (kDeltaChunk / 4), column = at % (kDeltaChunk / 4) * 4;
      *reinterpret_cast<float4*>(s_.x + row * kProductStride + column) = __ldg(from + at);
    }
  }

  // sums[i] += x[row_of(i)][0, depth) b; b [depth][columns].
  __device__ void multiply(const float* x, int stride, const float (*b)[kDeltaColumns], int depth,
                           float (&sums)[4][4]) const {
#pragma unroll 2
    for (int d = 0; d < depth; d += 4) {
      const float4 b0 = load4(&b[d][column_]), b1 = load4(&b[d + 1][column_]), b2 = load4(&b[d + 2][column_]),
                   b3 = load4(&b[d + 3][column_]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 a = load4(x + row_of(i) * stride + d);
        add_scaled(sums[i], a.x, b0);
        add_scaled(sums[i], a.y, b1);
        add_scaled(sums[i], a.z, b2);
        add_scaled(sums[i], a.w, b3);
      }
    }
  }
  __device__ static void add_scaled(float (&sums)[4], float factor, const float4& x) {
    sums[0] = fmaf(factor, x.x, sums[0]);
    sums[1] = fmaf(factor, x.y, sums[1]);
    sums[2] = fmaf(factor, x.z, sums[2]);
    sums[3] = fmaf(factor, x.w, sums[3]);
  }

  // values = beta v - beta exp(G) K M
  __device__ void read_state(int chunk) {
    float v[4][4], product[4][4] = {};
    const int begin = 2 * a_.key_heads * a_.key_dim + head_ * a_.value_dim + slice_ + column_;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_piece<kVector>(qkv_row(chunk, row_of(i)) + begin,
                          row_of(i) < segment_.rows(chunk) ? a_.value_dim - slice_ - column_ : 0, v[i]);
    multiply(s_.x, DeltaChunksShared::kRowStride, s_.state, a_.key_dim, product);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float beta = s_.factors[kBetaFactor][row_of(i)];
#pragma unroll
      for (int c = 0; c < 4; ++c) s_.values[row_of(i)][column_ + c] = fmaf(beta, v[i][c], -product[i][c]);
    }
  }

  // values = T values
  __device__ void solve() {
    float solved[4][4] = {};
    multiply(s_.x, kProductStride, s_.values, 16 * (warp_ + 1), solved);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<float4*>(&s_.values[row_of(i)][column_]) =
          make_float4(solved[i][0], solved[i][1], solved[i][2], solved[i][3]);
  }

  __device__ void store_out(int chunk, const float (&out)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row_of(i) >= segment_.rows(chunk)) continue;
      T* to = static_cast<T*>(a_.out) + (segment_.first_row(chunk) + row_of(i)) * a_.out_row + head_ * a_.value_dim +
              slice_ + column_;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (slice_ + column_ + c < a_.value_dim) store_float(to + c, out[i][c]);
    }
  }

  // M <- decay M + sum over rows of the scaled keys times V'
  __device__ void write_state(float decay, int rows) const {
    const int d = 32 * warp_ + 8 * line_;
    float sums[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 m = load4(&s_.state[d + i][column_]);
      sums[i][0] = decay * m.x, sums[i][1] = decay * m.y, sums[i][2] = decay * m.z, sums[i][3] = decay * m.w;
    }
#pragma unroll 4
    for (int l = 0; l < rows; ++l) {
      const float* k = s_.x + l * DeltaChunksShared::kRowStride + d;
      const float4 low = load4(k), high = load4(k + 4), v = load4(&s_.values[l][column_]);
      const float keys[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) add_scaled(sums[i], keys[i], v);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<float4*>(&s_.state[d + i][column_]) =
          make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  }

  static constexpr int kRowPieces = kDeltaChunk * kKeyDims / 8 / kChunkThreads;

  const DeltaCall& a_;
  const DeltaSegment& segment_;
  DeltaChunksShared& s_;
  const int head_, key_head_, slice_, thread_, warp_, line_, column_;
  RawPiece<T> pieces_[kRowPieces];
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kChunkThreads, 2) delta_chunks_kernel(const DeltaCall a, const DeltaSegment segment) {
  extern __shared__ float4 memory[];
  DeltaChunks<T, kVector>(a, segment, *reinterpret_cast<DeltaChunksShared*>(memory)).run();
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GATED_DELTA_FMA_CUH_
