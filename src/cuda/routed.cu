// swiglu_routed: the expert FFN with its routing on the device. Up to kCanonicalRowsMax rows, every slot is a run of
// its own; more rows are sorted by expert first, and short runs go through the canonical kernels, long ones through
// tiles.
#include "cuda/cuda_ops.h"
#include "cuda/experts.cuh"
#include "cuda/gemm_launch.h"

namespace offload::cuda {
namespace {

// Where the experts lie.
struct Slab {
  const char* data;
  int64_t row_bytes, up_bytes;  // of a row; of its part before down
  const int32_t* slots;         // [experts]

  __device__ bool holds(int32_t e) const { return slots[e] >= 0; }
  __device__ const char* gate_up(int32_t e) const { return data + slots[e] * row_bytes; }
  __device__ const char* down(int32_t e) const { return gate_up(e) + up_bytes; }
};

Slab slab_of(const SwigluRoutedArgs& a) {
  const int64_t element_bytes = dtype_bytes(a.slab.dtype());
  return {.data = data_of<const char>(a.slab),
          .row_bytes = a.slab.stride(0) * element_bytes,
          .up_bytes = 2 * a.intermediate * a.x.dim(1) * element_bytes,
          .slots = a.slots.as<int32_t>()};
}

// --- few rows ---

// Slot `run` of ids [rows, k] as a run of one row.
struct SlotRuns {
  static constexpr bool kAllCounts = false;
  const int32_t* ids;
  Slab slab;
  uint8_t* present;
  int32_t slots, k;

  __device__ int size() const { return slots; }
  __device__ CanonicalRun at(int run) const {
    const int32_t e = ids[run];
    if (!slab.holds(e)) return {};
    return {.gate_up = slab.gate_up(e), .down = slab.down(e), .row = run / k, .h_row = run, .count = 1};
  }
  __device__ void mark(int run) const { present[run] = slab.holds(ids[run]); }
};

// --- many rows ---

// The slots sorted by expert, and the tiles of the long runs. Device memory.
struct SortedRuns {
  int32_t* part_counts;        // [kSortParts][experts], then where in the lists the part's slots begin
  int32_t* counts;             // [experts]
  int32_t* begins;             // [experts], of the lists below
  int32_t* short_runs;         // [experts], those of up to canonical_run_rows()
  int32_t* totals;             // tiles, short runs
  int32_t *x_rows, *out_rows;  // [slots], by expert, then ascending; as far as experts are here
  GemmRun *gate_up, *down;     // [experts]
  GemmTile* tiles;
};

struct SortCall {
  const int32_t* ids;  // [slots]
  Slab slab;
  uint8_t* present;  // [slots]
  SortedRuns sorted;
  int32_t *gate_up_exponents, *down_exponents;  // of all experts, or null
  int64_t inter, hidden;
  int32_t slots, experts, k, tile_rows, rows_canonical;
};

constexpr int kSortThreads = 1024;
constexpr int kExpertsMost = 4096;
// The slots are counted and placed in so many parts, one warp each.
constexpr int kSortParts = 64;

// Counts this warp's part of the slots by expert in `counters`, in shared memory, and calls function(slot, count of its
// expert so far) for those whose expert is here, absent(slot) for the others.
template <typename Function, typename Absent>
__device__ inline void count_part(const SortCall& a, int32_t* counters, const Function& function,
                                  const Absent& absent) {
  const int lane = static_cast<int>(threadIdx.x);
  const int part = (a.slots + kSortParts * kWarp - 1) / (kSortParts * kWarp) * kWarp;
  const int first = static_cast<int>(blockIdx.x) * part, last = min(a.slots, first + part);
  for (int base = first; base < last; base += kWarp) {
    const int i = base + lane;
    const int32_t e = i < last ? a.ids[i] : -1;
    const bool is_here = e >= 0 && a.slab.holds(e);
    const unsigned same = __match_any_sync(kAllLanes, is_here ? e : -1), before = same & ((1u << lane) - 1);
    const int32_t at = is_here ? counters[e] + __popc(before) : 0;
    __syncwarp();  // all have read their counter
    if (is_here && before == 0) counters[e] += __popc(same);
    __syncwarp();
    if (is_here)
      function(i, at);
    else if (e >= 0)
      absent(i);
  }
}

// part_counts[part][expert], and what is present. Grid kSortParts, one warp.
__global__ void __launch_bounds__(kWarp) count_slots_kernel(const SortCall a) {
  __shared__ int32_t counts[kExpertsMost];
  for (int e = static_cast<int>(threadIdx.x); e < a.experts; e += kWarp) counts[e] = 0;
  __syncwarp();
  count_part(
      a, counts, [&](int i, int32_t) { a.present[i] = 1; }, [&](int i) { a.present[i] = 0; });
  for (int e = static_cast<int>(threadIdx.x); e < a.experts; e += kWarp)
    a.sorted.part_counts[static_cast<int>(blockIdx.x) * a.experts + e] = counts[e];
}

// Exclusive sums of values[0..count) in place, in shared memory; returns the total. All threads of the block call.
__device__ int32_t exclusive_sums(int32_t* values, int count) {
  __shared__ int32_t parts[kSortThreads];
  const int thread = static_cast<int>(threadIdx.x), each = (count + kSortThreads - 1) / kSortThreads;
  int32_t sum = 0;
  for (int i = thread * each; i < min(count, (thread + 1) * each); ++i) sum += values[i];
  parts[thread] = sum;
  __syncthreads();
  for (int step = 1; step < kSortThreads; step *= 2) {
    const int32_t left = thread >= step ? parts[thread - step] : 0;
    __syncthreads();
    parts[thread] += left;
    __syncthreads();
  }
  int32_t running = parts[thread] - sum;
  for (int i = thread * each; i < min(count, (thread + 1) * each); ++i) {
    const int32_t value = values[i];
    values[i] = running;
    running += value;
  }
  const int32_t total = parts[kSortThreads - 1];
  __syncthreads();
  return total;
}

// Counts, places and tiles of the experts' runs, and in part_counts where each part's slots begin: one block.
__global__ void __launch_bounds__(kSortThreads) plan_runs_kernel(const SortCall a) {
  __shared__ int32_t counts[kExpertsMost], places[kExpertsMost];
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < a.experts; e += kSortThreads) {
    int32_t running = 0;
#pragma unroll 16
    for (int part = 0; part < kSortParts; ++part) running += a.sorted.part_counts[part * a.experts + e];
    counts[e] = places[e] = running;
  }
  __syncthreads();
  exclusive_sums(places, a.experts);
  for (int e = thread; e < a.experts; e += kSortThreads) {
    // An expert that is not here has no rows, and nobody looks at its weights.
    GemmRun gate_up{.w = a.slab.gate_up(e), .w_exponents = nullptr, .first = places[e], .count = counts[e]};
    GemmRun down{.w = a.slab.down(e), .w_exponents = nullptr, .first = places[e], .count = counts[e]};
    if (a.gate_up_exponents != nullptr) {
      gate_up.w_exponents = a.gate_up_exponents + e * 2 * a.inter;
      down.w_exponents = a.down_exponents + e * a.hidden;
    }
    a.sorted.gate_up[e] = gate_up;
    a.sorted.down[e] = down;
    a.sorted.counts[e] = counts[e];
    a.sorted.begins[e] = places[e];
    int32_t running = places[e];
#pragma unroll 16
    for (int part = 0; part < kSortParts; ++part) {
      int32_t& at = a.sorted.part_counts[part * a.experts + e];
      const int32_t count = at;
      at = running;
      running += count;
    }
  }
  __syncthreads();
  for (int e = thread; e < a.experts; e += kSortThreads)
    places[e] = counts[e] > a.rows_canonical ? (counts[e] + a.tile_rows - 1) / a.tile_rows : 0;
  __syncthreads();
  const int32_t tiles = exclusive_sums(places, a.experts);
  for (int e = thread; e < a.experts; e += kSortThreads)
    for (int t = 0; counts[e] > a.rows_canonical && t * a.tile_rows < counts[e]; ++t)
      a.sorted.tiles[places[e] + t] = {e, t * a.tile_rows};
  __syncthreads();
  const auto is_short = [&](int e) { return counts[e] > 0 && counts[e] <= a.rows_canonical; };
  for (int e = thread; e < a.experts; e += kSortThreads) places[e] = is_short(e) ? 1 : 0;
  __syncthreads();
  const int32_t short_runs = exclusive_sums(places, a.experts);
  for (int e = thread; e < a.experts; e += kSortThreads)
    if (is_short(e)) a.sorted.short_runs[places[e]] = e;
  if (thread == 0) {
    a.sorted.totals[0] = tiles;
    a.sorted.totals[1] = short_runs;
  }
}

// The rows of every expert in ascending order. Grid kSortParts, one warp.
__global__ void __launch_bounds__(kWarp) place_rows_kernel(const SortCall a) {
  __shared__ int32_t next[kExpertsMost];
  const int lane = static_cast<int>(threadIdx.x), part = static_cast<int>(blockIdx.x);
  for (int e = lane; e < a.experts; e += kWarp) next[e] = a.sorted.part_counts[part * a.experts + e];
  __syncwarp();
  count_part(
      a, next,
      [&](int i, int32_t place) {
        a.sorted.x_rows[place] = i / a.k;
        a.sorted.out_rows[place] = i;
      },
      [](int) {});
}

constexpr int64_t kShortRunsAtOnce = 64;

// The short ones of the sorted runs, an expert each.
struct ShortRuns {
  static constexpr bool kAllCounts = false;
  SortedRuns sorted;

  __device__ int size() const { return sorted.totals[1]; }
  __device__ CanonicalRun at(int run) const {
    const int32_t e = sorted.short_runs[run], begin = sorted.begins[e];
    return {.gate_up = sorted.gate_up[e].w,
            .down = sorted.down[e].w,
            .x_rows = sorted.x_rows + begin,
            .out_rows = sorted.out_rows + begin,
            .h_row = run * static_cast<int32_t>(kCanonicalRowsMax),
            .count = sorted.counts[e]};
  }
  __device__ void mark(int) const {}
};

bool is_aligned(const SwigluRoutedArgs& a) {
  const int64_t hidden = a.x.dim(1);
  return reinterpret_cast<uintptr_t>(a.x.data()) % 16 == 0 && a.x.stride(0) * dtype_bytes(a.x.dtype()) % 16 == 0 &&
         hidden % 8 == 0 && a.intermediate % 8 == 0 && reinterpret_cast<uintptr_t>(a.slab.data()) % 16 == 0 &&
         a.slab.stride(0) * dtype_bytes(a.slab.dtype()) % 16 == 0;
}

// Of runs of more than kCanonicalRowsMax rows.
Math math_of(const SwigluRoutedArgs& a) {
  return product_math(a.math, a.x.dtype(), a.slab.dtype(), kCanonicalRowsMax + 1);
}

GemmKernel kernel_of(const SwigluRoutedArgs& a, bool aligned, const DeviceCaps& caps) {
  return plan_gemm({.m = kCanonicalRowsMax + 1,
                    .n = a.intermediate,
                    .k = a.x.dim(1),
                    .x = a.x.dtype(),
                    .w = a.slab.dtype(),
                    .out = a.out.dtype(),
                    .math = math_of(a),
                    .aligned = aligned,
                    .grouped = true},
                   caps);
}

// What the call needs beside its tensors.
struct RoutedScratch {
  Tensor h, lists, sorted_h, x_scaled, x_exponents, h_exponents, gate_up_exponents, down_exponents;
  GemmKernel kernel;
  GemmTileShape shape;
  int64_t tiles_most = 0;

  RoutedScratch(Arena& arena, const SwigluRoutedArgs& a, bool aligned, const DeviceCaps& caps)
      : kernel(kernel_of(a, aligned, caps)) {
    const int64_t slots = a.ids.elements(), experts = a.slots.dim(0), inter = a.intermediate;
    if (a.x.dim(0) <= kCanonicalRowsMax) {
      h = arena.take(DType::f32, {slots, inter});
      return;
    }
    h = arena.take(DType::f32, {experts * kCanonicalRowsMax, inter});
    shape = plan_tile(kernel, slots / experts, caps);
    tiles_most = slots / shape.rows + std::min(experts, slots);
    lists = arena.take(DType::u8, {list_bytes(slots, experts)});
    sorted_h = arena.take(a.x.dtype(), {slots, inter});
    if (prepares_x(kernel, math_of(a))) {
      x_exponents = arena.take(DType::i32, {a.x.dim(0)});
      h_exponents = arena.take(DType::i32, {slots});
    }
    if (kernel == GemmKernel::mma_scaled) x_scaled = arena.take(DType::f16, {a.x.dim(0), a.x.dim(1)});
    if (!needs_exponents(kernel, math_of(a))) return;
    gate_up_exponents = arena.take(DType::i32, {experts, 2 * inter});
    down_exponents = arena.take(DType::i32, {experts, a.x.dim(1)});
  }

  SortedRuns sorted(int64_t slots, int64_t experts) const {
    SortedRuns s;
    auto* at = static_cast<std::byte*>(lists.data());
    const auto next = [&](auto*& list, int64_t count) {
      list = reinterpret_cast<std::decay_t<decltype(list)>>(at);
      at += count * static_cast<int64_t>(sizeof(*list));
    };
    next(s.gate_up, experts);
    next(s.down, experts);
    next(s.tiles, tiles_most);
    next(s.part_counts, kSortParts * experts);
    next(s.counts, experts);
    next(s.begins, experts);
    next(s.short_runs, experts);
    next(s.totals, 2);
    next(s.x_rows, slots);
    next(s.out_rows, slots);
    return s;
  }

 private:
  int64_t list_bytes(int64_t slots, int64_t experts) const {
    return 2 * experts * static_cast<int64_t>(sizeof(GemmRun)) + tiles_most * static_cast<int64_t>(sizeof(GemmTile)) +
           4 * ((kSortParts + 3) * experts + 2 + 2 * slots);
  }
};

void run_long(const SwigluRoutedArgs& a, const RoutedScratch& scratch, const SortedRuns& sorted, cudaStream_t stream) {
  const int64_t slots = a.ids.elements(), experts = a.slots.dim(0), hidden = a.x.dim(1), inter = a.intermediate;
  GroupedGemm p{.x = a.x.data(),
                .x_stride = a.x.stride(0),
                .x_rows = sorted.x_rows,
                .runs = sorted.gate_up,
                .tiles = sorted.tiles,
                .tile_count = sorted.totals,
                .n = inter,
                .k = hidden,
                .out = scratch.sorted_h.data(),
                .out_stride = inter,
                .rounding = a.rounding,
                .math = math_of(a)};
  const bool converts = needs_exponents(scratch.kernel, p.math);
  prepare_x(p, scratch.kernel, a.x.dim(0), slots, data_of<int32_t>(scratch.x_exponents),
            data_of<void>(scratch.x_scaled), stream);
  if (converts) {
    launch_run_exponents(p.runs, experts, 2 * inter, hidden, p.math, scratch.gate_up_exponents.as<int32_t>(), 2 * inter,
                         stream);
  }
  launch_grouped(p, scratch.kernel, {a.x.dtype(), a.slab.dtype(), a.x.dtype(), true}, scratch.tiles_most, scratch.shape,
                 stream);

  p.x = scratch.sorted_h.data();
  p.x_stride = p.k = inter;
  p.x_rows = nullptr;
  p.runs = sorted.down;
  p.n = hidden;
  p.out = a.out.data();
  p.out_stride = a.out.stride(0);
  p.out_rows = sorted.out_rows;
  prepare_x(p, scratch.kernel, slots, slots, data_of<int32_t>(scratch.h_exponents), scratch.sorted_h.data(), stream);
  if (converts) {
    launch_run_exponents(p.runs, experts, hidden, inter, p.math, scratch.down_exponents.as<int32_t>(), hidden, stream);
  }
  launch_grouped(p, scratch.kernel, {a.x.dtype(), a.slab.dtype(), a.out.dtype(), false}, scratch.tiles_most,
                 scratch.shape, stream);
}

}  // namespace

int64_t CudaOps::scratch_bytes(const SwigluRoutedArgs& a) const {
  if (a.ids.elements() == 0) return 0;
  Arena arena;
  // The plan does not know the pointers: whichever kernel needs more.
  for (const bool aligned : {false, true}) {
    const ArenaScope scope(arena);
    RoutedScratch(arena, a, aligned, caps_);
  }
  return arena.peak_bytes();
}

void CudaOps::execute(const SwigluRoutedArgs& a) {
  const int64_t slots = a.ids.elements(), experts = a.slots.dim(0), hidden = a.x.dim(1);
  if (slots == 0) return;
  OFL_ASSERT(experts <= kExpertsMost && slots <= INT32_MAX);
  Arena arena = scratch_arena();
  const bool aligned = is_aligned(a);
  const RoutedScratch scratch(arena, a, aligned, caps_);
  const ExpertShapes shapes{.x = a.x,
                            .out = a.out,
                            .intermediate = a.intermediate,
                            .weights = a.slab.dtype(),
                            .multiprocessors = caps_.multiprocessors};
  if (a.x.dim(0) <= kCanonicalRowsMax) {
    const SlotRuns runs{.ids = a.ids.as<int32_t>(),
                        .slab = slab_of(a),
                        .present = a.present.as<uint8_t>(),
                        .slots = static_cast<int32_t>(slots),
                        .k = static_cast<int32_t>(a.ids.dim(1))};
    return launch_canonical(runs, slots, 1, shapes, a.rounding, aligned, scratch.h.as<float>(), stream_);
  }
  const int64_t rows_canonical = canonical_run_rows(scratch.kernel, math_of(a), a.x.dim(0));
  const SortCall call{.ids = a.ids.as<int32_t>(),
                      .slab = slab_of(a),
                      .present = a.present.as<uint8_t>(),
                      .sorted = scratch.sorted(slots, experts),
                      .gate_up_exponents = data_of<int32_t>(scratch.gate_up_exponents),
                      .down_exponents = data_of<int32_t>(scratch.down_exponents),
                      .inter = a.intermediate,
                      .hidden = hidden,
                      .slots = static_cast<int32_t>(slots),
                      .experts = static_cast<int32_t>(experts),
                      .k = static_cast<int32_t>(a.ids.dim(1)),
                      .tile_rows = static_cast<int32_t>(scratch.shape.rows),
                      .rows_canonical = static_cast<int32_t>(rows_canonical)};
  launch(count_slots_kernel, kSortParts, kWarp, 0, stream_, call);
  launch(plan_runs_kernel, 1, kSortThreads, 0, stream_, call);
  launch(place_rows_kernel, kSortParts, kWarp, 0, stream_, call);
  if (rows_canonical > 0)
    launch_canonical(ShortRuns{call.sorted}, std::min(experts, kShortRunsAtOnce), kCanonicalRowsMax, shapes, a.rounding,
                     aligned, scratch.h.as<float>(), stream_);
  run_long(a, scratch, call.sorted, stream_);
}

}  // namespace offload::cuda
