// The text of the CPU kernels, included once by each cpu_gemm_ISA.cpp behind its vector type.
//
// REQUIRES, in an anonymous namespace: Vec with kWidth lanes and its functions, kGemmRows, kGemmVectors,
// kCanonicalVectors, kIsa; and OFL_KERNEL_TABLE, the name of the function that returns the table. Everything here has
// internal linkage, and no inline function of another header is called: the linker keeps one copy of those, and it
// might keep the copy that was compiled for a processor that this is not.
#ifndef OFFLOAD_CPU_CPU_KERNELS_INL_H_
#define OFFLOAD_CPU_CPU_KERNELS_INL_H_

#include <emmintrin.h>

#if defined(__clang__)
#define OFL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OFL_UNROLL _Pragma("GCC unroll 64")
#endif

namespace offload::cpu {
namespace {

// --- loading what is shorter than a vector ---

template <typename T>
inline Vec load_some(const T* p, int64_t count) {
  T padded[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}

// --- conversions ---

void widen(const uint16_t* x, float* out, int64_t n) {
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) store(out + j, load(x + j));
  if (j == n) return;
  float last[kWidth];
  store(last, load_some(x + j, n - j));
  for (int64_t i = 0; j + i < n; ++i) out[j + i] = last[i];
}

void narrow(const float* x, uint16_t* out, int64_t n) {
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) store(out + j, load(x + j));
  if (j == n) return;
  uint16_t last[kWidth];
  store(last, load_some(x + j, n - j));
  for (int64_t i = 0; j + i < n; ++i) out[j + i] = last[i];
}

// --- elementwise ---

// canonical_exp, step by step.
inline Vec exp_of(Vec x) {
  using namespace canonical;
  x = larger(broadcast(kExpMin), x);
  x = smaller(broadcast(kExpMax), x);
  const Vec magic = broadcast(kRoundMagic), one = broadcast(1.0f);
  const Vec shifted = fma_exact(x, broadcast(kLog2E), magic);
  const Vec k = shifted - magic;
  Vec r = fma_exact(k, broadcast(-kLn2High), x);
  r = fma_exact(k, broadcast(-kLn2Low), r);
  Vec p = broadcast(exp_poly(0));
  OFL_UNROLL
  for (int i = 1; i < 6; ++i) p = fma_exact(p, r, broadcast(exp_poly(i)));
  p = fma_exact(p, r, one);
  p = fma_exact(p, r, one);
  return scale_by_power(p, shifted);
}

void round_all(float* x, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, round_bf16(load(x + j)));
}

void sigmoid(float* x, int64_t n) {
  const Vec one = broadcast(1.0f);
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, one / (one + exp_of(-load(x + j))));
}

void silu(float* x, int64_t n) {
  const Vec one = broadcast(1.0f);
  for (int64_t j = 0; j < n; j += kWidth) {
    const Vec t = load(x + j);
    store(x + j, t / (one + exp_of(-t)));
  }
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, load(x + j) + load(y + j));
}

void mul(float* x, const float* y, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, load(x + j) * load(y + j));
}

void scale(float* x, float s, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, load(x + j) * broadcast(s));
}

void mul_add_all(float* x, const float* y, const float* z, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, mul_add(load(y + j), load(z + j), load(x + j)));
}

void axpy(float* x, float s, const float* y, int64_t n) {
  for (int64_t j = 0; j < n; j += kWidth) store(x + j, mul_add(broadcast(s), load(y + j), load(x + j)));
}

// --- reductions: four vectors of partial sums ---

float dot(const float* x, const float* y, int64_t n) {
  Vec acc[4] = {zero(), zero(), zero(), zero()};
  int64_t j = 0;
  for (; j + 4 * kWidth <= n; j += 4 * kWidth) {
    OFL_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] = mul_add(load(x + j + i * kWidth), load(y + j + i * kWidth), acc[i]);
  }
  for (; j + kWidth <= n; j += kWidth) acc[0] = mul_add(load(x + j), load(y + j), acc[0]);
  if (j < n) acc[1] = mul_add(load_some(x + j, n - j), load_some(y + j, n - j), acc[1]);
  return total((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

float sum(const float* x, int64_t n) {
  Vec acc[4] = {zero(), zero(), zero(), zero()};
  int64_t j = 0;
  for (; j + 4 * kWidth <= n; j += 4 * kWidth) {
    OFL_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] = acc[i] + load(x + j + i * kWidth);
  }
  for (; j + kWidth <= n; j += kWidth) acc[0] = acc[0] + load(x + j);
  if (j < n) acc[1] = acc[1] + load_some(x + j, n - j);
  return total((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

float max_of(const float* x, int64_t n) {
  Vec largest = broadcast(x[0]);
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) largest = larger(load(x + j), largest);
  float lanes[kWidth], best = x[0];
  store(lanes, largest);
  for (int i = 0; i < kWidth; ++i) best = lanes[i] > best ? lanes[i] : best;
  for (; j < n; ++j) best = x[j] > best ? x[j] : best;
  return best;
}

float exp_sum(float* x, float shift, int64_t n) {
  const Vec s = broadcast(shift);
  Vec acc[2] = {zero(), zero()};
  int64_t j = 0;
  for (; j + 2 * kWidth <= n; j += 2 * kWidth) {
    OFL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Vec e = exp_of(load(x + j + i * kWidth) - s);
      store(x + j + i * kWidth, e);
      acc[i] = acc[i] + e;
    }
  }
  for (; j < n; j += kWidth) {
    const int64_t count = n - j < kWidth ? n - j : kWidth;
    float last[kWidth];
    store(last, exp_of(load_some(x + j, count) - s));
    for (int64_t i = 0; i < count; ++i) x[j + i] = last[i];
    acc[0] = acc[0] + load_some(last, count);
  }
  return total(acc[0] + acc[1]);
}

// --- canonical products ---

constexpr int kParts = kCanonicalAccumulators / kWidth;  // vectors of accumulators

void canonical_permute(const float* x, int64_t begin, int64_t count, int64_t k_padded, float* out) {
  constexpr int64_t kQuad = 4;  // accumulators of one group of eight elements
  for (int64_t done = 0; done < count; done += kCanonicalBlock) {
    float padded[kCanonicalBlock] = {};
    const float* block = x + done;
    if (count - done < kCanonicalBlock) {
      for (int64_t i = done; i < count; ++i) padded[i - done] = x[i];
      block = padded;
    }
    for (int64_t group = 0; group < kCanonicalBlock / 8; ++group) {
      const int64_t part = group * kQuad / kWidth, lane = group * kQuad % kWidth;
      float* to = out + (part * k_padded + begin + done) / kParts + lane;
      __builtin_memcpy(to, block + group * 8, kQuad * sizeof(float));
      __builtin_memcpy(to + kWidth, block + group * 8 + kQuad, kQuad * sizeof(float));
    }
  }
}

template <int M, int R, int P, typename T>
[[gnu::always_inline]] inline void canonical_block(Vec (&acc)[M][R][P], int first_part, const float* x,
                                                   int64_t x_stride, int64_t part_stride, const T* w,
                                                   int64_t w_stride) {
  if constexpr (M == 1) {  // bound by loads: each of w and of x is loaded once, and all rows of w use the x
    OFL_UNROLL
    for (int i = 0; i < P; ++i) {
      const Vec low = load(x + (first_part + i) * part_stride),
                high = load(x + (first_part + i) * part_stride + kWidth);
      OFL_UNROLL
      for (int r = 0; r < R; ++r) {
        Vec w_low, w_high;
        canonical_halves(w + r * w_stride, first_part + i, w_low, w_high);
        acc[0][r][i] = fma_exact(high, w_high, fma_exact(low, w_low, acc[0][r][i]));
      }
    }
  } else {
    OFL_UNROLL
    for (int step = 0; step < 2 * P; ++step) {  // the low, then the high half of each part; halves save registers
      const int i = step / 2, part = first_part + i, high = step % 2;
      Vec wr[R];
      OFL_UNROLL
      for (int r = 0; r < R; ++r) wr[r] = canonical_half(w + r * w_stride, part, high);
      OFL_UNROLL
      for (int m = 0; m < M; ++m) {
        const Vec xm = load(x + m * x_stride + part * part_stride + high * kWidth);
        OFL_UNROLL
        for (int r = 0; r < R; ++r) acc[m][r][i] = fma_exact(xm, wr[r], acc[m][r][i]);
      }
    }
  }
}

// M rows of x (x_stride is k rounded up to whole blocks) against R rows of w, P vectors of accumulators at a time so
// that all of them stay in registers: the first pass streams the rows of w, the others find them in the L1 cache.
// Prefetching walks the matrix in address order, about R rows ahead, although R rows are read side by side: short rows
// read without it reach half of the memory's rate, with it over 90 % (EPYC, 2 cores, 640 and 2,560 columns).
template <int M, int R, int P, typename T>
void canonical_tile(const float* x, int64_t x_stride, const T* w, int64_t k, float* out, int64_t out_stride) {
  static_assert(kParts % P == 0);
  constexpr int64_t kBytes = sizeof(T), kAheadMin = 8 << 10, kAheadMax = 16 << 10;
  Vec sums[M][R][kParts];
  T last[R][kCanonicalBlock] = {};
  const int64_t whole = k / kCanonicalBlock * kCanonicalBlock, part_stride = x_stride / kParts;
  const int64_t tile_bytes = R * k * kBytes;
  const char* ahead = reinterpret_cast<const char*>(w) + (tile_bytes < kAheadMin   ? kAheadMin
                                                          : tile_bytes > kAheadMax ? kAheadMax
                                                                                   : tile_bytes);
  for (int r = 0; r < R; ++r)
    for (int64_t i = whole; i < k; ++i) last[r][i - whole] = w[r * k + i];
  OFL_UNROLL
  for (int part = 0; part < kParts; part += P) {
    Vec acc[M][R][P];
    OFL_UNROLL
    for (int m = 0; m < M; ++m) {
      OFL_UNROLL
      for (int r = 0; r < R; ++r) {
        OFL_UNROLL
        for (int i = 0; i < P; ++i) acc[m][r][i] = zero();
      }
    }
    for (int64_t begin = 0; begin < whole; begin += kCanonicalBlock) {
      if (part == 0) {
        OFL_UNROLL
        for (int64_t line = 0; line < R * kCanonicalBlock * kBytes; line += 64)
          __builtin_prefetch(ahead + begin * R * kBytes + line);
      }
      canonical_block<M, R, P>(acc, part, x + begin / kParts, x_stride, part_stride, w + begin, k);
    }
    if (whole < k)
      canonical_block<M, R, P>(acc, part, x + whole / kParts, x_stride, part_stride, &last[0][0], kCanonicalBlock);
    OFL_UNROLL
    for (int m = 0; m < M; ++m) {
      OFL_UNROLL
      for (int r = 0; r < R; ++r) {
        OFL_UNROLL
        for (int i = 0; i < P; ++i) sums[m][r][part + i] = acc[m][r][i];
      }
    }
  }
  OFL_UNROLL
  for (int m = 0; m < M; ++m) {
    OFL_UNROLL
    for (int r = 0; r < R; ++r) out[m * out_stride + r] = canonical_total(sums[m][r]);
  }
}

// One row of x needs no reuse, only a stream; several rows reuse each weight M times and each x R times.
template <int M, typename T>
void canonical_rows(const float* x, int64_t x_stride, const T* w, int64_t k, int64_t columns, float* out,
                    int64_t out_stride) {
  constexpr int R = M == 2 || M == 3 ? 3 : 2;
  constexpr int kFit = kCanonicalVectors / (M * R);  // vectors of accumulators per product that fit the registers
  constexpr int P = kFit >= kParts ? kParts : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  int64_t n = 0;
  for (; n + R <= columns; n += R) canonical_tile<M, R, P>(x, x_stride, w + n * k, k, out + n, out_stride);
  for (; n < columns; ++n) canonical_tile<M, 1, P>(x, x_stride, w + n * k, k, out + n, out_stride);
}

// Rows of x in groups of up to four. A later group finds its weights in the cache, as a slice is only a few rows.
template <typename T>
void canonical(const float* x, int64_t x_stride, int64_t rows, const T* w, int64_t k, int64_t columns, float* out,
               int64_t out_stride) {
  constexpr int64_t kGroup = 4, kSlice = 6;
  const int64_t slice = rows <= kGroup ? columns : kSlice;
  for (int64_t n = 0; n < columns; n += slice) {
    const int64_t count = columns - n < slice ? columns - n : slice;
    for (int64_t m = 0; m < rows; m += kGroup) {
      const float* xm = x + m * x_stride;
      float* to = out + m * out_stride + n;
      const T* wn = w + n * k;
      const int64_t left = rows - m;
      if (left >= 4)
        canonical_rows<4>(xm, x_stride, wn, k, count, to, out_stride);
      else if (left == 3)
        canonical_rows<3>(xm, x_stride, wn, k, count, to, out_stride);
      else if (left == 2)
        canonical_rows<2>(xm, x_stride, wn, k, count, to, out_stride);
      else
        canonical_rows<1>(xm, x_stride, wn, k, count, to, out_stride);
    }
  }
}

// --- prefill GEMM ---

constexpr int64_t kGemmColumns = kGemmVectors * kWidth;

// Eight rows of eight BF16 each -> out[i * kGemmColumns + row], F32. A null row is zeros.
inline void transpose_block(const uint16_t* const* rows, int64_t k, float* out) {
  const __m128i nothing = _mm_setzero_si128();
  __m128i r[8], t[8], u[8], c[8];
  OFL_UNROLL
  for (int i = 0; i < 8; ++i)
    r[i] = rows[i] != nullptr ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + k)) : nothing;
  OFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[i + 4] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  OFL_UNROLL
  for (int i = 0; i < 4; ++i) {
    u[2 * i] = _mm_unpacklo_epi32(t[2 * i], t[2 * i + 1]);
    u[2 * i + 1] = _mm_unpackhi_epi32(t[2 * i], t[2 * i + 1]);
  }
  OFL_UNROLL
  for (int i = 0; i < 2; ++i) {
    c[4 * i] = _mm_unpacklo_epi64(u[4 * i], u[4 * i + 2]);
    c[4 * i + 1] = _mm_unpackhi_epi64(u[4 * i], u[4 * i + 2]);
    c[4 * i + 2] = _mm_unpacklo_epi64(u[4 * i + 1], u[4 * i + 3]);
    c[4 * i + 3] = _mm_unpackhi_epi64(u[4 * i + 1], u[4 * i + 3]);
  }
  OFL_UNROLL
  for (int i = 0; i < 8; ++i) {
    _mm_storeu_ps(out + i * kGemmColumns, _mm_castsi128_ps(_mm_unpacklo_epi16(nothing, c[i])));
    _mm_storeu_ps(out + i * kGemmColumns + 4, _mm_castsi128_ps(_mm_unpackhi_epi16(nothing, c[i])));
  }
}

inline void transpose_block(const float* const* rows, int64_t k, float* out) {
  OFL_UNROLL
  for (int half = 0; half < 4; ++half) {  // row half: half % 2, k half: half / 2
    __m128 r[4];
    OFL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* row = rows[half % 2 * 4 + i];
      r[i] = row != nullptr ? _mm_loadu_ps(row + k + half / 2 * 4) : _mm_setzero_ps();
    }
    const __m128 t0 = _mm_unpacklo_ps(r[0], r[1]), t1 = _mm_unpackhi_ps(r[0], r[1]);
    const __m128 t2 = _mm_unpacklo_ps(r[2], r[3]), t3 = _mm_unpackhi_ps(r[2], r[3]);
    float* to = out + half / 2 * 4 * kGemmColumns + half % 2 * 4;
    _mm_storeu_ps(to, _mm_movelh_ps(t0, t2));
    _mm_storeu_ps(to + kGemmColumns, _mm_movehl_ps(t2, t0));
    _mm_storeu_ps(to + 2 * kGemmColumns, _mm_movelh_ps(t1, t3));
    _mm_storeu_ps(to + 3 * kGemmColumns, _mm_movehl_ps(t3, t1));
  }
}

inline float element(const uint16_t* p) {
  const uint32_t bits = static_cast<uint32_t>(*p) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline float element(const float* p) {
  return *p;
}

template <typename T>
void pack_columns(const T* w, int64_t k_stride, int64_t count, int64_t k, float* out) {
  for (int64_t group = 0; group < kGemmColumns; group += 8) {
    const T* rows[8];
    for (int64_t i = 0; i < 8; ++i) rows[i] = group + i < count ? w + (group + i) * k_stride : nullptr;
    int64_t l = 0;
    for (; l + 8 <= k; l += 8) transpose_block(rows, l, out + l * kGemmColumns + group);
    for (; l < k; ++l)
      for (int64_t i = 0; i < 8; ++i)
        out[l * kGemmColumns + group + i] = rows[i] != nullptr ? element(rows[i] + l) : 0.0f;
  }
}

// Per element of k: kGemmVectors loads of b, kGemmRows broadcasts of a, their product in FMAs. Bound by the FMA units.
void gemm(const float* a, const float* b, int64_t k, float* c, int64_t c_stride, int accumulate) {
  Vec acc[kGemmRows][kGemmVectors];
  OFL_UNROLL
  for (int i = 0; i < kGemmRows; ++i) {
    OFL_UNROLL
    for (int j = 0; j < kGemmVectors; ++j) acc[i][j] = zero();
  }
  for (int64_t l = 0; l < k; ++l) {
    Vec bl[kGemmVectors];
    OFL_UNROLL
    for (int j = 0; j < kGemmVectors; ++j) bl[j] = load(b + l * kGemmColumns + j * kWidth);
    OFL_UNROLL
    for (int i = 0; i < kGemmRows; ++i) {
      const Vec al = broadcast(a[l * kGemmRows + i]);
      OFL_UNROLL
      for (int j = 0; j < kGemmVectors; ++j) acc[i][j] = mul_add(al, bl[j], acc[i][j]);
    }
  }
  OFL_UNROLL
  for (int i = 0; i < kGemmRows; ++i) {
    OFL_UNROLL
    for (int j = 0; j < kGemmVectors; ++j) {
      float* to = c + i * c_stride + j * kWidth;
      store(to, accumulate != 0 ? load(to) + acc[i][j] : acc[i][j]);
    }
  }
}

// --- small dense products ---

template <int R, int C>
void matmul_tile(int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_stride, float* c,
                 int64_t c_stride, int accumulate) {
  Vec acc[R][C];
  OFL_UNROLL
  for (int i = 0; i < R; ++i) {
    OFL_UNROLL
    for (int j = 0; j < C; ++j) acc[i][j] = accumulate != 0 ? load(c + i * c_stride + j * kWidth) : zero();
  }
  for (int64_t l = 0; l < k; ++l) {
    OFL_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec al = broadcast(a[i * a_row + l * a_column]);
      OFL_UNROLL
      for (int j = 0; j < C; ++j) acc[i][j] = mul_add(al, load(b + l * b_stride + j * kWidth), acc[i][j]);
    }
  }
  OFL_UNROLL
  for (int i = 0; i < R; ++i) {
    OFL_UNROLL
    for (int j = 0; j < C; ++j) store(c + i * c_stride + j * kWidth, acc[i][j]);
  }
}

// A strip of b that many rows of a will use is first copied together: its rows lie a power of two apart, where they
// share few sets of the L1 cache.
template <int C>
void matmul_strip(int64_t m, int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b,
                  int64_t b_stride, float* c, int64_t c_stride, int accumulate) {
  constexpr int64_t kDepth = 128, kRowsWorthACopy = 16;
  alignas(64) float copy[kDepth * C * kWidth];
  if (m >= kRowsWorthACopy && k <= kDepth) {
    for (int64_t l = 0; l < k; ++l) {
      OFL_UNROLL
      for (int j = 0; j < C; ++j) store(copy + (l * C + j) * kWidth, load(b + l * b_stride + j * kWidth));
    }
    b = copy;
    b_stride = C * kWidth;
  }
  int64_t i = 0;
  for (; i + 4 <= m; i += 4)
    matmul_tile<4, C>(k, a + i * a_row, a_row, a_column, b, b_stride, c + i * c_stride, c_stride, accumulate);
  for (; i < m; ++i)
    matmul_tile<1, C>(k, a + i * a_row, a_row, a_column, b, b_stride, c + i * c_stride, c_stride, accumulate);
}

void matmul(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b,
            int64_t b_stride, float* c, int64_t c_stride, int accumulate) {
  int64_t j = 0;
  for (; j + 2 * kWidth <= n; j += 2 * kWidth)
    matmul_strip<2>(m, k, a, a_row, a_column, b + j, b_stride, c + j, c_stride, accumulate);
  for (; j < n; j += kWidth) matmul_strip<1>(m, k, a, a_row, a_column, b + j, b_stride, c + j, c_stride, accumulate);
}

// --- attention ---

// H heads times P positions; each sum is one vector of partial sums over n, whatever H and P.
template <int H, int P, typename T>
void scores_tile(const float* q, int64_t q_stride, const T* k, int64_t k_stride, int64_t n, float* out,
                 int64_t out_stride) {
  Vec acc[H][P];
  OFL_UNROLL
  for (int h = 0; h < H; ++h) {
    OFL_UNROLL
    for (int p = 0; p < P; ++p) acc[h][p] = zero();
  }
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    OFL_UNROLL
    for (int p = 0; p < P; ++p) {
      const Vec key = load(k + p * k_stride + j);
      OFL_UNROLL
      for (int h = 0; h < H; ++h) acc[h][p] = mul_add(load(q + h * q_stride + j), key, acc[h][p]);
    }
  }
  if (j < n) {
    for (int p = 0; p < P; ++p) {
      const Vec key = load_some(k + p * k_stride + j, n - j);
      for (int h = 0; h < H; ++h) acc[h][p] = mul_add(load_some(q + h * q_stride + j, n - j), key, acc[h][p]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int p = 0; p < P; ++p) out[h * out_stride + p] = total(acc[h][p]);
}

template <int H, int P, typename T>
void scores_heads(const float* q, int64_t q_stride, const T* k, int64_t k_stride, int64_t count, int64_t n, float* out,
                  int64_t out_stride) {
  int64_t p = 0;
  for (; p + P <= count; p += P) scores_tile<H, P>(q, q_stride, k + p * k_stride, k_stride, n, out + p, out_stride);
  for (; p < count; ++p) scores_tile<H, 1>(q, q_stride, k + p * k_stride, k_stride, n, out + p, out_stride);
}

template <typename T>
void scores(const float* q, int64_t q_stride, int64_t heads, const T* k, int64_t k_stride, int64_t count, int64_t n,
            float* out, int64_t out_stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4)
    scores_heads<4, 2>(q + h * q_stride, q_stride, k, k_stride, count, n, out + h * out_stride, out_stride);
  for (; h < heads; ++h)
    scores_heads<1, 4>(q + h * q_stride, q_stride, k, k_stride, count, n, out + h * out_stride, out_stride);
}

template <int H, int C, typename T>
void weigh_tile(const float* weights, int64_t weights_stride, const T* v, int64_t v_stride, int64_t count,
                int64_t lanes, float* out, int64_t out_stride) {
  Vec acc[H][C];
  OFL_UNROLL
  for (int h = 0; h < H; ++h) {
    OFL_UNROLL
    for (int c = 0; c < C; ++c) acc[h][c] = load(out + h * out_stride + c * kWidth);
  }
  for (int64_t p = 0; p < count; ++p) {
    OFL_UNROLL
    for (int c = 0; c < C; ++c) {
      const T* from = v + p * v_stride + c * kWidth;
      const Vec value = lanes < kWidth ? load_some(from, lanes) : load(from);
      OFL_UNROLL
      for (int h = 0; h < H; ++h) acc[h][c] = mul_add(broadcast(weights[h * weights_stride + p]), value, acc[h][c]);
    }
  }
  OFL_UNROLL
  for (int h = 0; h < H; ++h) {
    OFL_UNROLL
    for (int c = 0; c < C; ++c) store(out + h * out_stride + c * kWidth, acc[h][c]);
  }
}

template <int H, typename T>
void weigh_heads(const float* weights, int64_t weights_stride, const T* v, int64_t v_stride, int64_t count, int64_t n,
                 float* out, int64_t out_stride) {
  int64_t j = 0;
  for (; j + 2 * kWidth <= n; j += 2 * kWidth)
    weigh_tile<H, 2>(weights, weights_stride, v + j, v_stride, count, kWidth, out + j, out_stride);
  for (; j < n; j += kWidth)
    weigh_tile<H, 1>(weights, weights_stride, v + j, v_stride, count, n - j, out + j, out_stride);
}

template <typename T>
void weigh(const float* weights, int64_t weights_stride, int64_t heads, const T* v, int64_t v_stride, int64_t count,
           int64_t n, float* out, int64_t out_stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4)
    weigh_heads<4>(weights + h * weights_stride, weights_stride, v, v_stride, count, n, out + h * out_stride,
                   out_stride);
  for (; h < heads; ++h)
    weigh_heads<1>(weights + h * weights_stride, weights_stride, v, v_stride, count, n, out + h * out_stride,
                   out_stride);
}

// --- gated delta rule ---

template <int C>
void delta_strip(float* m, int64_t dk, int64_t dv, float decay, const float* q, const float* k, const float* v,
                 float beta, float* out) {
  const Vec keep = broadcast(decay);
  Vec recalled[C], delta[C], read[C];
  OFL_UNROLL
  for (int c = 0; c < C; ++c) recalled[c] = read[c] = zero();
  for (int64_t i = 0; i < dk; ++i) {
    OFL_UNROLL
    for (int c = 0; c < C; ++c)
      recalled[c] = mul_add(load(m + i * dv + c * kWidth) * keep, broadcast(k[i]), recalled[c]);
  }
  OFL_UNROLL
  for (int c = 0; c < C; ++c) delta[c] = broadcast(beta) * (load(v + c * kWidth) - recalled[c]);
  for (int64_t i = 0; i < dk; ++i) {
    OFL_UNROLL
    for (int c = 0; c < C; ++c) {
      const Vec next = mul_add(broadcast(k[i]), delta[c], load(m + i * dv + c * kWidth) * keep);
      store(m + i * dv + c * kWidth, next);
      read[c] = mul_add(next, broadcast(q[i]), read[c]);
    }
  }
  OFL_UNROLL
  for (int c = 0; c < C; ++c) store(out + c * kWidth, read[c]);
}

void delta_step(float* m, int64_t dk, int64_t dv, float decay, const float* q, const float* k, const float* v,
                float beta, float* out) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= dv; j += 2 * kLanes)
    delta_strip<2 * kLanes / kWidth>(m + j, dk, dv, decay, q, k, v + j, beta, out + j);
  for (; j < dv; j += kLanes) delta_strip<kLanes / kWidth>(m + j, dk, dv, decay, q, k, v + j, beta, out + j);
}

// --- roofs ---

constexpr int kFmaChains = kWidth == 16 ? 24 : 12;

float fma_loop(int64_t iterations) {
  Vec acc[kFmaChains];
  const Vec a = broadcast(0.9999f), b = broadcast(0.0001f);
  OFL_UNROLL
  for (int i = 0; i < kFmaChains; ++i) acc[i] = broadcast(static_cast<float>(i));
  for (int64_t t = 0; t < iterations; ++t) {
    OFL_UNROLL
    for (int i = 0; i < kFmaChains; ++i) acc[i] = mul_add(acc[i], a, b);
  }
  Vec all = zero();
  for (int i = 0; i < kFmaChains; ++i) all = all + acc[i];
  return total(all);
}

typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));

uint32_t read_loop(const void* x, int64_t bytes) {
  Words acc[8] = {};
  const char* p = static_cast<const char*>(x);
  for (int64_t at = 0; at < bytes; at += 8 * static_cast<int64_t>(sizeof(Words))) {
    OFL_UNROLL
    for (int64_t line = 0; line < 8 * static_cast<int64_t>(sizeof(Words)); line += 64)
      __builtin_prefetch(p + at + 1024 + line);
    OFL_UNROLL
    for (int i = 0; i < 8; ++i) {
      Words words;
      __builtin_memcpy(&words, p + at + i * static_cast<int64_t>(sizeof words), sizeof words);
      acc[i] += words;
    }
  }
  uint32_t all = 0;
  for (const Words& words : acc)
    for (int i = 0; i < kWidth; ++i) all += words[i];
  return all;
}

constexpr CpuKernels kTable = {
    .isa = kIsa,
    .widen = widen,
    .narrow = narrow,
    .round_bf16 = round_all,
    .sigmoid = sigmoid,
    .silu = silu,
    .add = add,
    .mul = mul,
    .scale = scale,
    .mul_add = mul_add_all,
    .axpy = axpy,
    .dot = dot,
    .sum = sum,
    .max = max_of,
    .exp_sum = exp_sum,
    .canonical_permute = canonical_permute,
    .canonical_bf16 = canonical<uint16_t>,
    .canonical_f32 = canonical<float>,
    .gemm_rows = kGemmRows,
    .gemm_columns = kGemmColumns,
    .pack_columns_bf16 = pack_columns<uint16_t>,
    .pack_columns_f32 = pack_columns<float>,
    .gemm = gemm,
    .matmul = matmul,
    .scores_bf16 = scores<uint16_t>,
    .scores_f32 = scores<float>,
    .weigh_bf16 = weigh<uint16_t>,
    .weigh_f32 = weigh<float>,
    .delta_step = delta_step,
    .fma_loop = fma_loop,
    .fma_flops = 2 * kFmaChains * kWidth,
    .read_loop = read_loop,
};

}  // namespace

const CpuKernels& OFL_KERNEL_TABLE() {
  return kTable;
}

}  // namespace offload::cpu

#undef OFL_UNROLL
#undef OFL_KERNEL_TABLE

#endif  // OFFLOAD_CPU_CPU_KERNELS_INL_H_
