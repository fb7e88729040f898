// Routing and combination of the mixture of experts.
#include "cuda/cuda_ops.h"
#include "cuda/rows.cuh"
#include "cuda/selection.cuh"

namespace offload::cuda {
namespace {

constexpr uint32_t kTaken = 0;  // of no score

constexpr int64_t kRouterWarps = 4;
constexpr int64_t kRouterSharedBytes = 48 << 10;
constexpr int64_t kExpertsMost = kRouterSharedBytes / 4;

template <typename T>
struct RouterTopk {
  Rows<const T> logits;
  Rows<int32_t> ids;
  Rows<float> weights;
  int64_t rows;
  int experts, k;
  bool normalise, round_to_bf16;
};

// ids[r][s], weights[r][s]: the k largest logits in descending order and round_to(p / sum of the k, or p), p = softmax
// over all. One warp for each row. A lane owns experts lane, lane + 32, ... and knows its best; k times the warp finds
// the best of all by one butterfly and its owner looks for its next. Shared memory: [warps][experts] words, of which
// each is touched by one lane only. Reads the logits once; bound by the latency of the k rounds.
template <typename T>
__global__ void __launch_bounds__(kRouterWarps* kWarp) router_topk_kernel(RouterTopk<T> a) {
  after_previous();
  extern __shared__ uint32_t shared[];
  const int lane = threadIdx.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  uint32_t* ordered = shared + threadIdx.y * a.experts;
  const T* logits = a.logits.at(row);
  float largest = -INFINITY;
  uint64_t best = 0;
#pragma unroll 8
  for (int e = lane; e < a.experts; e += kWarp) {
    const float logit = load_float(logits + e);
    largest = fmaxf(largest, logit);
    ordered[e] = in_order(logit);
    best = larger(best, selection_key(ordered[e], e));
  }
  largest = warp_max(largest);
  // expf, not canonical_exp: a NaN among the logits must reach every weight, and -inf weighs nothing.
  float sum = 0;
#pragma unroll 4
  for (int e = lane; e < a.experts; e += kWarp) sum += expf(score_of(ordered[e]) - largest);
  sum = warp_sum(sum);

  int32_t* ids = a.ids.at(row);
  float* weights = a.weights.at(row);
  float chosen = 0;
  for (int s = 0; s < a.k; ++s) {
    const uint64_t winner = warp_largest(best);
    const int id = id_of(winner);
    const float p = expf(score_of(ordered_of(winner)) - largest) / sum;
    chosen += p;
    if (lane == s % kWarp) {
      ids[s] = id;
      weights[s] = p;
    }
    if (lane != id % kWarp) continue;
    ordered[id] = kTaken;
    best = 0;
#pragma unroll 8
    for (int e = lane; e < a.experts; e += kWarp) best = larger(best, selection_key(ordered[e], e));
  }
  const Rounding rounding = a.round_to_bf16 ? Rounding::reference : Rounding::fused;
  for (int s = lane; s < a.k; s += kWarp)  // each lane what it wrote itself
    weights[s] = rnd<bf16>(a.normalise ? weights[s] / chosen : weights[s], rounding);
}

// --- combination ---

constexpr int kSlotsAtOnce = 5;  // parts that a thread has under way; two rounds for 10 experts

// routed = sum over slots s ascending with present[r][s] of weights[r][s] * parts[r * slots + s][j] by FMA; out =
// rnd!(rnd(routed) + rnd(rnd(sigmoid(gate[r])) * shared[r][j])), or rnd!(routed). A function object for map_rows():
// reads the parts that are present and shared, writes out; bound by memory.
template <typename Part, typename T, Rounding kRounding>
struct MoeCombine {
  Rows<const Part> parts;
  Rows<const float> weights;
  Rows<const uint8_t> present;  // without data: all
  AnyRows shared, gate;         // without data: none, 1
  Rows<T> out;
  int64_t slots;

  template <typename P>
  __device__ void operator()(const P& p) const {
    Vector<kMapWidth> total;
    for (int64_t first = 0; first < slots; first += kSlotsAtOnce) add_slots(p, first, total);
    if (shared.data != nullptr) {
      const float share = gate.data != nullptr ? rnd<T>(sigmoid(gate.load(p.row, 0)), kRounding) : 1.0f;
      const auto v = p.load(shared, p.row);
#pragma unroll
      for (int i = 0; i < kMapWidth; ++i) total[i] = rnd<T>(total[i], kRounding) + rnd<T>(share * v[i], kRounding);
    }
    p.store(out.at(p.row), total);
  }

  template <typename P>
  __device__ void add_slots(const P& p, int64_t first, Vector<kMapWidth>& total) const {
    bool there[kSlotsAtOnce];
    float weight[kSlotsAtOnce];
    Vector<kMapWidth> part[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      there[i] = first + i < slots && (present.data == nullptr || present.at(p.row)[first + i] != 0);
      weight[i] = there[i] ? weights.at(p.row)[first + i] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i)
      if (there[i]) part[i] = p.load(parts.at(p.row * slots + first + i));
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (!there[i]) continue;
#pragma unroll
      for (int j = 0; j < kMapWidth; ++j) total[j] = fmaf(weight[i], part[i][j], total[j]);
    }
  }
};

}  // namespace

void CudaOps::execute(const RouterTopkArgs& a) {
  const int64_t rows = a.logits.dim(0), experts = a.logits.dim(1);
  OFL_ASSERT(experts <= kExpertsMost);
  const int64_t bytes = experts * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t warps = kRouterWarps * bytes <= kRouterSharedBytes ? kRouterWarps : 1;
  with_float_type(a.logits.dtype(), [&](auto type) {
    using T = decltype(type);
    launch_early(router_topk_kernel<T>, dim3(blocks_for(rows, warps)), dim3(kWarp, static_cast<unsigned>(warps)),
                 warps * bytes, stream_,
                 RouterTopk<T>{.logits = rows_of<const T>(a.logits),
                               .ids = rows_of<int32_t>(a.ids),
                               .weights = rows_of<float>(a.weights),
                               .rows = rows,
                               .experts = static_cast<int>(experts),
                               .k = static_cast<int>(a.ids.dim(1)),
                               .normalise = a.normalise,
                               .round_to_bf16 = a.round_to == DType::bf16});
  });
}

void CudaOps::execute(const MoeCombineArgs& a) {
  const int64_t rows = a.out.dim(0), n = a.out.dim(1);
  with_float_type(a.parts.dtype(), [&](auto part) {
    with_rounding(a.out.dtype(), a.rounding, [&](auto type, auto rounding) {
      using Part = decltype(part);
      using T = decltype(type);
      map_rows(MoeCombine<Part, T, decltype(rounding)::value>{.parts = rows_of<const Part>(a.parts),
                                                              .weights = rows_of<const float>(a.weights),
                                                              .present = rows_of<const uint8_t>(a.present),
                                                              .shared = any_rows_of(a.shared),
                                                              .gate = any_rows_of(a.gate),
                                                              .out = rows_of<T>(a.out),
                                                              .slots = a.weights.dim(1)},
               rows, 1, n, whole_vectors(kMapWidth, n, {&a.parts, &a.shared, &a.out}), stream_);
    });
  });
}

}  // namespace offload::cuda
