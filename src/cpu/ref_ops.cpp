// Reference ops without a time axis: copies, products, norms, gates, hyper-connections, mixture of experts.
#include "cpu/ref_ops.h"

#include "core/op_parts.h"
#include "cpu/ref_access.h"

namespace offload::cpu {

void RefOps::execute(const CopyArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t j = 0; j < a.x.dim(1); ++j) set(a.out, get(a.x, r, j), r, j);
}

void RefOps::execute(const GatherRowsArgs& a) {
  const int64_t n = a.table.dim(1);
  for (int64_t r = 0; r < a.ids.dim(0); ++r) {
    const int64_t id = a.ids.as<int32_t>()[r];
    for (int64_t c = 0; c < a.copies; ++c)
      for (int64_t j = 0; j < n; ++j) set(a.out, get(a.table, id, j), r, c * n + j);
  }
}

void RefOps::execute(const LinearArgs& a) {
  const Math math = product_math(a.math, a.x.dtype(), a.w.dtype(), a.x.dim(0));
  for (int64_t n = 0; n < a.w.dim(0); ++n) {
    const std::vector<double> w = get_row(a.w, n);
    for (int64_t m = 0; m < a.x.dim(0); ++m) set(a.out, product(math, get_row(a.x, m), w), m, n);
  }
}

void RefOps::execute(const RmsNormArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t g = 0; g < a.x.dim(1); ++g) {
      const std::vector<double> x = get_row(a.x, r, g);
      const double scale = 1.0 / std::sqrt(mean_square(x) + static_cast<double>(a.eps));
      for (int64_t j = 0; j < a.x.dim(2); ++j) {
        const double normalised = x[static_cast<size_t>(j)] * scale;
        const double w = get(a.w, a.w.dim(0) == 1 ? 0 : g, j);
        switch (a.weight) {
          case NormWeight::one_plus:
            set(a.out, normalised * (1.0 + w), r, g, j);
            break;
          case NormWeight::plain:
            set(a.out, rnd(normalised) * w, r, g, j);
            break;
        }
      }
    }
  }
}

void RefOps::execute(const ScaledSiluArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t j = 0; j < a.x.dim(1); ++j) set(a.out, silu(rnd(get(a.x, r, j) * static_cast<double>(a.scale))), r, j);
}

void RefOps::execute(const SwigluArgs& a) {
  const RefRnd rnd(a.out.dtype(), a.rounding);
  const int64_t n = a.out.dim(1);
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t j = 0; j < n; ++j) set(a.out, rnd(silu(get(a.x, r, j))) * get(a.x, r, n + j), r, j);
}

void RefOps::execute(const AddArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t j = 0; j < a.x.dim(1); ++j) set(a.out, get(a.x, r, j) + get(a.y, r, j), r, j);
}

void RefOps::execute(const MulSigmoidArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  for (int64_t r = 0; r < a.x.dim(0); ++r)
    for (int64_t h = 0; h < a.x.dim(1); ++h)
      for (int64_t j = 0; j < a.x.dim(2); ++j)
        set(a.out, get(a.x, r, h, j) * rnd(sigmoid(get(a.gate, r, h, j))), r, h, j);
}

void RefOps::execute(const HyperReadArgs& a) {
  Arena measuring;
  const HyperReadScratch sizes(measuring, a, 0);
  std::vector<std::byte> memory(static_cast<size_t>(measuring.peak_bytes() + Arena::kAlignment));
  const auto base = reinterpret_cast<uintptr_t>(memory.data());
  const auto misaligned = static_cast<int64_t>(base % Arena::kAlignment);
  Arena arena(memory.data() + (misaligned == 0 ? 0 : Arena::kAlignment - misaligned), measuring.peak_bytes());
  for_each_part(a, HyperReadScratch(arena, a, 0), [this](const auto& part) { execute(part); });
}

void RefOps::execute(const StreamMixArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  const int64_t n = a.out.dim(1);
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < a.streams; ++c) sum += rnd(rnd(sigmoid(get(a.u, r, c * n + j))) * get(a.x, r, c * n + j));
      set(a.out, sum / static_cast<double>(a.streams), r, j);
    }
  }
}

void RefOps::execute(const StreamWriteArgs& a) {
  const RefRnd rnd(a.stack.dtype(), a.rounding);
  const int64_t n = a.y.dim(1);
  for (int64_t r = 0; r < a.y.dim(0); ++r) {
    for (int64_t c = 0; c < a.streams; ++c) {
      const double inj = rnd(2.0 * rnd(sigmoid(rnd(get(a.logits, r, c) / static_cast<double>(a.streams)))));
      for (int64_t j = 0; j < n; ++j)
        set(a.stack, get(a.stack, r, c * n + j) + rnd(get(a.y, r, j) * inj), r, c * n + j);
    }
  }
}

void RefOps::execute(const GatedNormArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t h = 0; h < a.x.dim(1); ++h) {
      const std::vector<double> x = get_row(a.x, r, h);
      const double scale = 1.0 / std::sqrt(mean_square(x) + static_cast<double>(a.eps));
      for (int64_t j = 0; j < a.x.dim(2); ++j) {
        const double z = get(a.z, r, h, j);
        const double act = a.gate == Gate::sigmoid ? sigmoid(z) : silu(z);
        set(a.out, rnd(get(a.w, j) * rnd(x[static_cast<size_t>(j)] * scale)) * act, r, h, j);
      }
    }
  }
}

void RefOps::execute(const RouterTopkArgs& a) {
  const int64_t experts = a.logits.dim(1), k = a.ids.dim(1);
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const std::vector<double> logits = get_row(a.logits, r);
    double largest = logits[0], denominator = 0;
    for (const double logit : logits) largest = std::max(largest, logit);
    for (const double logit : logits) denominator += std::exp(logit - largest);

    // Repeated argmax; the first of equals is the lower id. Logits order as probabilities do.
    std::vector<int64_t> chosen;
    std::vector<bool> taken(logits.size(), false);
    double chosen_sum = 0;
    for (int64_t s = 0; s < k; ++s) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        if (taken[static_cast<size_t>(e)]) continue;
        if (best < 0 || logits[static_cast<size_t>(e)] > logits[static_cast<size_t>(best)]) best = e;
      }
      taken[static_cast<size_t>(best)] = true;
      chosen.push_back(best);
      chosen_sum += std::exp(logits[static_cast<size_t>(best)] - largest) / denominator;
    }
    for (int64_t s = 0; s < k; ++s) {
      const int64_t e = chosen[static_cast<size_t>(s)];
      const double p = std::exp(logits[static_cast<size_t>(e)] - largest) / denominator;
      a.ids.row<int32_t>(r)[s] = static_cast<int32_t>(e);
      set(a.weights, round_to(a.round_to, a.normalise ? p / chosen_sum : p), r, s);
    }
  }
}

void RefOps::execute(const SwigluExpertsArgs& a) {
  const RefRnd rnd(a.x.dtype(), a.rounding);
  const int64_t hidden = a.x.dim(1), inter = a.intermediate;
  for (const ExpertRun& run : a.runs) {
    const Tensor gate_up(const_cast<void*>(run.gate_up), a.weight_dtype, {2 * inter, hidden});
    const Tensor down(const_cast<void*>(run.down), a.weight_dtype, {hidden, inter});
    const Math math = product_math(a.math, a.x.dtype(), a.weight_dtype, run.count);
    for (int64_t i = run.begin; i < run.begin + run.count; ++i) {
      const std::vector<double> t = get_row(a.x, a.rows[static_cast<size_t>(i)]);
      std::vector<double> h;
      for (int64_t j = 0; j < inter; ++j) {
        const double gate = rnd(product(math, t, get_row(gate_up, j)));
        const double up = rnd(product(math, t, get_row(gate_up, inter + j)));
        h.push_back(round_to(a.x.dtype(), rnd(silu(gate)) * up));
      }
      for (int64_t j = 0; j < hidden; ++j)
        set(a.out, product(math, h, get_row(down, j)), a.out_rows[static_cast<size_t>(i)], j);
    }
  }
}

void RefOps::execute(const SwigluRoutedArgs& a) {
  const int64_t k = a.ids.dim(1), up_bytes = 2 * a.intermediate * a.x.dim(1) * dtype_bytes(a.slab.dtype());
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t s = 0; s < k; ++s) {
      const int32_t slot = a.slots.as<int32_t>()[a.ids.row<int32_t>(r)[s]];
      a.present.row<uint8_t>(r)[s] = slot < 0 ? 0 : 1;
      if (slot < 0) continue;
      const auto* block = static_cast<const std::byte*>(a.slab.narrow(0, slot, 1).data());
      const ExpertRun run{.gate_up = block, .down = block + up_bytes, .begin = 0, .count = 1};
      const auto row = static_cast<int32_t>(r), out_row = static_cast<int32_t>(r * k + s);
      execute(SwigluExpertsArgs{.x = a.x,
                                .out = a.out,
                                .runs = {&run, 1},
                                .rows = {&row, 1},
                                .out_rows = {&out_row, 1},
                                .intermediate = a.intermediate,
                                .weight_dtype = a.slab.dtype(),
                                .rounding = a.rounding});
    }
  }
}

void RefOps::execute(const MoeCombineArgs& a) {
  const RefRnd rnd(a.out.dtype(), a.rounding);
  const int64_t k = a.weights.dim(1);
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t j = 0; j < a.out.dim(1); ++j) {
      double routed = 0;
      for (int64_t s = 0; s < k; ++s) {
        if (a.present && a.present.row<uint8_t>(r)[s] == 0) continue;
        routed += get(a.weights, r, s) * get(a.parts, r * k + s, j);
      }
      if (!a.shared) {
        set(a.out, routed, r, j);
        continue;
      }
      const double gate = a.gate ? rnd(sigmoid(get(a.gate, r, 0))) : 1.0;
      set(a.out, rnd(routed) + rnd(gate * get(a.shared, r, j)), r, j);
    }
  }
}

void RefOps::execute(const SignedRootGateArgs& a) {
  const RefRnd rnd(a.key.dtype(), a.rounding);
  const int64_t n = a.key.dim(2);
  const double floor = rnd(1e-6);
  for (int64_t r = 0; r < a.key.dim(0); ++r) {
    for (int64_t c = 0; c < a.key.dim(1); ++c) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += rnd(get(a.key, r, c, j) * get(a.query, r, c, j));
      const double s = rnd(rnd(sum) / std::sqrt(static_cast<double>(n)));
      const double sign = s > 0 ? 1.0 : s < 0 ? -1.0 : 0.0;
      const double g = rnd(std::sqrt(std::max(std::abs(s), floor))) * sign;
      for (int64_t j = 0; j < n; ++j) set(a.out, rnd(sigmoid(g)) * get(a.value, r, j), r, c, j);
    }
  }
}

void RefOps::execute(const TopkArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    const std::vector<double> x = get_row(a.x, r);
    const bool has_order = std::all_of(x.begin(), x.end(), [](double value) { return value < INFINITY; });
    std::vector<int32_t> ids;
    for (size_t j = 0; j < x.size(); ++j) ids.push_back(static_cast<int32_t>(j));
    const auto value = [&](int32_t id) { return x[static_cast<size_t>(id)]; };
    if (has_order) std::stable_sort(ids.begin(), ids.end(), [&](int32_t i, int32_t j) { return value(i) > value(j); });
    for (int64_t s = 0; s < a.ids.dim(1); ++s) {
      const int32_t id = ids[static_cast<size_t>(s)];
      a.ids.row<int32_t>(r)[s] = has_order ? id : -1;
      if (has_order) set(a.values, value(id) == 0 ? 0.0 : value(id), r, s);
    }
  }
}

}  // namespace offload::cpu
