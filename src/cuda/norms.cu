// Norms over rows and rotary positions. A team of threads per row goes over it twice: in norms without positions what a
// thread has first stays in its registers, 128 columns of a warp and 2560 of a block; the rest comes out of the L1
// cache again. All are bound by memory at many rows and by latency at few.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

template <int kWidth>
__device__ inline void add_squares(const Vector<kWidth>& v, float& sum) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum = fmaf(v[i], v[i], sum);
}

// The squares of this thread's pieces of x[0..n) behind its first one.
template <typename Team, typename T>
__device__ inline void add_squares_behind(const T* x, int n, float& sum) {
  Team::for_each_piece(Team::kFirstColumns, n, [&](const auto& p) { add_squares(p.load(x), sum); });
}

// rsqrt(mean(x^2) + eps).
__device__ inline float inverse_rms(float sum, int n, float eps) {
  return 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
}
// The same over one row, for all threads of the team.
template <typename Team, typename T>
__device__ float inverse_rms(const T* x, int n, float eps) {
  float sum = 0;
  Team::for_each_piece(0, n, [&](const auto& p) { add_squares(p.load(x), sum); });
  return inverse_rms(Team::sum(sum), n, eps);
}

template <typename T>
struct RmsNorm {
  Rows<const T> x;
  Rows<T> out;
  const float* w;
  int64_t w_stride;  // from group to group
  int64_t rows, groups;
  int n;
  float eps;
  NormWeight weight;
};

// Calls function(std::integral_constant) with the rows that a team takes at a time of so many.
template <typename Function>
void with_rows_each(int64_t rows, const Function& function) {
  constexpr int kRowsEach = 3;
  if (rows >= kRowsEach * int64_t{kMapBlocksEnough})
    function(std::integral_constant<int, kRowsEach>{});
  else
    function(std::integral_constant<int, 1>{});
}

// out[r][g][j] = rnd!(x[r][g][j] * rsqrt(mean_j(x^2) + eps) * (1 + w[g][j])), or rnd!(rnd(x * rsqrt(..)) * w[g][j]).
// One team for kRows rows r of a group at a time, which share one reading of w; reads x, writes out. Out may be x: a
// thread rereads what it alone overwrites.
template <typename T, Rounding kRounding, typename Team, int kRows>
__global__ void __launch_bounds__(Team::kBlockThreads, Team::kBlocksEach) rms_norm_kernel(RmsNorm<T> a) {
  after_previous();
  constexpr int kWidth = Team::kWidth;
  const auto piece = Team::first_piece(a.n);
  const bool has_piece = piece.column < a.n, one_plus = a.weight == NormWeight::one_plus;
  const int64_t items = (a.rows + kRows - 1) / kRows * a.groups;
  for (int64_t item = Team::item(); item < items; item += Team::step()) {
    const auto [first, group] = split(item, a.groups);
    const int64_t begin = first * kRows;
    const float* w = a.w + group * a.w_stride;
    const T* x[kRows];  // rows behind the last are the last again: read, and not written
    Vector<kWidth> held[kRows];
    float scale[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = a.x.at(min(begin + r, a.rows - 1), group);
      if (has_piece) held[r] = piece.load(x[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      add_squares(held[r], scale[r]);
      add_squares_behind<Team>(x[r], a.n, scale[r]);
    }
    Team::sum_all(scale);
    const auto store = [&](const auto& p, int r, Vector<kWidth> v, const Vector<kWidth>& weight) {
      if (begin + r >= a.rows) return;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        v[i] *= scale[r];
        v[i] = one_plus ? v[i] * (1.0f + weight[i]) : rnd<T>(v[i], kRounding) * weight[i];
      }
      p.store(a.out.at(begin + r, group), v);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) scale[r] = inverse_rms(scale[r], a.n, a.eps);
    if (has_piece) {
      const auto weight = piece.load(w);
#pragma unroll
      for (int r = 0; r < kRows; ++r) store(piece, r, held[r], weight);
    }
    Team::for_each_piece(Team::kFirstColumns, a.n, [&](const auto& p) {
      const auto weight = p.load(w);
#pragma unroll
      for (int r = 0; r < kRows; ++r) store(p, r, p.load(x[r]), weight);
    });
  }
}

template <typename T>
struct GatedNorm {
  Rows<const T> x, z;
  Rows<T> out;
  const float* w;
  int64_t items, heads;
  int n;
  float eps;
  Gate gate;
};

// out[r][h][j] = rnd!(rnd(w[j] * rnd(x[r][h][j] * rsqrt(mean_j(x^2) + eps))) * act(z[r][h][j])). One team for kItems
// (r, h) at a time, which share one reading of w; reads x and z, writes out, which may be x.
template <typename T, Rounding kRounding, typename Team, int kItems>
__global__ void __launch_bounds__(Team::kBlockThreads, Team::kBlocksEach) gated_norm_kernel(GatedNorm<T> a) {
  after_previous();
  constexpr int kWidth = Team::kWidth;
  const auto piece = Team::first_piece(a.n);
  const bool has_piece = piece.column < a.n, has_silu = a.gate == Gate::silu;
  for (int64_t begin = Team::item() * kItems; begin < a.items; begin += Team::step() * kItems) {
    RowGroup at[kItems];  // items behind the last are the last again: read, and not written
    Vector<kWidth> held[kItems], held_gate[kItems];
    float scale[kItems] = {};
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      at[r] = split(min(begin + r, a.items - 1), a.heads);
      if (!has_piece) continue;
      held[r] = piece.load(a.x.at(at[r].row, at[r].group));
      held_gate[r] = piece.load(a.z.at(at[r].row, at[r].group));
    }
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      add_squares(held[r], scale[r]);
      add_squares_behind<Team>(a.x.at(at[r].row, at[r].group), a.n, scale[r]);
    }
    Team::sum_all(scale);
    const auto store = [&](const auto& p, int r, Vector<kWidth> v, const Vector<kWidth>& gate,
                           const Vector<kWidth>& w) {
      if (begin + r >= a.items) return;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float normalised = rnd<T>(w[i] * rnd<T>(v[i] * scale[r], kRounding), kRounding);
        v[i] = normalised * (has_silu ? silu(gate[i]) : sigmoid(gate[i]));
      }
      p.store(a.out.at(at[r].row, at[r].group), v);
    };
#pragma unroll
    for (int r = 0; r < kItems; ++r) scale[r] = inverse_rms(scale[r], a.n, a.eps);
    if (has_piece) {
      const auto w = piece.load(a.w);
#pragma unroll
      for (int r = 0; r < kItems; ++r) store(piece, r, held[r], held_gate[r], w);
    }
    Team::for_each_piece(Team::kFirstColumns, a.n, [&](const auto& p) {
      const auto w = p.load(a.w);
#pragma unroll
      for (int r = 0; r < kItems; ++r)
        store(p, r, p.load(a.x.at(at[r].row, at[r].group)), p.load(a.z.at(at[r].row, at[r].group)), w);
    });
  }
}

struct RopeTable {
  const float* inv_freq;
  float* out;
  int64_t rows, half, first, step;
  float scale;
  bool round_to_bf16;
};

// out[r][i] = round_to(scale * cos), round_to(scale * sin) of the FP32 product (first + r * step) * inv_freq[i]. One
// thread for each (r, i). sinf and cosf are within an ulp for every argument: positions reach 262144 and beyond.
__global__ void __launch_bounds__(kMapThreads) rope_table_kernel(RopeTable a) {
  after_previous();
  const int64_t item = int64_t{blockIdx.x} * kMapThreads + threadIdx.x;
  if (item >= a.rows * a.half) return;
  const int64_t row = item / a.half;
  const float angle = static_cast<float>(a.first + row * a.step) * a.inv_freq[item - row * a.half];
  float sine, cosine;
  sincosf(angle, &sine, &cosine);
  const Rounding rounding = a.round_to_bf16 ? Rounding::reference : Rounding::fused;
  a.out[2 * item] = rnd<bf16>(a.scale * cosine, rounding);
  a.out[2 * item + 1] = rnd<bf16>(a.scale * sine, rounding);
}

template <typename T>
struct NormRope {
  Rows<const T> x;
  Rows<T> out;
  const float* w;      // null: no norm
  const float* table;  // [rows, half, 2]
  int64_t items, heads;
  int n, half;
  float eps;
};

// y = rnd(x * rsqrt(mean(x^2) + eps) * (1 + w)), or x without w; o[i] = rnd!(rnd(y[i] c_i) + rnd(-y[i + half] s_i)),
// o[i + half] = rnd!(rnd(y[i + half] c_i) + rnd(y[i] s_i)) for i < half; the rest of y passes. One team for each
// (r, h); reads x, writes out, which may be x: the sum comes before every write, and both elements of a pair are read
// and written by one thread.
template <typename T, Rounding kRounding, typename Team>
__global__ void __launch_bounds__(Team::kBlockThreads) norm_rope_kernel(NormRope<T> a) {
  after_previous();
  constexpr int kWidth = Team::kWidth;
  const int64_t item = Team::item();
  if (item >= a.items) return;
  const auto [row, head] = split(item, a.heads);
  const T* x = a.x.at(row, head);
  T* out = a.out.at(row, head);
  const float scale = a.w != nullptr ? inverse_rms<Team>(x, a.n, a.eps) : 1.0f;
  const auto normalised = [&](const auto& p, int shift) {
    auto v = p.load(x + shift);
    if (a.w == nullptr) return v;
    const auto w = p.load(a.w + shift);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = rnd<T>(v[i] * scale * (1.0f + w[i]), kRounding);
    return v;
  };
  Team::for_each_piece(0, a.half, [&](const auto& p) {
    auto low = normalised(p, 0), high = normalised(p, a.half);
    // The (cos, sin) pairs of this piece: twice its columns.
    const auto turns =
        Piece<2 * kWidth, Team::kIsWhole>{.column = 2 * p.column, .end = 2 * a.half}.load(a.table + row * 2 * a.half);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float c = turns[2 * i], s = turns[2 * i + 1], was = low[i];
      low[i] = rnd<T>(was * c, kRounding) + rnd<T>(-high[i] * s, kRounding);
      high[i] = rnd<T>(high[i] * c, kRounding) + rnd<T>(was * s, kRounding);
    }
    p.store(out, low);
    p.store(out + a.half, high);
  });
  Team::for_each_piece(2 * a.half, a.n, [&](const auto& p) { p.store(out, normalised(p, 0)); });
}

}  // namespace

void CudaOps::execute(const RmsNormArgs& a) {
  const int64_t rows = a.x.dim(0), groups = a.x.dim(1), n = a.x.dim(2);
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    const RmsNorm<T> args{.x = rows_of<const T>(a.x),
                          .out = rows_of<T>(a.out),
                          .w = a.w.as<float>(),
                          .w_stride = a.w.dim(0) == 1 ? 0 : n,
                          .rows = rows,
                          .groups = groups,
                          .n = static_cast<int>(n),
                          .eps = a.eps,
                          .weight = a.weight};
    with_team(n, {&a.x, &a.w, &a.out}, [&](auto team) {
      using RowTeam = decltype(team);
      with_rows_each(rows * groups, [&](auto rows_each) {
        constexpr int kRows = decltype(rows_each)::value;
        launch_early(rms_norm_kernel<T, decltype(rounding)::value, RowTeam, kRows>,
                     RowTeam::grid((rows + kRows - 1) / kRows * groups, caps_.multiprocessors), RowTeam::block(), 0,
                     stream_, args);
      });
    });
  });
}

void CudaOps::execute(const GatedNormArgs& a) {
  OFL_ASSERT(a.z.dtype() == a.x.dtype());
  const int64_t heads = a.x.dim(1), n = a.x.dim(2), items = a.x.dim(0) * heads;
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    const GatedNorm<T> args{.x = rows_of<const T>(a.x),
                            .z = rows_of<const T>(a.z),
                            .out = rows_of<T>(a.out),
                            .w = a.w.as<float>(),
                            .items = items,
                            .heads = heads,
                            .n = static_cast<int>(n),
                            .eps = a.eps,
                            .gate = a.gate};
    with_team(n, {&a.x, &a.z, &a.w, &a.out}, [&](auto team) {
      using RowTeam = decltype(team);
      with_rows_each(items, [&](auto rows_each) {
        constexpr int kRows = decltype(rows_each)::value;
        launch_early(gated_norm_kernel<T, decltype(rounding)::value, RowTeam, kRows>,
                     RowTeam::grid((items + kRows - 1) / kRows, caps_.multiprocessors), RowTeam::block(), 0, stream_,
                     args);
      });
    });
  });
}

void CudaOps::execute(const RopeTableArgs& a) {
  const int64_t rows = a.out.dim(0), half = a.inv_freq.dim(0);
  launch_early(rope_table_kernel, dim3(blocks_for(rows * half, kMapThreads)), dim3(kMapThreads), 0, stream_,
               RopeTable{.inv_freq = a.inv_freq.as<float>(),
                         .out = a.out.as<float>(),
                         .rows = rows,
                         .half = half,
                         .first = a.first,
                         .step = a.step,
                         .scale = a.scale,
                         .round_to_bf16 = a.round_to == DType::bf16});
}

void CudaOps::execute(const NormRopeArgs& a) {
  const int64_t heads = a.x.dim(1), n = a.x.dim(2), half = a.table.dim(1), items = a.x.dim(0) * heads;
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    const NormRope<T> args{.x = rows_of<const T>(a.x),
                           .out = rows_of<T>(a.out),
                           .w = static_cast<const float*>(a.w.data()),
                           .table = a.table.as<float>(),
                           .items = items,
                           .heads = heads,
                           .n = static_cast<int>(n),
                           .half = static_cast<int>(half),
                           .eps = a.eps};
    with_bool(half % 4 == 0 && whole_vectors(4, n, {&a.x, &a.w, &a.table, &a.out}), [&](auto whole) {
      using Warp = Team<kWarp, decltype(whole)::value>;
      launch_early(norm_rope_kernel<T, decltype(rounding)::value, Warp>, Warp::grid(items), Warp::block(), 0, stream_,
                   args);
    });
  });
}

}  // namespace offload::cuda
