// Tensors as rows of short pieces: how the kernels that go once over their data see [rows, n] and [rows, groups, n].
//
// A thread takes a Piece of one row at a time: in accesses of up to 16 bytes when every pointer and stride allows it
// (whole_vectors(), on the host), else element by element with the tail cut. Teams (a warp or a block per row) sum in
// one order, given by n alone: alignment changes no bit. Owns nothing. Does NOT stage through shared memory.
#ifndef OFFLOAD_CUDA_ROWS_CUH_
#define OFFLOAD_CUDA_ROWS_CUH_

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/kernel.cuh"

namespace offload::cuda {

// --- host side: compile-time choices from run-time arguments ---

template <typename Function>
void with_bool(bool value, const Function& function) {
  if (value)
    function(std::true_type{});
  else
    function(std::false_type{});
}

template <Rounding kRounding>
using RoundingConstant = std::integral_constant<Rounding, kRounding>;

// Calls function(A{}, RoundingConstant). For A = F32 it is `fused`, which is the same computation.
template <typename Function>
void with_rounding(DType activations, Rounding rounding, const Function& function) {
  if (activations != DType::bf16)
    function(float{}, RoundingConstant<Rounding::fused>{});
  else if (rounding == Rounding::fused)
    function(bf16{}, RoundingConstant<Rounding::fused>{});
  else
    function(bf16{}, RoundingConstant<Rounding::reference>{});
}

// Whether rows of n elements can be taken in whole vectors of `width`: n is a multiple and every row is aligned.
inline bool whole_vectors(int64_t width, int64_t n, std::initializer_list<const Tensor*> tensors) {
  bool whole = n % width == 0;
  for (const Tensor* t : tensors) {
    const int64_t alignment = std::min<int64_t>(16, width * dtype_bytes(t->dtype()));
    whole = whole && reinterpret_cast<uintptr_t>(t->data()) % static_cast<uintptr_t>(alignment) == 0;
    for (int i = 0; i + 1 < t->rank(); ++i)
      whole = whole && (t->dim(i) <= 1 || t->stride(i) * dtype_bytes(t->dtype()) % alignment == 0);
  }
  return whole;
}

// --- views ---

// A tensor [rows, n] or [rows, groups, n] whose last dimension is dense.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t row_stride = 0, group_stride = 0;  // in elements

  __device__ T* at(int64_t row, int64_t group = 0) const { return data + row * row_stride + group * group_stride; }
};

template <typename T>
Rows<T> rows_of(const Tensor& t) {
  return {static_cast<T*>(t.data()), t.stride(0), t.rank() > 2 ? t.stride(1) : 0};
}

// A tensor [rows, n] whose dtype is looked up at run time, for what a kernel seldom reads. Without data: none.
struct AnyRows {
  const void* data = nullptr;
  int64_t row_stride = 0;  // in elements
  bool is_bf16 = false;

  __device__ const float* float_row(int64_t row) const { return static_cast<const float*>(data) + row * row_stride; }
  __device__ const bf16* bf16_row(int64_t row) const { return static_cast<const bf16*>(data) + row * row_stride; }
  __device__ float load(int64_t row, int64_t column) const {
    return is_bf16 ? load_float(bf16_row(row) + column) : load_float(float_row(row) + column);
  }
};

inline AnyRows any_rows_of(const Tensor& t) {
  return {t.data(), t.stride(0), t.dtype() == DType::bf16};
}

// --- pieces ---

template <int kWidth>
struct Vector {
  float f[kWidth] = {};

  __device__ float& operator[](int i) { return f[i]; }
  __device__ float operator[](int i) const { return f[i]; }
};

// REQUIRES: p aligned to 16 bytes.
template <int kWidth>
__device__ inline void load_whole(const float* p, Vector<kWidth>& v) {
  static_assert(kWidth % 4 == 0);
#pragma unroll
  for (int i = 0; i < kWidth; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(p + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
}
template <int kWidth>
__device__ inline void store_whole(float* p, const Vector<kWidth>& v) {
  static_assert(kWidth % 4 == 0);
#pragma unroll
  for (int i = 0; i < kWidth; i += 4)
    *reinterpret_cast<float4*>(p + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}

// kWidth BF16 numbers as one access.
template <int kWidth>
using Bf16Words = std::conditional_t<kWidth == 8, uint4, uint2>;

// By value: of a reference to memory the compiler would read bytes.
template <int kWidth>
__device__ inline void widen_words(Bf16Words<kWidth> words, Vector<kWidth>& v) {
  uint32_t pairs[kWidth / 2];
  memcpy(pairs, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    v[2 * i] = __uint_as_float(pairs[i] << 16);
    v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
template <int kWidth>
__device__ inline Bf16Words<kWidth> words_of(const Vector<kWidth>& v) {
  uint32_t pairs[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) pairs[i] = round_to_bf16_pair(v[2 * i], v[2 * i + 1]);
  Bf16Words<kWidth> words;
  memcpy(&words, pairs, sizeof words);
  return words;
}

// REQUIRES: p aligned to kWidth * 2 bytes.
template <int kWidth>
__device__ inline void load_whole(const bf16* p, Vector<kWidth>& v) {
  static_assert(kWidth == 4 || kWidth == 8);
  widen_words(*reinterpret_cast<const Bf16Words<kWidth>*>(p), v);
}
template <int kWidth>
__device__ inline void store_whole(bf16* p, const Vector<kWidth>& v) {
  static_assert(kWidth == 4 || kWidth == 8);
  *reinterpret_cast<Bf16Words<kWidth>*>(p) = words_of(v);
}

// The elements column + i * step, i < kWidth, of one row, as far as they lie below `end`: others read as 0 and are not
// written. kWhole: all lie below `end`, step is 1, and whole_vectors() held.
template <int kWidth, bool kWhole>
struct Piece {
  int64_t row = 0, group = 0;
  int column = 0, end = 0, step = 1;

  template <typename T>
  __device__ Vector<kWidth> load(const T* row_begin) const {
    Vector<kWidth> v;
    if constexpr (kWhole) {
      load_whole(row_begin + column, v);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int at = column + i * step;
        if (at < end) v[i] = load_float(row_begin + at);
      }
    }
    return v;
  }
  // From row `r`, this piece's columns.
  __device__ Vector<kWidth> load(const AnyRows& rows, int64_t r) const {
    return rows.is_bf16 ? load(rows.bf16_row(r)) : load(rows.float_row(r));
  }
  template <typename T>
  __device__ void store(T* row_begin, const Vector<kWidth>& v) const {
    if constexpr (kWhole) {
      store_whole(row_begin + column, v);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const int at = column + i * step;
        if (at < end) store_float(row_begin + at, v[i]);
      }
    }
  }
};

// --- elementwise kernels ---

inline constexpr int64_t kColumnsMost = int64_t{1} << 24;  // columns are int, a grid has up to 65535 parts of 32 * 8

inline constexpr int kMapWidth = 8;
inline constexpr int kMapThreads = 256;
inline constexpr unsigned kMapBlocksEnough = 1056;  // 8 blocks for each of the 132 multiprocessors of an H200

// function(piece) for every piece of `items` = rows * groups rows of n columns. Block [threads along a row, rows];
// grid [rows / rows of a block, column parts]: one part when rows alone fill the device, so that memory is passed in
// address order; else as many as give each thread one piece.
template <bool kWhole, typename Function>
__global__ void __launch_bounds__(kMapThreads) map_kernel(Function function, unsigned items, unsigned groups, int n) {
  after_previous();
  const unsigned item = blockIdx.x * blockDim.y + threadIdx.y;
  if (item >= items) return;
  const unsigned row = groups == 1 ? item : item / groups;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int part = kMapWidth * threads, parts = static_cast<int>(gridDim.y);
  for (int begin = static_cast<int>(blockIdx.y) * part; begin < n; begin += parts * part) {
    // Unaligned rows are taken with neighbouring elements in neighbouring threads.
    const Piece<kMapWidth, kWhole> piece{.row = row,
                                         .group = item - row * groups,
                                         .column = begin + thread * (kWhole ? kMapWidth : 1),
                                         .end = n,
                                         .step = kWhole ? 1 : threads};
    if (piece.column < n) function(piece);
  }
}

// Threads along a row of `vectors` pieces: a power of two up to 256, whole warps where a row fills one, of these the
// most that leave the fewest threads idle.
inline unsigned threads_along(int64_t vectors) {
  unsigned best = 1;
  while (best < kWarp && best < vectors) best *= 2;
  const auto covered = [&](unsigned threads) { return (vectors + threads - 1) / threads * threads; };
  for (unsigned threads = 2 * best; best >= kWarp && threads <= kMapThreads; threads *= 2)
    if (covered(threads) <= covered(best)) best = threads;
  return best;
}

template <typename Function>
void map_rows(const Function& function, int64_t rows, int64_t groups, int64_t n, bool whole, const Queue& queue) {
  const int64_t items = rows * groups;
  if (items == 0 || n == 0) return;
  OFL_ASSERT(items <= 0x7fffffff && n <= kColumnsMost);
  const int64_t vectors = (n + kMapWidth - 1) / kMapWidth;
  dim3 block(threads_along(vectors));
  block.y = kMapThreads / block.x;
  while (block.y / 2 >= items) block.y /= 2;
  dim3 grid(blocks_for(items, block.y));
  if (grid.x < kMapBlocksEnough) grid.y = blocks_for(vectors, block.x);
  with_bool(whole, [&](auto constant) {
    launch_early(map_kernel<decltype(constant)::value, Function>, grid, block, 0, queue, function,
                 static_cast<unsigned>(items), static_cast<unsigned>(groups), static_cast<int>(n));
  });
}

// --- teams: the threads that reduce one row together ---

// The row and the group of item row * groups + group.
struct RowGroup {
  int64_t row, group;
};
// REQUIRES: both below 2^31.
__device__ inline RowGroup split(int64_t item, int64_t groups) {
  const auto narrow = static_cast<unsigned>(item), divisor = static_cast<unsigned>(groups);
  return {narrow / divisor, narrow % divisor};
}

// One warp (4 teams in a block) or one block of kThreads. Rows of 2560 give each of 320 threads one 16-byte piece.
template <int kThreads, bool kWhole>
struct Team {
  static constexpr bool kIsWhole = kWhole;
  static constexpr int kWidth = kThreads == kWarp ? 4 : 8;
  static constexpr int kTeams = kThreads == kWarp ? 4 : 1;
  static constexpr int kBlockThreads = kThreads * kTeams;

  static dim3 block() { return {kThreads, kTeams}; }
  static dim3 grid(int64_t items) {
    OFL_ASSERT(items <= 0x7fffffff);
    return {blocks_for(items, kTeams)};
  }

  // For items that blocks take in turn, in kernels that leave a multiprocessor room for kBlocksEach blocks.
  static constexpr int kBlocksEach = 960 / kBlockThreads;
  static dim3 grid(int64_t items, int multiprocessors) {
    return {std::min(grid(items).x, static_cast<unsigned>(multiprocessors * kBlocksEach))};
  }

  // Which of the items is this team's; the same for all its threads.
  __device__ static int64_t item() { return int64_t{blockIdx.x} * kTeams + threadIdx.y; }
  // From there to the next one, where blocks take several.
  __device__ static int64_t step() { return int64_t{gridDim.x} * kTeams; }

  // Columns of the pieces that the threads have first, one each.
  static constexpr int kFirstColumns = kThreads * kWidth;
  // This thread's first piece of the columns [0, end), or one behind them.
  __device__ static Piece<kWidth, kWhole> first_piece(int end) {
    return {.column = static_cast<int>(threadIdx.x) * kWidth, .end = end};
  }
  // This thread's pieces of the columns [begin, end), in ascending order.
  template <typename Function>
  __device__ static void for_each_piece(int begin, int end, const Function& function) {
    for (int column = begin + static_cast<int>(threadIdx.x) * kWidth; column < end; column += kThreads * kWidth)
      function(Piece<kWidth, kWhole>{.column = column, .end = end});
  }
  // REQUIRES: all threads of the team call; with a block, no thread of it has left.
  __device__ static float sum(float value) {
    __shared__ float shared[kThreads / kWarp];
    return block_sum<kThreads>(value, shared);
  }
  // The same of several values, which wait for each other once.
  template <int kCount>
  __device__ static void sum_all(float (&values)[kCount]) {
    __shared__ float shared[kCount * kThreads / kWarp];
    block_sums<kThreads>(values, shared);
  }
};

inline constexpr int64_t kWarpColumns = 1024;  // up to 8 pieces of 4 for each lane
inline constexpr int kRowThreads = 320;

// Calls function(Team{}) with the team for rows of n elements of these tensors.
template <typename Function>
void with_team(int64_t n, std::initializer_list<const Tensor*> tensors, const Function& function) {
  OFL_ASSERT(n <= kColumnsMost);
  if (n <= kWarpColumns)
    with_bool(whole_vectors(4, n, tensors), [&](auto whole) { function(Team<kWarp, decltype(whole)::value>{}); });
  else
    with_bool(whole_vectors(8, n, tensors), [&](auto whole) { function(Team<kRowThreads, decltype(whole)::value>{}); });
}

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_ROWS_CUH_
