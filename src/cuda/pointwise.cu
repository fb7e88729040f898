// Elementwise ops, the hyper-connections' streams, pooling and the n-gram gate. All are bound by memory.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"

namespace offload::cuda {
namespace {

// Function objects for map_rows(): one piece of a row each. Every element is read before it is written, by the thread
// that writes it, so `out` may be an input where the contract allows it.

// out[r] = x[r]. Reads x, writes out.
template <typename X, typename Out>
struct Copy {
  Rows<const X> x;
  Rows<Out> out;

  template <typename P>
  __device__ void operator()(const P& p) const {
    p.store(out.at(p.row), p.load(x.at(p.row)));
  }
};

// out[r][c * n + j] = table[ids[r]][j]. Reads the row once, writes it `copies` times.
template <typename X, typename Out>
struct GatherRows {
  Rows<const X> table;
  const int32_t* ids;
  Rows<Out> out;
  int64_t copies, n;

  template <typename P>
  __device__ void operator()(const P& p) const {
    const auto x = p.load(table.at(ids[p.row]));
    for (int64_t c = 0; c < copies; ++c) p.store(out.at(p.row) + c * n, x);
  }
};

// out = rnd!(silu(rnd(x * scale))). Reads x, writes out.
template <typename T, Rounding kRounding>
struct ScaledSilu {
  Rows<const T> x;
  Rows<T> out;
  float scale;

  template <typename P>
  __device__ void operator()(const P& p) const {
    auto v = p.load(x.at(p.row));
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) v[i] = silu(rnd<T>(v[i] * scale, kRounding));
    p.store(out.at(p.row), v);
  }
};

// out[r][j] = rnd!(rnd(silu(x[r][j])) * x[r][n + j]). Reads x, writes out.
template <typename X, typename T, Rounding kRounding>
struct Swiglu {
  Rows<const X> x;
  Rows<T> out;
  int64_t n;

  template <typename P>
  __device__ void operator()(const P& p) const {
    auto v = p.load(x.at(p.row));
    const auto up = p.load(x.at(p.row) + n);
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) v[i] = rnd<T>(silu(v[i]), kRounding) * up[i];
    p.store(out.at(p.row), v);
  }
};

// out = rnd!(x + y). Reads x and y, writes out.
template <typename T>
struct Add {
  Rows<const T> x, y;
  Rows<T> out;

  template <typename P>
  __device__ void operator()(const P& p) const {
    auto v = p.load(x.at(p.row));
    const auto other = p.load(y.at(p.row));
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) v[i] += other[i];
    p.store(out.at(p.row), v);
  }
};

// out[r][h][j] = rnd!(x[r][h][j] * rnd(sigmoid(gate[r][h][j]))). Reads x and gate, writes out; group = h.
template <typename T, Rounding kRounding>
struct MulSigmoid {
  Rows<const T> x, gate;
  Rows<T> out;

  template <typename P>
  __device__ void operator()(const P& p) const {
    auto v = p.load(x.at(p.row, p.group));
    const auto g = p.load(gate.at(p.row, p.group));
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) v[i] *= rnd<T>(sigmoid(g[i]), kRounding);
    p.store(out.at(p.row, p.group), v);
  }
};

// out[r][j] = rnd!((1 / streams) * sum_c rnd(rnd(sigmoid(u[r][c * n + j])) * x[r][c * n + j])), c ascending. Reads x
// and u, writes a stream's worth.
template <typename T, Rounding kRounding>
struct StreamMix {
  Rows<const T> x, u;
  Rows<T> out;
  int64_t streams, n;
  float share;  // 1 / streams

  template <typename P>
  __device__ void operator()(const P& p) const {
    Vector<kMapWidth> total;
#pragma unroll 4
    for (int64_t c = 0; c < streams; ++c) {
      const auto gate = p.load(u.at(p.row) + c * n), v = p.load(x.at(p.row) + c * n);
#pragma unroll
      for (int i = 0; i < kMapWidth; ++i) total[i] += rnd<T>(rnd<T>(sigmoid(gate[i]), kRounding) * v[i], kRounding);
    }
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) total[i] *= share;
    p.store(out.at(p.row), total);
  }
};

// stack[r][c][j] = rnd!(stack[r][c][j] + rnd(y[r][j] * inj)), inj = rnd(2 rnd(sigmoid(rnd(logits[r][c] / streams)))).
// Reads and writes the stack, reads y; group = c, so that the threads that share a row of y run side by side.
template <typename T, Rounding kRounding>
struct StreamWrite {
  Rows<T> stack;
  Rows<const T> y;
  AnyRows logits;
  float streams;

  template <typename P>
  __device__ void operator()(const P& p) const {
    auto v = p.load(stack.at(p.row, p.group));
    const auto add = p.load(y.at(p.row));
    const float logit = rnd<T>(logits.load(p.row, p.group) / streams, kRounding);
    const float inj = rnd<T>(2.0f * rnd<T>(sigmoid(logit), kRounding), kRounding);
#pragma unroll
    for (int i = 0; i < kMapWidth; ++i) v[i] += rnd<T>(add[i] * inj, kRounding);
    p.store(stack.at(p.row, p.group), v);
  }
};

// out[b][j] = rnd!(mean of x[b * pool + i][j] over i), i ascending. Reads x, writes out.
template <typename T>
struct MeanPool {
  Rows<const T> x;
  Rows<T> out;
  int64_t pool;
  float share;  // 1 / pool

  template <typename P>
  __device__ void operator()(const P& p) const {
    Vector<kMapWidth> total;
#pragma unroll 4
    for (int64_t i = 0; i < pool; ++i) {
      const auto v = p.load(x.at(p.row * pool + i));
#pragma unroll
      for (int j = 0; j < kMapWidth; ++j) total[j] += v[j];
    }
#pragma unroll
    for (int j = 0; j < kMapWidth; ++j) total[j] *= share;
    p.store(out.at(p.row), total);
  }
};

template <typename T>
struct SignedRootGate {
  Rows<const T> key, query, value;
  Rows<T> out;
  int64_t items, streams;
  int n;
};

// Per row and stream: s = rnd(rnd(sum_j rnd(key[j] * query[j])) / sqrt(n)); g = rnd(sqrt(max(|s|, rnd(1e-6)))) sign(s);
// out[j] = rnd!(rnd(sigmoid(g)) * value[j]). One team for each (row, stream); reads key, query and value (again for
// every stream, from the L2 cache), writes out.
template <typename T, Rounding kRounding, typename Team>
__global__ void __launch_bounds__(Team::kBlockThreads) signed_root_gate_kernel(SignedRootGate<T> a) {
  after_previous();
  const int64_t item = Team::item();
  if (item >= a.items) return;
  const auto [row, c] = split(item, a.streams);
  float sum = 0;
  Team::for_each_piece(0, a.n, [&](const auto& p) {
    const auto key = p.load(a.key.at(row, c)), query = p.load(a.query.at(row, c));
#pragma unroll
    for (int i = 0; i < Team::kWidth; ++i) sum += rnd<T>(key[i] * query[i], kRounding);
  });
  const float s = rnd<T>(rnd<T>(Team::sum(sum), kRounding) / sqrtf(static_cast<float>(a.n)), kRounding);
  const float floor = rnd<T>(1e-6f, kRounding), size = fabsf(s) < floor ? floor : fabsf(s);  // a NaN stays one
  const float sign = s > 0 ? 1.0f : s < 0 ? -1.0f : 0.0f;
  const float share = rnd<T>(sigmoid(rnd<T>(sqrtf(size), kRounding) * sign), kRounding);
  Team::for_each_piece(0, a.n, [&](const auto& p) {
    auto v = p.load(a.value.at(row));
#pragma unroll
    for (int i = 0; i < Team::kWidth; ++i) v[i] *= share;
    p.store(a.out.at(row, c), v);
  });
}

}  // namespace

void CudaOps::execute(const CopyArgs& a) {
  const int64_t n = a.x.dim(1);
  with_float_type(a.x.dtype(), [&](auto x) {
    with_float_type(a.out.dtype(), [&](auto out) {
      using X = decltype(x);
      using Out = decltype(out);
      map_rows(Copy<X, Out>{rows_of<const X>(a.x), rows_of<Out>(a.out)}, a.x.dim(0), 1, n,
               whole_vectors(kMapWidth, n, {&a.x, &a.out}), stream_);
    });
  });
}

void CudaOps::execute(const GatherRowsArgs& a) {
  const int64_t n = a.table.dim(1);
  with_float_type(a.table.dtype(), [&](auto x) {
    with_float_type(a.out.dtype(), [&](auto out) {
      using X = decltype(x);
      using Out = decltype(out);
      map_rows(GatherRows<X, Out>{rows_of<const X>(a.table), a.ids.as<int32_t>(), rows_of<Out>(a.out), a.copies, n},
               a.ids.dim(0), 1, n, whole_vectors(kMapWidth, n, {&a.table, &a.out}), stream_);
    });
  });
}

void CudaOps::execute(const ScaledSiluArgs& a) {
  const int64_t n = a.x.dim(1);
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    map_rows(ScaledSilu<T, decltype(rounding)::value>{rows_of<const T>(a.x), rows_of<T>(a.out), a.scale}, a.x.dim(0), 1,
             n, whole_vectors(kMapWidth, n, {&a.x, &a.out}), stream_);
  });
}

void CudaOps::execute(const SwigluArgs& a) {
  const int64_t n = a.out.dim(1);
  with_float_type(a.x.dtype(), [&](auto x) {
    with_rounding(a.out.dtype(), a.rounding, [&](auto type, auto rounding) {
      using X = decltype(x);
      using T = decltype(type);
      map_rows(Swiglu<X, T, decltype(rounding)::value>{rows_of<const X>(a.x), rows_of<T>(a.out), n}, a.x.dim(0), 1, n,
               whole_vectors(kMapWidth, n, {&a.x, &a.out}), stream_);
    });
  });
}

void CudaOps::execute(const AddArgs& a) {
  const int64_t n = a.x.dim(1);
  with_float_type(a.x.dtype(), [&](auto type) {
    using T = decltype(type);
    map_rows(Add<T>{rows_of<const T>(a.x), rows_of<const T>(a.y), rows_of<T>(a.out)}, a.x.dim(0), 1, n,
             whole_vectors(kMapWidth, n, {&a.x, &a.y, &a.out}), stream_);
  });
}

void CudaOps::execute(const MulSigmoidArgs& a) {
  OFL_ASSERT(a.gate.dtype() == a.x.dtype());
  const int64_t n = a.x.dim(2);
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    map_rows(
        MulSigmoid<T, decltype(rounding)::value>{rows_of<const T>(a.x), rows_of<const T>(a.gate), rows_of<T>(a.out)},
        a.x.dim(0), a.x.dim(1), n, whole_vectors(kMapWidth, n, {&a.x, &a.gate, &a.out}), stream_);
  });
}

void CudaOps::execute(const StreamMixArgs& a) {
  const int64_t n = a.out.dim(1);
  with_rounding(a.x.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    map_rows(StreamMix<T, decltype(rounding)::value>{rows_of<const T>(a.x), rows_of<const T>(a.u), rows_of<T>(a.out),
                                                     a.streams, n, 1.0f / static_cast<float>(a.streams)},
             a.out.dim(0), 1, n, whole_vectors(kMapWidth, n, {&a.x, &a.u, &a.out}), stream_);
  });
}

void CudaOps::execute(const StreamWriteArgs& a) {
  const int64_t n = a.y.dim(1);
  with_rounding(a.stack.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    Rows<T> stack = rows_of<T>(a.stack);
    stack.group_stride = n;
    map_rows(StreamWrite<T, decltype(rounding)::value>{stack, rows_of<const T>(a.y), any_rows_of(a.logits),
                                                       static_cast<float>(a.streams)},
             a.y.dim(0), a.streams, n, whole_vectors(kMapWidth, n, {&a.stack, &a.y}), stream_);
  });
}

void CudaOps::execute(const MeanPoolArgs& a) {
  const int64_t n = a.out.dim(1);
  with_float_type(a.x.dtype(), [&](auto type) {
    using T = decltype(type);
    map_rows(MeanPool<T>{rows_of<const T>(a.x), rows_of<T>(a.out), a.pool, 1.0f / static_cast<float>(a.pool)},
             a.out.dim(0), 1, n, whole_vectors(kMapWidth, n, {&a.x, &a.out}), stream_);
  });
}

void CudaOps::execute(const SignedRootGateArgs& a) {
  const int64_t streams = a.key.dim(1), n = a.key.dim(2), items = a.key.dim(0) * streams;
  with_rounding(a.key.dtype(), a.rounding, [&](auto type, auto rounding) {
    using T = decltype(type);
    const SignedRootGate<T> args{rows_of<const T>(a.key),
                                 rows_of<const T>(a.query),
                                 rows_of<const T>(a.value),
                                 rows_of<T>(a.out),
                                 items,
                                 streams,
                                 static_cast<int>(n)};
    with_team(n, {&a.key, &a.query, &a.value, &a.out}, [&](auto team) {
      using RowTeam = decltype(team);
      launch_early(signed_root_gate_kernel<T, decltype(rounding)::value, RowTeam>, RowTeam::grid(items),
                   RowTeam::block(), 0, stream_, args);
    });
  });
}

}  // namespace offload::cuda
