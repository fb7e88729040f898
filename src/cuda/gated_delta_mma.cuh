// The chunked form of the gated delta rule (gated_delta_chunks.cuh) on BF16 matrix units, for BF16 keys, queries and
// values.
//
// Keys and queries are exact operands: their scales and factors go to the other side of a product or to its result. But
// rows whose squares overflow, so that their scale is 0, are scaled first: products of them would overflow, too.
// FP32 operands (M, T, P, V') become sums of BF16 numbers: three of them where the result goes on to the state (2^-26
// of an operand is lost), two where it goes to the BF16 output alone (2^-17). Matrix units truncate what they add to a
// sum, so products of lesser numbers that feed the state are summed first or apart.
//
// A warp has 16 value columns of a head, transposed: M^T [16][128] and V'^T [16][64] lie in its registers from chunk to
// chunk as the sums of one product, and as such are the left operand of the next one. Nothing passes between warps; a
// block of four shares keys, queries, values, T and P in shared memory, where copies of the next chunk arrive while
// this one is worked on. Lane l of a warp: g = l / 4, t = l % 4. In a tile of eight columns of such a product (tile j:
// rows 8 j .. of the chunk, or dimensions 8 j ..) it holds of value column g: 8 j + 2 t and the next, then of column g
// + 8.
//
// The second kernel is bound by the sequence of a chunk: 692 products of 16 x 8 x 16 a warp, of which matrix units
// could take one in four clocks, in 11,000 clocks, of them 4,300 for reading M, 1,600 for T, 1,500 for P and the
// output, 1,900 for writing M. A block of 64 columns also gets 66 KiB a chunk, mostly out of the L2 cache. On one H200
// 8,192 rows of 48 heads take 0.74 ms (the FMA kernel: 2.6), the first kernel 0.3 to 0.5 (0.6) by the length of
// segments. The state after these rows is 1.6e-7 off FP64 (the FMA kernels': 3.0e-7), relative, root of mean squares
// (2026-11-30).
#ifndef OFFLOAD_CUDA_GATED_DELTA_MMA_CUH_
#define OFFLOAD_CUDA_GATED_DELTA_MMA_CUH_

#include "cuda/gated_delta_chunks.cuh"
#include "cuda/mma.cuh"

namespace offload::cuda {

inline constexpr int kMmaKeyStride = kKeyDims + 8;  // BF16: 16-byte rows that spread over the banks
inline constexpr int kChunkTiles = kDeltaChunk / 8, kChunkSteps = kDeltaChunk / 16;
inline constexpr int kDimTiles = kKeyDims / 8, kDimSteps = kKeyDims / 16;

// T and P on and below the diagonal as BF16 operands of products with V'^T: planes (terms of a sum, largest first) of
// blocks of 16 x 16, block (band, step) of rows 16 band .. and columns 16 step .., in it four of 8 x 8 by rows.
inline constexpr int kBlockElements = 16 * 16;
inline constexpr int kPlaneElements = kChunkSteps * (kChunkSteps + 1) / 2 * kBlockElements;
inline constexpr int kSolvePlanes = 3, kReadPlanes = 2;  // of T, then of P
inline constexpr int kMmaProductBytes = (kSolvePlanes + kReadPlanes) * kPlaneElements * static_cast<int>(sizeof(bf16));

__device__ inline int block_at(int band, int step) {
  return (band * (band + 1) / 2 + step) * kBlockElements;
}
__device__ inline bf16* planes_of(const DeltaCall& a, const DeltaSegment& segment, int chunk_id, int head) {
  return segment.products_of<bf16>(a, chunk_id, head);
}

// Two neighbours as a sum of kTerms pairs of BF16 numbers, largest first.
template <int kTerms>
__device__ inline void split_pair(float x, float y, uint32_t (&terms)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    terms[i] = round_to_bf16_pair(x, y);
    float rounded_x, rounded_y;
    widen_pair(terms[i], rounded_x, rounded_y);
    x -= rounded_x, y -= rounded_y;
  }
}

// Two neighbouring tiles of sums as left operand of a step of 16.
template <int kTerms>
struct SplitOperand {
  uint32_t words[kTerms][4];

  __device__ SplitOperand(const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t terms[kTerms];
      if (i < 2)
        split_pair(left[2 * i], left[2 * i + 1], terms);
      else
        split_pair(right[2 * i - 4], right[2 * i - 3], terms);
#pragma unroll
      for (int j = 0; j < kTerms; ++j) words[j][i] = terms[j];
    }
  }
};

// The 8 x 8 matrices of two neighbouring tiles of a right operand, [tile][half of the step], from rows that are tiles'
// columns (keys as [dimension][row]) ...
__device__ inline void load_tiles(uint32_t (&b)[4], const bf16* x, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ldmatrix_x4(b, x + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}
// ... or from rows that are the product's depth.
__device__ inline void load_tiles_transposed(uint32_t (&b)[4], const bf16* x, int stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ldmatrix_x4_transposed(b, x + (lane % 8 + lane / 8 % 2 * 8) * stride + lane / 16 * 8);
}
__device__ inline void load_block(uint32_t (&b)[4], const bf16* block) {
  ldmatrix_x4(b, block + static_cast<int>(threadIdx.x) % kWarp * 8);
}
// tiles[0], tiles[1] += a b
__device__ inline void multiply_tiles(float (*tiles)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_bf16_16816(tiles[0], a, {b[0], b[1]});
  mma_bf16_16816(tiles[1], a, {b[2], b[3]});
}

// Starts copying a chunk's rows [kDeltaChunk][kColumns] of BF16 to shared memory, zeros for rows from `rows` on and
// columns from `columns` on; unaligned ones (!kVector) are there on return.
template <bool kVector, int kThreads, int kColumns>
__device__ inline void copy_rows(bf16* to, int stride, const bf16* from, int64_t from_stride, int rows, int columns) {
  const bf16* nowhere = from;
  constexpr int kPieces = kColumns / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kDeltaChunk % kStep == 0);
  const int column = static_cast<int>(threadIdx.x) % kPieces * 8;
  int row = static_cast<int>(threadIdx.x) / kPieces;
  const int64_t step = kStep * from_stride;
  from += row * from_stride + column;
  to += row * stride + column;
#pragma unroll
  for (int i = 0; i < kDeltaChunk / kStep; ++i, row += kStep, from += step, to += kStep * stride) {
    const bool there = row < rows && column < columns;
    if constexpr (kVector) {
      copy_async_16(to, there ? from : nowhere, there);
    } else {
      RawPiece<bf16> piece;
      piece.load<false>(from, there ? columns - column : 0);
      *reinterpret_cast<uint4*>(to) = make_uint4(piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
    }
  }
}

// Whether a scale, or a factor made of one, is of a row that is scaled first: -0, which no other row has.
__device__ inline bool is_scaled_first(float scale) {
  return __float_as_uint(scale) == 0x80000000u;
}
// Eight elements times 0: NaN for what is not finite.
__device__ inline void multiply_by_zero(bf16* x) {
  auto* words = reinterpret_cast<uint32_t*>(x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    widen_pair(words[i], low, high);
    words[i] = round_to_bf16_pair(low * 0.0f, high * 0.0f);
  }
}

// REQUIRES: both aligned to 16 bytes, a multiple of them.
template <int kThreads>
__device__ inline void copy_bytes(void* to, const void* from, int bytes) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kThreads * 16)
    copy_async_16(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, true);
}

// --- the first kernel ---

inline constexpr int kMmaPrepareThreads = 256;
inline constexpr int kPrepareHeads = kMmaPrepareThreads / kDeltaChunk;  // at a time

struct DeltaMmaPrepareShared {
  union {
    alignas(16) bf16 rows[2][kDeltaChunk][kMmaKeyStride];         // keys, queries
    float solutions[kPrepareHeads][kDeltaChunk][kProductStride];  // -A, then T
  };
  RowScales scales;
  RowDecays decays[kPrepareHeads];
};

// grid (chunks, key heads). Warps 0 to 3 have the products of keys with keys, 16 rows each, warps 4 to 7 those of
// queries with keys.
template <bool kVector>
class DeltaMmaPrepare {
 public:
  __device__ DeltaMmaPrepare(const DeltaCall& a, const DeltaSegment& segment, DeltaMmaPrepareShared& shared)
      : a_(a),
        segment_(segment),
        s_(shared),
        chunk_(static_cast<int>(blockIdx.x)),
        key_head_(static_cast<int>(blockIdx.y)),
        thread_(static_cast<int>(threadIdx.x)),
        is_query_(thread_ / kWarp / kChunkSteps),
        band_(thread_ / kWarp % kChunkSteps) {}

  __device__ void run() {
    const int rows = segment_.rows(chunk_), key_columns = a_.key_heads * a_.key_dim;
    const bf16* queries =
        static_cast<const bf16*>(a_.qkv) + segment_.first_row(chunk_) * a_.qkv_row + key_head_ * a_.key_dim;
    for (int i = 0; i < 2; ++i)
      copy_rows<kVector, kMmaPrepareThreads, kKeyDims>(
          &s_.rows[i][0][0], kMmaKeyStride, queries + (i == 0 ? key_columns : 0), a_.qkv_row, rows, a_.key_dim);
    commit_async();
    wait_async<0>();
    __syncthreads();
    find_scales();
    __syncthreads();  // rows are as they are to be multiplied
    multiply();
    const int group = a_.heads / a_.key_heads, warp = thread_ / kWarp, slot = thread_ / kDeltaChunk;
    for (int i = 0; i < group; i += kPrepareHeads) {
      const int head = key_head_ * group + i, heads = min(kPrepareHeads, group - i);
      __syncthreads();  // scales are there, rows and the last heads' solutions were read
      if (warp < heads) s_.decays[warp].find<bf16>(a_, segment_, chunk_, head + warp, s_.scales);
      __syncthreads();
      for (int h = 0; h < heads; ++h) weigh(head + h, h);
      __syncthreads();
      float x[kDeltaChunk];
      if (slot < heads) substitute_column(s_.solutions[slot], thread_ % kDeltaChunk, x);
      __syncthreads();
      if (slot < heads) {
#pragma unroll
        for (int row = 0; row < kDeltaChunk; ++row) s_.solutions[slot][row][thread_ % kDeltaChunk] = x[row];
      }
      __syncthreads();
      for (int h = 0; h < heads; ++h) write_solutions(head + h, h);
    }
  }

 private:
  // Two threads per row of keys or queries, which take pieces of eight in turn.
  __device__ void find_scales() const {
    static_assert(kMmaPrepareThreads == 2 * 2 * kDeltaChunk);
    const int which = thread_ / (2 * kDeltaChunk), row = thread_ / 2 % kDeltaChunk;
    bf16* mine = &s_.rows[which][row][thread_ % 2 * 8];
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < kKeyDims / 16; ++i) {
      const uint4 piece = *reinterpret_cast<const uint4*>(mine + 16 * i);
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x, y;
        widen_pair(words[j], x, y);
        squares[0] = fmaf(x, x, squares[0]);
        squares[1] = fmaf(y, y, squares[1]);
      }
    }
    float sum = squares[0] + squares[1];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    const bool there = row < segment_.rows(chunk_);
    float scale = there ? (which == 0 ? 1.0f : a_.query_scale()) / sqrtf(sum + 1e-6f) : 0.0f;
    if (there && scale == 0) {
      scale = -0.0f;
      for (int i = 0; i < kKeyDims / 16; ++i) multiply_by_zero(mine + 16 * i);
    }
    if (thread_ % 2 == 0) (which == 0 ? s_.scales.key : s_.scales.query)[row] = scale;
  }

  __device__ void multiply() {
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) {
      const int lane = thread_ % kWarp;
      uint32_t a[4];
      ldmatrix_x4(a, &s_.rows[is_query_][16 * band_ + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < kChunkSteps; ++i) {
        if (i > band_) break;
        uint32_t b[4];
        load_tiles(b, &s_.rows[0][16 * i][16 * step], kMmaKeyStride);
        multiply_tiles(&sums_[2 * i], a, b);
      }
    }
  }

  // P to memory, -A to shared memory.
  __device__ void weigh(int head, int slot) const {
    const RowDecays& decays = s_.decays[slot];
    const int g = thread_ % kWarp / 4, t = thread_ % 4;
    bf16* p = planes_of(a_, segment_, chunk_, head) + kSolvePlanes * kPlaneElements;
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      if (tile / 2 > band_) break;
      const int column = 8 * tile + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * band_ + 8 * half + g;
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x[i] = sums_[tile][2 * half + i] * s_.scales.key[column + i] * decays.between(row, column + i);
        if (is_query_) {
          uint32_t terms[kReadPlanes];
          split_pair(x[0] * s_.scales.query[row], x[1] * s_.scales.query[row], terms);
          bf16* to = p + block_at(band_, tile / 2) + (2 * half + tile % 2) * 64 + 8 * g + 2 * t;
#pragma unroll
          for (int i = 0; i < kReadPlanes; ++i) *reinterpret_cast<uint32_t*>(to + i * kPlaneElements) = terms[i];
        } else {
          const float factor = -decays.beta[row] * s_.scales.key[row];
          *reinterpret_cast<float2*>(&s_.solutions[slot][row][column]) = make_float2(x[0] * factor, x[1] * factor);
        }
      }
    }
  }

  // T to memory, eight elements of a row per thread at a time.
  __device__ void write_solutions(int head, int slot) const {
    bf16* to = planes_of(a_, segment_, chunk_, head);
    for (int i = thread_; i < kPlaneElements / 8; i += kMmaPrepareThreads) {
      const int block = i / 32, band = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
      const int row = 16 * band + i / 16 % 2 * 8 + i % 8, column = 16 * (block - band * (band + 1) / 2) + i / 8 % 2 * 8;
      const float* x = &s_.solutions[slot][row][column];
      uint32_t words[kSolvePlanes][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t terms[kSolvePlanes];
        split_pair(x[2 * j], x[2 * j + 1], terms);
#pragma unroll
        for (int term = 0; term < kSolvePlanes; ++term) words[term][j] = terms[term];
      }
#pragma unroll
      for (int term = 0; term < kSolvePlanes; ++term)
        *reinterpret_cast<uint4*>(to + term * kPlaneElements + 8 * i) =
            make_uint4(words[term][0], words[term][1], words[term][2], words[term][3]);
    }
  }

  const DeltaCall& a_;
  const DeltaSegment& segment_;
  DeltaMmaPrepareShared& s_;
  const int chunk_, key_head_, thread_, is_query_, band_;
  float sums_[kChunkTiles][4] = {};
};

template <bool kVector>
__global__ void __launch_bounds__(kMmaPrepareThreads, 2)
    delta_mma_prepare_kernel(const DeltaCall a, const DeltaSegment segment) {
  extern __shared__ float4 memory[];
  DeltaMmaPrepare<kVector>(a, segment, *reinterpret_cast<DeltaMmaPrepareShared*>(memory)).run();
}

// --- the second kernel ---

inline constexpr int kDeltaMmaThreads = 128;
inline constexpr int kMmaColumns = 16 * kDeltaMmaThreads / kWarp;  // value columns of a block

// What a chunk needs first and last is there twice, so that the next chunk's copy can start with this chunk.
struct DeltaMmaShared {
  static constexpr int kValueStride = kMmaColumns + 8;
  alignas(16) bf16 keys[2][kDeltaChunk][kMmaKeyStride];
  alignas(16) bf16 queries[kDeltaChunk][kMmaKeyStride];
  alignas(16) bf16 values[kDeltaChunk][kValueStride];
  alignas(16) bf16 solve[kSolvePlanes][kPlaneElements];   // T
  alignas(16) bf16 read[2][kReadPlanes][kPlaneElements];  // P
  alignas(16) float factors[2][kDeltaFactors][kDeltaChunk];
};
static_assert(sizeof(DeltaMmaShared) <= (99 << 10));  // of a block on sm_86 and sm_89

// grid (slices of kMmaColumns value columns, heads).
template <bool kVector>
class DeltaMma {
 public:
  __device__ DeltaMma(const DeltaCall& a, const DeltaSegment& segment, DeltaMmaShared& shared)
      : a_(a),
        segment_(segment),
        s_(shared),
        head_(static_cast<int>(blockIdx.y)),
        key_head_(head_ / (a.heads / a.key_heads)),
        slice_(static_cast<int>(blockIdx.x) * kMmaColumns),
        warp_(static_cast<int>(threadIdx.x) / kWarp),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  __device__ void run() {
    const int chunks = segment_.chunks();
    copy_first(0);
    copy_second(0);
    move_state<false>();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait_async<0>();
      __syncthreads();  // the chunk is there, and what the last one used is free
      if (chunk + 1 < chunks) copy_first(chunk + 1);
      scale_rows_first(chunk % 2);
      float out[kChunkTiles][4] = {}, values[kChunkTiles][4];
      read_state(chunk % 2, out, values);
      solve(values);
      __syncthreads();
      if (chunk + 1 < chunks) copy_second(chunk + 1);
      read_values(chunk % 2, values, out);
      store_out(chunk, out);
      write_state(chunk % 2, values);
    }
    move_state<true>();
  }

 private:
  using Tile = float[4];

  __device__ const bf16* qkv_row(int chunk) const {
    return static_cast<const bf16*>(a_.qkv) + segment_.first_row(chunk) * a_.qkv_row;
  }
  // Keys, P and the factors of a chunk ...
  __device__ void copy_first(int chunk) const {
    const int place = chunk % 2;
    copy_rows<kVector, kDeltaMmaThreads, kKeyDims>(&s_.keys[place][0][0], kMmaKeyStride,
                                                   qkv_row(chunk) + (a_.key_heads + key_head_) * a_.key_dim, a_.qkv_row,
                                                   segment_.rows(chunk), a_.key_dim);
    copy_bytes<kDeltaMmaThreads>(s_.read[place], planes_of(a_, segment_, chunk, head_) + kSolvePlanes * kPlaneElements,
                                 sizeof s_.read[place]);
    copy_bytes<kDeltaMmaThreads>(s_.factors[place], segment_.factors_of(a_, chunk, head_), sizeof s_.factors[place]);
    commit_async();
  }
  // ... and its queries, values and T.
  __device__ void copy_second(int chunk) const {
    const int rows = segment_.rows(chunk);
    copy_rows<kVector, kDeltaMmaThreads, kKeyDims>(
        &s_.queries[0][0], kMmaKeyStride, qkv_row(chunk) + key_head_ * a_.key_dim, a_.qkv_row, rows, a_.key_dim);
    copy_rows<kVector, kDeltaMmaThreads, kMmaColumns>(
        &s_.values[0][0], DeltaMmaShared::kValueStride,
        qkv_row(chunk) + 2 * a_.key_heads * a_.key_dim + head_ * a_.value_dim + slice_, a_.qkv_row, rows,
        a_.value_dim - slice_);
    copy_bytes<kDeltaMmaThreads>(s_.solve, planes_of(a_, segment_, chunk, head_), sizeof s_.solve);
    commit_async();
  }

  template <bool kOut>
  __device__ void move_state() {
    float* state = a_.state + int64_t{head_} * a_.key_dim * a_.value_dim;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = 8 * tile + 2 * t_ + i % 2, column = slice_ + 16 * warp_ + g_ + i / 2 * 8;
        const bool there = d < a_.key_dim && column < a_.value_dim;
        float* p = state + int64_t{d} * a_.value_dim + column;
        if constexpr (kOut) {
          if (there) *p = state_[tile][i];
        } else {
          state_[tile][i] = there ? *p : 0.0f;
        }
      }
  }

  // A thread for each row of keys and of queries. All warps see the same factors, of them a lane those of two rows of
  // each, and so all or none wait.
  __device__ void scale_rows_first(int place) const {
    static_assert(kDeltaMmaThreads == 2 * kDeltaChunk);
    const auto& of_keys = s_.factors[place][kKeyOutFactor];
    const auto& of_queries = s_.factors[place][kQueryFactor];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, row = thread % kDeltaChunk;
    const float2 key = *reinterpret_cast<const float2*>(&of_keys[2 * lane]);
    const float2 query = *reinterpret_cast<const float2*>(&of_queries[2 * lane]);
    if (!__any_sync(kAllLanes, is_scaled_first(key.x) || is_scaled_first(key.y) || is_scaled_first(query.x) ||
                                   is_scaled_first(query.y)))
      return;
    const bool is_key = thread < kDeltaChunk;
    bf16* mine = is_key ? &s_.keys[place][row][0] : &s_.queries[row][0];
    if (is_scaled_first(is_key ? of_keys[row] : of_queries[row]))
      for (int d = 0; d < kKeyDims; d += 8) multiply_by_zero(mine + d);
    __syncthreads();
  }

  __device__ float2 factors(int place, DeltaFactor which, int tile) const {
    return *reinterpret_cast<const float2*>(&s_.factors[place][which][8 * tile + 2 * t_]);
  }

  // out += exp(G) Q M, values = beta v - beta exp(G) K M
  __device__ void read_state(int place, Tile (&out)[kChunkTiles], Tile (&values)[kChunkTiles]) const {
    Tile large[kChunkTiles] = {}, small[kChunkTiles] = {};
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) {
      const SplitOperand<3> m(state_[2 * step], state_[2 * step + 1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t keys[2][4], queries[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_tiles(keys[i], &s_.keys[place][32 * half + 16 * i][16 * step], kMmaKeyStride);
          load_tiles(queries[i], &s_.queries[32 * half + 16 * i][16 * step], kMmaKeyStride);
        }
        const int tile = 4 * half;
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&small[tile + 2 * i], m.words[2], keys[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&out[tile + 2 * i], m.words[1], queries[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&large[tile + 2 * i], m.words[0], keys[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&small[tile + 2 * i], m.words[1], keys[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&out[tile + 2 * i], m.words[0], queries[i]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kChunkSteps; ++pair) {
      uint32_t v[4];  // [tile][half of the columns]
      load_values(v, pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int tile = 2 * pair + j;
        const float2 query = factors(place, kQueryFactor, tile), key = factors(place, kKeyInFactor, tile);
        const float2 beta = factors(place, kBetaFactor, tile);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x, y;
          widen_pair(v[2 * j + i], x, y);
          values[tile][2 * i] = fmaf(beta.x, x, -key.x * (large[tile][2 * i] + small[tile][2 * i]));
          values[tile][2 * i + 1] = fmaf(beta.y, y, -key.y * (large[tile][2 * i + 1] + small[tile][2 * i + 1]));
          out[tile][2 * i] *= query.x;
          out[tile][2 * i + 1] *= query.y;
        }
      }
    }
  }
  __device__ void load_values(uint32_t (&v)[4], int pair) const {
    const int lane = 4 * g_ + t_;
    ldmatrix_x4_transposed(v, &s_.values[16 * pair + lane % 8 + lane / 16 * 8][16 * warp_ + lane / 8 % 2 * 8]);
  }

  // values = T values
  __device__ void solve(Tile (&values)[kChunkTiles]) const {
    Tile solved[kChunkTiles] = {};
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
      const SplitOperand<3> v(values[2 * step], values[2 * step + 1]);
#pragma unroll
      for (int band = step; band < kChunkSteps; ++band) {
        uint32_t t[3][4];
#pragma unroll
        for (int i = 0; i < 3; ++i) load_block(t[i], &s_.solve[i][block_at(band, step)]);
        Tile* tiles = &solved[2 * band];
        multiply_tiles(tiles, v.words[0], t[2]);
        multiply_tiles(tiles, v.words[1], t[1]);
        multiply_tiles(tiles, v.words[2], t[0]);
        multiply_tiles(tiles, v.words[0], t[1]);
        multiply_tiles(tiles, v.words[1], t[0]);
      }
    }
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
      const SplitOperand<1> v(values[2 * step], values[2 * step + 1]);
#pragma unroll
      for (int band = step; band < kChunkSteps; ++band) {
        uint32_t t[4];
        load_block(t, &s_.solve[0][block_at(band, step)]);
        multiply_tiles(&solved[2 * band], v.words[0], t);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) values[tile][i] = solved[tile][i];
  }

  // out += P V'
  __device__ void read_values(int place, const Tile (&values)[kChunkTiles], Tile (&out)[kChunkTiles]) const {
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
      const SplitOperand<2> v(values[2 * step], values[2 * step + 1]);
#pragma unroll
      for (int band = step; band < kChunkSteps; ++band) {
        uint32_t p[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_block(p[i], &s_.read[place][i][block_at(band, step)]);
        multiply_tiles(&out[2 * band], v.words[0], p[1]);
        multiply_tiles(&out[2 * band], v.words[1], p[0]);
        multiply_tiles(&out[2 * band], v.words[0], p[0]);
      }
    }
  }

  __device__ void store_out(int chunk, const Tile (&out)[kChunkTiles]) const {
    const int rows = segment_.rows(chunk), first = slice_ + 16 * warp_ + 2 * t_;
    bf16* to = static_cast<bf16*>(a_.out) + segment_.first_row(chunk) * a_.out_row + head_ * a_.value_dim + first;
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = transpose_8x8(round_to_bf16_pair(out[tile][2 * half], out[tile][2 * half + 1]));
        const int row = 8 * tile + g_, column = first + 8 * half;
        if (row >= rows) continue;
        bf16* p = to + row * a_.out_row + 8 * half;
        if constexpr (kVector) {
          if (column < a_.value_dim) *reinterpret_cast<uint32_t*>(p) = pair;
        } else {
          if (column < a_.value_dim) p[0].bits = static_cast<uint16_t>(pair);
          if (column + 1 < a_.value_dim) p[1].bits = static_cast<uint16_t>(pair >> 16);
        }
      }
  }

  // M <- decay M + sum over rows of the scaled keys times V'
  __device__ void write_state(int place, Tile (&values)[kChunkTiles]) {
    uint32_t v[kChunkSteps][3][4];
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      const float2 f = factors(place, kKeyOutFactor, tile);
      values[tile][0] *= f.x, values[tile][1] *= f.y, values[tile][2] *= f.x, values[tile][3] *= f.y;
    }
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
      const SplitOperand<3> split(values[2 * step], values[2 * step + 1]);
#pragma unroll
      for (int i = 0; i < 3; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) v[step][i][j] = split.words[i][j];
    }
    const float decay = s_.factors[place][kDecayFactor][0];
#pragma unroll
    for (int first = 0; first < kDimTiles; first += 4) {
      Tile large[4] = {}, small[4] = {};
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) {
        uint32_t keys[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          load_tiles_transposed(keys[i], &s_.keys[place][16 * step][8 * first + 16 * i], kMmaKeyStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&small[2 * i], v[step][2], keys[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&large[2 * i], v[step][0], keys[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_tiles(&small[2 * i], v[step][1], keys[i]);
      }
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          state_[first + tile][i] = fmaf(decay, state_[first + tile][i], large[tile][i] + small[tile][i]);
    }
  }

  const DeltaCall& a_;
  const DeltaSegment& segment_;
  DeltaMmaShared& s_;
  const int head_, key_head_, slice_, warp_, g_, t_;
  Tile state_[kDimTiles];  // M^T
};

template <bool kVector>
__global__ void __launch_bounds__(kDeltaMmaThreads) delta_mma_kernel(const DeltaCall a, const DeltaSegment segment) {
  extern __shared__ float4 memory[];
  DeltaMma<kVector>(a, segment, *reinterpret_cast<DeltaMmaShared*>(memory)).run();
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GATED_DELTA_MMA_CUH_
