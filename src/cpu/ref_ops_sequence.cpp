// Reference ops along the sequence: convolution, recurrence, rotary positions, block selection, attention.
#include <limits>

#include "cpu/ref_access.h"
#include "cpu/ref_ops.h"

namespace offload::cpu {

void RefOps::execute(const CausalConvSiluArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  const int64_t rows = a.x.dim(0), channels = a.x.dim(1), taps = a.w.dim(1), history_rows = a.history.dim(0);
  for (int64_t ch = 0; ch < channels; ++ch) {
    const auto before_and_now = [&](int64_t t) {
      return t >= 0 ? get(a.x, t, ch) : get(a.history, history_rows + t, ch);
    };
    for (int64_t t = 0; t < rows; ++t) {
      double s = 0;
      for (int64_t j = 0; j < taps; ++j) s += get(a.w, ch, j) * before_and_now(t - a.dilation * (taps - 1 - j));
      set(a.out, silu(rnd(s)), t, ch);
    }
    // Row i of the new history is position rows - history_rows + i; ascending i reads only rows not yet replaced.
    for (int64_t i = 0; i < history_rows; ++i) set(a.history, before_and_now(rows - history_rows + i), i, ch);
  }
}

namespace {

std::vector<double> l2_normalised(const Tensor& row, int64_t r, int64_t begin, int64_t count) {
  std::vector<double> v = get_row(row.narrow(1, begin, count), r);
  const double squares = dot(v, v);
  // In FP32 by contract, where a sum that overflows leaves nothing.
  const double scale =
      squares > static_cast<double>(std::numeric_limits<float>::max()) ? 0.0 : 1.0 / std::sqrt(squares + 1e-6);
  for (double& x : v) x *= scale;
  return v;
}

double softplus(double t) {
  return t > 20.0 ? t : std::log1p(std::exp(t));
}

}  // namespace

void RefOps::execute(const GatedDeltaArgs& a) {
  const RefRnd rnd(a.qkv.dtype(), a.rounding);
  const int64_t rows = a.qkv.dim(0), heads = a.state.dim(0), dk = a.state.dim(1), dv = a.state.dim(2);
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t kappa = h / (heads / a.key_heads);
    std::vector<std::vector<double>> m;  // [dk][dv]
    for (int64_t i = 0; i < dk; ++i) m.push_back(get_row(a.state, h, i));
    for (int64_t t = 0; t < rows; ++t) {
      const std::vector<double> q = l2_normalised(a.qkv, t, kappa * dk, dk);
      const std::vector<double> k = l2_normalised(a.qkv, t, (a.key_heads + kappa) * dk, dk);
      const std::vector<double> v = get_row(a.qkv.narrow(1, 2 * a.key_heads * dk + h * dv, dv), t);
      const double beta = rnd(sigmoid(get(a.b, t, h)));
      const double g = -std::exp(get(a.a_log, h)) * softplus(get(a.a, t, h) + get(a.dt_bias, h));
      const double decay = std::exp(g), q_scale = 1.0 / std::sqrt(static_cast<double>(dk));
      for (int64_t j = 0; j < dv; ++j) {
        const auto col = static_cast<size_t>(j);
        double recalled = 0, out = 0;
        for (size_t i = 0; i < k.size(); ++i) m[i][col] *= decay;
        for (size_t i = 0; i < k.size(); ++i) recalled += m[i][col] * k[i];
        const double delta = beta * (v[col] - recalled);
        for (size_t i = 0; i < k.size(); ++i) m[i][col] += k[i] * delta;
        for (size_t i = 0; i < k.size(); ++i) out += m[i][col] * (q[i] * q_scale);
        set(a.out, out, t, h * dv + j);
      }
    }
    for (int64_t i = 0; i < dk; ++i)
      for (int64_t j = 0; j < dv; ++j) set(a.state, m[static_cast<size_t>(i)][static_cast<size_t>(j)], h, i, j);
  }
}

void RefOps::execute(const RopeTableArgs& a) {
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t i = 0; i < a.inv_freq.dim(0); ++i) {
      const float angle = static_cast<float>(a.first + r * a.step) * a.inv_freq.as<float>()[i];  // FP32 by contract
      const double scale = static_cast<double>(a.scale), wide = static_cast<double>(angle);
      set(a.out, round_to(a.round_to, scale * std::cos(wide)), r, i, 0);
      set(a.out, round_to(a.round_to, scale * std::sin(wide)), r, i, 1);
    }
  }
}

void RefOps::execute(const NormRopeArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  const int64_t n = a.x.dim(2), half = a.table.dim(1);
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t h = 0; h < a.x.dim(1); ++h) {
      std::vector<double> y = get_row(a.x, r, h);
      if (a.w) {
        const double scale = 1.0 / std::sqrt(mean_square(y) + static_cast<double>(a.eps));
        for (int64_t j = 0; j < n; ++j) {
          double& value = y[static_cast<size_t>(j)];
          value = rnd(value * scale * (1.0 + get(a.w, j)));
        }
      }
      for (int64_t i = 0; i < half; ++i) {
        const double c = get(a.table, r, i, 0), s = get(a.table, r, i, 1);
        const double low = y[static_cast<size_t>(i)], high = y[static_cast<size_t>(i + half)];
        set(a.out, rnd(low * c) + rnd(-high * s), r, h, i);
        set(a.out, rnd(high * c) + rnd(low * s), r, h, i + half);
      }
      for (int64_t j = 2 * half; j < n; ++j) set(a.out, y[static_cast<size_t>(j)], r, h, j);
    }
  }
}

void RefOps::execute(const MeanPoolArgs& a) {
  for (int64_t b = 0; b < a.out.dim(0); ++b) {
    for (int64_t j = 0; j < a.out.dim(1); ++j) {
      double sum = 0;
      for (int64_t i = 0; i < a.pool; ++i) sum += get(a.x, b * a.pool + i, j);
      set(a.out, sum / static_cast<double>(a.pool), b, j);
    }
  }
}

void RefOps::execute(const BlockScoresArgs& a) {
  for (int64_t r = 0; r < a.q.dim(0); ++r) {
    for (int64_t b = 0; b < (a.first + r + 1) / a.ratio; ++b) {
      const std::vector<double> key = get_row(a.keys, b);
      double sum = 0;
      for (int64_t h = 0; h < a.q.dim(1); ++h) sum += std::max(0.0, dot(get_row(a.q, r, h), key));
      set(a.out, sum * static_cast<double>(a.scale), r, b);
    }
  }
}

void RefOps::execute(const BlockTopkArgs& a) {
  const int64_t budget = a.blocks.dim(1);
  for (int64_t r = 0; r < a.counts.dim(0); ++r) {
    const int64_t complete = (a.first + r + 1) / a.ratio, count = std::min(budget, complete);
    std::vector<bool> taken(static_cast<size_t>(complete), complete <= budget);
    for (int64_t s = 0; s < count && complete > budget; ++s) {
      int64_t best = -1;  // the first of equals is the lower block
      for (int64_t b = 0; b < complete; ++b)
        if (!taken[static_cast<size_t>(b)] && (best < 0 || get(a.scores, r, b) > get(a.scores, r, best))) best = b;
      taken[static_cast<size_t>(best)] = true;
    }
    int32_t* blocks = a.blocks.row<int32_t>(r);
    for (int64_t b = 0; b < complete; ++b)
      if (taken[static_cast<size_t>(b)]) *blocks++ = static_cast<int32_t>(b);
    a.counts.as<int32_t>()[r] = static_cast<int32_t>(count);
  }
}

namespace {

// P(r) in ascending order.
std::vector<int64_t> visible_positions(const AttentionArgs& a, int64_t r) {
  const int64_t visible = a.first + r + 1;
  std::vector<int64_t> positions;
  int64_t tail = 0;
  if (a.blocks) {
    tail = visible / a.ratio * a.ratio;
    for (int64_t s = 0; s < a.counts.as<int32_t>()[r]; ++s)
      for (int64_t i = 0; i < a.ratio; ++i) positions.push_back(a.blocks.row<int32_t>(r)[s] * a.ratio + i);
  }
  for (int64_t p = tail; p < visible; ++p) positions.push_back(p);
  return positions;
}

}  // namespace

void RefOps::execute(const AttentionArgs& a) {
  const RefRnd rnd(a.q.dtype(), a.rounding);
  const int64_t heads = a.q.dim(1), n = a.q.dim(2), group = heads / a.k.dim(1);
  for (int64_t r = 0; r < a.q.dim(0); ++r) {
    const std::vector<int64_t> positions = visible_positions(a, r);
    for (int64_t h = 0; h < heads; ++h) {
      const std::vector<double> q = get_row(a.q, r, h);
      std::vector<double> scores;
      for (const int64_t p : positions)
        scores.push_back(rnd(rnd(dot(q, get_row(a.k, p, h / group))) * static_cast<double>(a.scale)));
      double largest = -INFINITY, denominator = 0;
      for (const double s : scores) largest = std::max(largest, s);
      for (const double s : scores) denominator += std::exp(s - largest);
      std::vector<double> sum(static_cast<size_t>(n), 0.0);
      for (size_t i = 0; i < positions.size(); ++i) {
        const double weight = rnd(std::exp(scores[i] - largest) / denominator);
        const std::vector<double> v = get_row(a.v, positions[i], h / group);
        for (size_t j = 0; j < sum.size(); ++j) sum[j] += weight * v[j];
      }
      for (int64_t j = 0; j < n; ++j) set(a.out, sum[static_cast<size_t>(j)], r, h, j);
    }
  }
}

}  // namespace offload::cpu
