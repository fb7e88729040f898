// Matrix products: the canonical small-row product, the packed prefill GEMM, and the experts' FFN that uses both.
//
// Canonical: bound by the memory that streams the weights. A few rows of x are converted and permuted once; the team
// splits the output rows. GEMM: x is packed once per block of rows into panels of F32, shared by the team; each thread
// takes tiles of output columns, for which it converts one panel of weights at a time (half an L1 cache) and runs it
// against all panels of x. Every output sums blocks of kGemmBlockK products in ascending order. In maths other than
// native both operands are converted on their way into the panels (cpu_product_math.h).
#include <utility>

#include "core/canonical.h"
#include "cpu/cpu_ops.h"
#include "cpu/cpu_ops_rows.h"
#include "cpu/cpu_product_math.h"

namespace offload::cpu {
namespace {

// Rows of x that one pass over the weights serves; a multiple of every level's gemm_rows, or nearly, so that 512 rows
// need one pass. Beyond it the packed block would leave the caches.
constexpr int64_t kGemmBlockRows = 588;
// Rows that one canonical pass over the experts holds in scratch; a decode step of 8 tokens with top-10 routing is one.
constexpr int64_t kCanonicalBatchRows = 128;
constexpr int64_t kColumnChunk = 64;  // output columns of one canonical item, at most

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
int64_t canonical_padded(int64_t k) {
  return round_up(k, kCanonicalBlock);
}

// rows of x in blocks of equal size (but for the last).
int64_t block_rows(int64_t rows) {
  const int64_t blocks = (rows + kGemmBlockRows - 1) / kGemmBlockRows;
  return (rows + blocks - 1) / blocks;
}

struct Weights {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int64_t columns = 0;  // output columns, the rows of the matrix
  int64_t k = 0;

  const void* at(int64_t column, int64_t l = 0) const {
    return static_cast<const std::byte*>(data) + (column * k + l) * dtype_bytes(dtype);
  }
};

// --- canonical ---

// Output columns per item: enough work per item to stream, enough items to share.
int64_t canonical_chunk(int64_t columns, int64_t k, int threads) {
  const int64_t streamed = std::max<int64_t>(4, 65536 / std::max<int64_t>(1, k));
  const int64_t shared = std::max<int64_t>(4, columns / (8 * int64_t{threads}));
  return std::min({kColumnChunk, streamed, shared}) / 4 * 4;
}

// out[m][0..count) for `rows` permuted rows of x.
void canonical_product(const CpuKernels& kernels, const float* x, int64_t rows, const Weights& w, int64_t begin,
                       int64_t count, float* out, int64_t out_stride) {
  const int64_t x_stride = canonical_padded(w.k);
  if (w.dtype == DType::bf16)
    kernels.canonical_bf16(x, x_stride, rows, static_cast<const uint16_t*>(w.at(begin)), w.k, count, out, out_stride);
  else
    kernels.canonical_f32(x, x_stride, rows, static_cast<const float*>(w.at(begin)), w.k, count, out, out_stride);
}

// Row of t at `offset`, k elements -> permuted F32.
void permute_row(const CpuKernels& kernels, const Tensor& t, int64_t offset, int64_t k, float* out) {
  RowBuffer x;
  static_assert(kRowChunk % kCanonicalBlock == 0);
  for_each_chunk(k, [&](int64_t begin, int64_t count) {
    load_row(kernels, t, offset + begin, x, count);
    kernels.canonical_permute(x, begin, count, canonical_padded(k), out);
  });
}

// --- prefill GEMM ---

// Scratch of the GEMM: `packed` is shared, the others are per thread.
struct GemmScratch {
  float* packed = nullptr;  // rows x k, blocks of kGemmBlockK, each block panels of gemm_rows
  float* panels = nullptr;  // [threads][kGemmBlockK][gemm_columns]
  float* tiles = nullptr;   // [threads][tiles_per_item][rows rounded up][gemm_columns]
  // Of maths other than native; taken whatever the math, so that a plan for one covers all.
  int32_t* x_exponents = nullptr;  // [rows]
  int32_t* w_exponents = nullptr;  // [threads][gemm_columns]
  float* operands = nullptr;       // [threads][gemm_columns][kGemmBlockK]
  int64_t panel_floats = 0;
  int64_t tile_floats = 0;
  int64_t tiles_per_item = 0;

  GemmScratch() = default;
  GemmScratch(Arena& arena, const CpuKernels& kernels, int threads, int64_t rows, int64_t k, int64_t tiles_of_item)
      : panel_floats(kGemmBlockK * kernels.gemm_columns),
        tile_floats(round_up(rows, kernels.gemm_rows) * kernels.gemm_columns),
        tiles_per_item(tiles_of_item) {
    packed = static_cast<float*>(arena.take(DType::f32, {round_up(rows, kernels.gemm_rows) * k}).data());
    panels = static_cast<float*>(arena.take(DType::f32, {threads * panel_floats}).data());
    tiles = static_cast<float*>(arena.take(DType::f32, {threads * tiles_per_item * tile_floats}).data());
    x_exponents = static_cast<int32_t*>(arena.take(DType::i32, {rows}).data());
    w_exponents = static_cast<int32_t*>(arena.take(DType::i32, {threads * kernels.gemm_columns}).data());
    operands = static_cast<float*>(arena.take(DType::f32, {threads * panel_floats}).data());
  }
  float* tile(int thread, int64_t index) const { return tiles + (thread * tiles_per_item + index) * tile_floats; }
};

// Packs `rows` rows of x, row i at element row_at(i), into scratch.packed, and notes their exponents.
template <typename RowAt>
void pack_rows(const CpuKernels& kernels, int threads, const ProductMath& math, const Tensor& x, int64_t rows,
               int64_t k, const RowAt& row_at, const GemmScratch& scratch) {
  const int64_t height = kernels.gemm_rows, panels = (rows + height - 1) / height;
  for_each_item(threads, panels, rows * k >= 32768, [&](int64_t panel, int) {
    RowBuffer buffer;
    static_assert(kRowChunk >= kGemmBlockK);
    if (!math.is_native())
      for (int64_t row = panel * height; row < std::min(rows, (panel + 1) * height); ++row)
        scratch.x_exponents[row] = math.exponent(element_at(x, row_at(row)), x.dtype(), k);
    for (int64_t begin = 0; begin < k; begin += kGemmBlockK) {
      const int64_t depth = std::min(kGemmBlockK, k - begin);
      float* to = scratch.packed + begin * panels * height + panel * height * depth;
      for (int64_t i = 0; i < height; ++i) {
        const int64_t row = panel * height + i;
        if (row >= rows)
          std::fill_n(buffer.f, depth, 0.0f);
        else if (math.is_native())
          load_row(kernels, x, row_at(row) + begin, buffer, depth);
        else
          math.load(element_at(x, row_at(row)), x.dtype(), k, begin, depth, scratch.x_exponents[row], buffer);
        for (int64_t l = 0; l < depth; ++l) to[l * height + i] = buffer.f[l];
      }
    }
  });
}

// Up to gemm_columns columns of w in another math than native: elements [at, at + depth) of each into the panel.
void pack_converted(const CpuKernels& kernels, const GemmScratch& scratch, int thread, const ProductMath& math,
                    const Weights& w, int64_t begin, int64_t count, int64_t at, int64_t depth, float* panel_of_w) {
  int32_t* exponents = scratch.w_exponents + thread * kernels.gemm_columns;
  float* operands = scratch.operands + thread * scratch.panel_floats;
  for (int64_t c = 0; c < count; ++c) {
    const void* column = w.at(begin + c);
    if (at == 0) exponents[c] = math.exponent(column, w.dtype, w.k);
    math.load(column, w.dtype, w.k, at, depth, exponents[c], operands + c * depth);
  }
  kernels.pack_columns_f32(operands, depth, count, depth, panel_of_w);
}

// tile [rows rounded up][gemm_columns] = packed rows x columns [begin, begin + count) of w.
void gemm_tile(const CpuKernels& kernels, const GemmScratch& scratch, int thread, const ProductMath& math, int64_t rows,
               const Weights& w, int64_t begin, int64_t count, float* tile) {
  const int64_t height = kernels.gemm_rows, width = kernels.gemm_columns, panels = (rows + height - 1) / height;
  float* panel_of_w = scratch.panels + thread * scratch.panel_floats;
  for (int64_t at = 0; at < w.k; at += kGemmBlockK) {
    const int64_t depth = std::min(kGemmBlockK, w.k - at);
    if (!math.is_native())
      pack_converted(kernels, scratch, thread, math, w, begin, count, at, depth, panel_of_w);
    else if (w.dtype == DType::bf16)
      kernels.pack_columns_bf16(static_cast<const uint16_t*>(w.at(begin, at)), w.k, count, depth, panel_of_w);
    else
      kernels.pack_columns_f32(static_cast<const float*>(w.at(begin, at)), w.k, count, depth, panel_of_w);
    const float* packed = scratch.packed + at * panels * height;
    for (int64_t panel = 0; panel < panels; ++panel)
      kernels.gemm(packed + panel * height * depth, panel_of_w, depth, tile + panel * height * width, width, at > 0);
  }
  if (math.is_native()) return;
  for (int64_t i = 0; i < rows; ++i)
    math.finish(tile + i * width, count, scratch.x_exponents[i], scratch.w_exponents + thread * width);
}

}  // namespace

// --- linear ---

namespace {

struct LinearScratch {
  float* permuted = nullptr;  // [up to kCanonicalRowsMax][k padded]
  GemmScratch gemm;

  LinearScratch(Arena& arena, const CpuKernels& kernels, int threads, int64_t rows, int64_t k) {
    const int64_t small = std::min(rows, kCanonicalRowsMax) * canonical_padded(k);
    permuted = static_cast<float*>(arena.take(DType::f32, {small}).data());
    if (rows > kCanonicalRowsMax) gemm = GemmScratch(arena, kernels, threads, std::min(rows, kGemmBlockRows), k, 1);
  }
};

}  // namespace

int64_t CpuOps::scratch_bytes(const LinearArgs& a) const {
  Arena arena;
  LinearScratch(arena, kernels_, threads_, a.x.dim(0), a.x.dim(1));
  return arena.peak_bytes();
}

void CpuOps::execute(const LinearArgs& a) {
  const int64_t rows = a.x.dim(0), k = a.x.dim(1);
  if (rows == 0 || a.w.dim(0) == 0) return;
  const Weights w{a.w.data(), a.w.dtype(), a.w.dim(0), k};
  Arena arena = scratch_arena();
  const LinearScratch scratch(arena, kernels_, threads_, rows, k);
  if (rows <= kCanonicalRowsMax) {
    for (int64_t m = 0; m < rows; ++m)
      permute_row(kernels_, a.x, row_offset(a.x, m), k, scratch.permuted + m * canonical_padded(k));
    const int64_t chunk = canonical_chunk(w.columns, k, threads_);
    for_each_item(threads_, (w.columns + chunk - 1) / chunk, w.columns * k >= 65536, [&](int64_t item, int) {
      float sums[kCanonicalRowsMax][kColumnChunk];
      const int64_t begin = item * chunk, count = std::min(chunk, w.columns - begin);
      canonical_product(kernels_, scratch.permuted, rows, w, begin, count, &sums[0][0], kColumnChunk);
      for (int64_t m = 0; m < rows; ++m) store_row(kernels_, sums[m], a.out, row_offset(a.out, m) + begin, count);
    });
    return;
  }
  const ProductMath math(product_math(a.math, a.x.dtype(), w.dtype, rows));
  const int64_t block = block_rows(rows), width = kernels_.gemm_columns;
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t m = std::min(block, rows - first);
    const auto row_at = [&](int64_t i) { return row_offset(a.x, first + i); };
    pack_rows(kernels_, threads_, math, a.x, m, k, row_at, scratch.gemm);
    for_each_item(threads_, (w.columns + width - 1) / width, true, [&](int64_t item, int thread) {
      const int64_t begin = item * width, count = std::min(width, w.columns - begin);
      float* tile = scratch.gemm.tile(thread, 0);
      gemm_tile(kernels_, scratch.gemm, thread, math, m, w, begin, count, tile);
      for (int64_t i = 0; i < m; ++i)
        store_row(kernels_, tile + i * width, a.out, row_offset(a.out, first + i) + begin, count);
    });
  }
}

// --- experts ---

namespace {

struct ExpertsScratch {
  float* x_permuted = nullptr;  // [batch rows][hidden padded]
  float* h = nullptr;           // [rows][intermediate]
  float* h_permuted = nullptr;  // [batch rows][intermediate padded]
  GemmScratch gemm;

  ExpertsScratch(Arena& arena, const CpuKernels& kernels, int threads, int64_t rows, int64_t hidden,
                 int64_t intermediate) {
    const int64_t batch = std::min(rows, kCanonicalBatchRows), block = std::min(rows, kGemmBlockRows);
    const auto take = [&](int64_t floats) { return static_cast<float*>(arena.take(DType::f32, {floats}).data()); };
    x_permuted = take(batch * canonical_padded(hidden));
    h_permuted = take(batch * canonical_padded(intermediate));
    h = take(block * intermediate);
    if (rows > kCanonicalRowsMax) gemm = GemmScratch(arena, kernels, threads, block, std::max(hidden, intermediate), 2);
  }
};

// What the parts of one call share.
struct ExpertsCall {
  const SwigluExpertsArgs& a;
  const CpuKernels& kernels;
  int threads;
  const ExpertsScratch& scratch;
  Rnd rnd;

  int64_t hidden() const { return a.x.dim(1); }
  int64_t inter() const { return a.intermediate; }
  Weights gate_up(const ExpertRun& run) const { return {run.gate_up, a.weight_dtype, 2 * inter(), hidden()}; }
  Weights down(const ExpertRun& run) const { return {run.down, a.weight_dtype, hidden(), inter()}; }
  int64_t x_at(int64_t i) const { return row_offset(a.x, a.rows[static_cast<size_t>(i)]); }
  int64_t out_at(int64_t i) const { return row_offset(a.out, a.out_rows[static_cast<size_t>(i)]); }

  // gate = rnd!(rnd(silu(rnd(gate))) * rnd(up)), kept as F32 numbers of A. Both padded to kLanes.
  void swiglu(float* gate, float* up, int64_t n) const {
    rnd(gate, n);
    rnd(up, n);
    kernels.silu(gate, n);
    rnd(gate, n);
    kernels.mul(gate, up, n);
    if (a.x.dtype() == DType::bf16) kernels.round_bf16(gate, n);
  }
};

// Runs of few rows, up to kCanonicalBatchRows rows in all; their items are spread over the team together.
struct CanonicalBatch {
  struct Entry {
    int64_t run;
    int64_t row;  // of scratch
  };
  Entry entries[kCanonicalBatchRows];
  int64_t runs = 0;
  int64_t rows = 0;
};

void run_batch(const ExpertsCall& call, const CanonicalBatch& batch) {
  const SwigluExpertsArgs& a = call.a;
  const ExpertsScratch& scratch = call.scratch;
  const int64_t hidden = call.hidden(), inter = call.inter();
  const int64_t x_stride = canonical_padded(hidden), h_stride = canonical_padded(inter);
  const auto run_of = [&](int64_t e) -> const ExpertRun& { return a.runs[static_cast<size_t>(batch.entries[e].run)]; };
  for_each_item(call.threads, batch.runs, batch.rows * hidden >= 131072, [&](int64_t e, int) {
    const ExpertRun& run = run_of(e);
    for (int64_t i = 0; i < run.count; ++i)
      permute_row(call.kernels, a.x, call.x_at(run.begin + i), hidden,
                  scratch.x_permuted + (batch.entries[e].row + i) * x_stride);
  });

  const int64_t chunk = canonical_chunk(batch.runs * inter, hidden, call.threads);
  const int64_t chunks = (inter + chunk - 1) / chunk;
  const bool team = batch.runs * inter * hidden >= 65536;
  for_each_item(call.threads, batch.runs * chunks, team, [&](int64_t item, int) {
    const int64_t e = item / chunks, begin = item % chunks * chunk, count = std::min(chunk, inter - begin);
    const ExpertRun& run = run_of(e);
    alignas(64) float gate[kCanonicalRowsMax][kColumnChunk], up[kCanonicalRowsMax][kColumnChunk];
    const float* x = scratch.x_permuted + batch.entries[e].row * x_stride;
    canonical_product(call.kernels, x, run.count, call.gate_up(run), begin, count, &gate[0][0], kColumnChunk);
    canonical_product(call.kernels, x, run.count, call.gate_up(run), inter + begin, count, &up[0][0], kColumnChunk);
    for (int64_t i = 0; i < run.count; ++i) {
      call.swiglu(gate[i], up[i], count);
      std::memcpy(scratch.h + (batch.entries[e].row + i) * inter + begin, gate[i],
                  static_cast<size_t>(count) * sizeof(float));
    }
  });

  for_each_item(call.threads, batch.rows, batch.rows * inter >= 131072, [&](int64_t row, int) {
    call.kernels.canonical_permute(scratch.h + row * inter, 0, inter, h_stride, scratch.h_permuted + row * h_stride);
  });

  const int64_t out_chunk = canonical_chunk(batch.runs * hidden, inter, call.threads);
  const int64_t out_chunks = (hidden + out_chunk - 1) / out_chunk;
  for_each_item(call.threads, batch.runs * out_chunks, team, [&](int64_t item, int) {
    const int64_t e = item / out_chunks, begin = item % out_chunks * out_chunk;
    const int64_t count = std::min(out_chunk, hidden - begin);
    const ExpertRun& run = run_of(e);
    float sums[kCanonicalRowsMax][kColumnChunk];
    const float* h = scratch.h_permuted + batch.entries[e].row * h_stride;
    canonical_product(call.kernels, h, run.count, call.down(run), begin, count, &sums[0][0], kColumnChunk);
    for (int64_t i = 0; i < run.count; ++i)
      store_row(call.kernels, sums[i], a.out, call.out_at(run.begin + i) + begin, count);
  });
}

// Rows [first, first + rows) of one run, through the prefill GEMM.
void run_gemm(const ExpertsCall& call, const ExpertRun& run, int64_t first, int64_t rows) {
  const SwigluExpertsArgs& a = call.a;
  const ExpertsScratch& scratch = call.scratch;
  const CpuKernels& kernels = call.kernels;
  const int64_t hidden = call.hidden(), inter = call.inter(), width = kernels.gemm_columns;
  const ProductMath math(product_math(a.math, a.x.dtype(), a.weight_dtype, run.count));
  pack_rows(
      kernels, call.threads, math, a.x, rows, hidden, [&](int64_t i) { return call.x_at(first + i); }, scratch.gemm);
  for_each_item(call.threads, (inter + width - 1) / width, true, [&](int64_t item, int thread) {
    const int64_t begin = item * width, count = std::min(width, inter - begin);
    float* gate = scratch.gemm.tile(thread, 0);
    float* up = scratch.gemm.tile(thread, 1);
    gemm_tile(kernels, scratch.gemm, thread, math, rows, call.gate_up(run), begin, count, gate);
    gemm_tile(kernels, scratch.gemm, thread, math, rows, call.gate_up(run), inter + begin, count, up);
    call.swiglu(gate, up, rows * width);
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(scratch.h + i * inter + begin, gate + i * width, static_cast<size_t>(count) * sizeof(float));
  });

  const Tensor h(scratch.h, DType::f32, {rows, inter});
  pack_rows(
      kernels, call.threads, math, h, rows, inter, [&](int64_t i) { return i * inter; }, scratch.gemm);
  for_each_item(call.threads, (hidden + width - 1) / width, true, [&](int64_t item, int thread) {
    const int64_t begin = item * width, count = std::min(width, hidden - begin);
    float* tile = scratch.gemm.tile(thread, 0);
    gemm_tile(kernels, scratch.gemm, thread, math, rows, call.down(run), begin, count, tile);
    for (int64_t i = 0; i < rows; ++i)
      store_row(kernels, tile + i * width, a.out, call.out_at(first + i) + begin, count);
  });
}

}  // namespace

int64_t CpuOps::scratch_bytes(const SwigluExpertsArgs& a) const {
  Arena arena;
  ExpertsScratch(arena, kernels_, threads_, static_cast<int64_t>(a.rows.size()), a.x.dim(1), a.intermediate);
  return arena.peak_bytes();
}

void CpuOps::execute(const SwigluExpertsArgs& a) {
  const auto rows = static_cast<int64_t>(a.rows.size());
  if (rows == 0 || a.runs.empty()) return;
  Arena arena = scratch_arena();
  const ExpertsScratch scratch(arena, kernels_, threads_, rows, a.x.dim(1), a.intermediate);
  const ExpertsCall call{a, kernels_, threads_, scratch, Rnd(kernels_, a.x.dtype(), a.rounding)};
  CanonicalBatch batch;
  for (size_t i = 0; i < a.runs.size(); ++i) {
    const ExpertRun& run = a.runs[i];
    if (run.count == 0) continue;
    if (run.count > kCanonicalRowsMax) {
      const int64_t block = block_rows(run.count);
      for (int64_t done = 0; done < run.count; done += block)
        run_gemm(call, run, run.begin + done, std::min(block, run.count - done));
      continue;
    }
    // Runs may overlap, so the batch is bounded by scratch rows, not by the rows of the call.
    if (batch.rows + run.count > std::min(rows, kCanonicalBatchRows)) {
      run_batch(call, batch);
      batch.runs = batch.rows = 0;
    }
    batch.entries[batch.runs++] = {static_cast<int64_t>(i), batch.rows};
    batch.rows += run.count;
  }
  if (batch.runs > 0) run_batch(call, batch);
}

int64_t CpuOps::scratch_bytes(const SwigluRoutedArgs& a) const {
  Arena arena;
  ExpertsScratch(arena, kernels_, threads_, a.ids.elements(), a.x.dim(1), a.intermediate);
  return arena.peak_bytes();
}

// One run for each expert, its slots in ascending order: a counting sort.
void CpuOps::execute(const SwigluRoutedArgs& a) {
  const int64_t up_bytes = 2 * a.intermediate * a.x.dim(1) * dtype_bytes(a.slab.dtype());
  const std::span ids(a.ids.as<int32_t>(), static_cast<size_t>(a.ids.elements()));
  const std::span slots(a.slots.as<int32_t>(), static_cast<size_t>(a.slots.elements()));
  const auto slot_of = [&](size_t i) { return slots[static_cast<size_t>(ids[i])]; };
  runs_.assign(slots.size(), ExpertRun{});
  for (size_t i = 0; i < ids.size(); ++i) {
    a.present.as<uint8_t>()[i] = slot_of(i) >= 0;
    if (slot_of(i) >= 0) ++runs_[static_cast<size_t>(ids[i])].count;
  }
  int64_t begin = 0;
  for (size_t e = 0; e < runs_.size(); ++e) {
    if (runs_[e].count == 0) continue;
    const auto* block = static_cast<const std::byte*>(a.slab.narrow(0, slots[e], 1).data());
    runs_[e] = {.gate_up = block, .down = block + up_bytes, .begin = begin, .count = runs_[e].count};
    begin += std::exchange(runs_[e].count, 0);
  }
  rows_.resize(static_cast<size_t>(begin));
  out_rows_.resize(static_cast<size_t>(begin));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (slot_of(i) < 0) continue;
    ExpertRun& run = runs_[static_cast<size_t>(ids[i])];
    const auto at = static_cast<size_t>(run.begin + run.count++);
    rows_[at] = static_cast<int32_t>(static_cast<int64_t>(i) / a.ids.dim(1));
    out_rows_[at] = static_cast<int32_t>(i);
  }
  std::erase_if(runs_, [](const ExpertRun& run) { return run.count == 0; });
  execute(SwigluExpertsArgs{.x = a.x,
                            .out = a.out,
                            .runs = runs_,
                            .rows = rows_,
                            .out_rows = out_rows_,
                            .intermediate = a.intermediate,
                            .weight_dtype = a.slab.dtype(),
                            .rounding = a.rounding,
                            .math = a.math});
}

}  // namespace offload::cpu
