// Elementwise ops and norms: each row passes through F32 buffers in the L1 cache; all are bound by memory.
#include "cpu/cpu_ops.h"

#include <cmath>

#include "core/op_parts.h"
#include "core/sampler.h"
#include "cpu/cpu_ops_rows.h"

namespace offload::cpu {

CpuOps::CpuOps(CpuOpsOptions options) : threads_(options.threads), kernels_(cpu_kernels(options.isa)) {
  OFL_ASSERT(threads_ >= 1);
}

Arena CpuOps::scratch_arena() const {
  OFL_ASSERT(scratch());
  return Arena(scratch().data(), scratch().bytes());
}

void CpuOps::execute(const CopyArgs& a) {
  const int64_t n = a.x.dim(1);
  for_each_row(threads_, a.x.dim(0), n, [&](int64_t r, int) {
    RowBuffer x;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, row_offset(a.x, r) + begin, x, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

void CpuOps::execute(const GatherRowsArgs& a) {
  const int64_t n = a.table.dim(1);
  const int32_t* ids = a.ids.as<int32_t>();
  for_each_row(threads_, a.ids.dim(0), n * a.copies, [&](int64_t r, int) {
    RowBuffer x;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.table, row_offset(a.table, ids[r]) + begin, x, count);
      for (int64_t c = 0; c < a.copies; ++c) store_row(kernels_, x, a.out, row_offset(a.out, r) + c * n + begin, count);
    });
  });
}

namespace {

// rsqrt(mean(x^2) + eps) of n elements.
float inverse_rms(const CpuKernels& kernels, const Tensor& t, int64_t offset, int64_t n, float eps) {
  RowBuffer x;
  float squares = 0;
  for_each_chunk(n, [&](int64_t begin, int64_t count) {
    load_row(kernels, t, offset + begin, x, count);
    squares += kernels.dot(x, x, count);
  });
  return 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
}

}  // namespace

void CpuOps::execute(const RmsNormArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t groups = a.x.dim(1), n = a.x.dim(2);
  for_each_row(threads_, a.x.dim(0) * groups, n, [&](int64_t item, int) {
    const int64_t r = item / groups, g = item % groups, from = row_offset(a.x, r, g);
    const float scale = inverse_rms(kernels_, a.x, from, n, a.eps);
    const float* w = a.w.row<float>(a.w.dim(0) == 1 ? 0 : g);
    RowBuffer x, weight;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, from + begin, x, count);
      kernels_.scale(x, scale, count);
      std::memcpy(weight.f, w + begin, static_cast<size_t>(count) * sizeof(float));
      switch (a.weight) {
        case NormWeight::one_plus:
          kernels_.mul_add(x, x, weight, count);
          break;
        case NormWeight::plain:
          rnd(x, count);
          kernels_.mul(x, weight, count);
          break;
      }
      store_row(kernels_, x, a.out, row_offset(a.out, r, g) + begin, count);
    });
  });
}

void CpuOps::execute(const ScaledSiluArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t n = a.x.dim(1);
  for_each_row(threads_, a.x.dim(0), n, [&](int64_t r, int) {
    RowBuffer x;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, row_offset(a.x, r) + begin, x, count);
      kernels_.scale(x, a.scale, count);
      rnd(x, count);
      kernels_.silu(x, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

void CpuOps::execute(const SwigluArgs& a) {
  const Rnd rnd(kernels_, a.out.dtype(), a.rounding);
  const int64_t n = a.out.dim(1);
  for_each_row(threads_, a.x.dim(0), 2 * n, [&](int64_t r, int) {
    RowBuffer gate, up;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, row_offset(a.x, r) + begin, gate, count);
      load_row(kernels_, a.x, row_offset(a.x, r) + n + begin, up, count);
      kernels_.silu(gate, count);
      rnd(gate, count);
      kernels_.mul(gate, up, count);
      store_row(kernels_, gate, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

void CpuOps::execute(const AddArgs& a) {
  const int64_t n = a.x.dim(1);
  for_each_row(threads_, a.x.dim(0), n, [&](int64_t r, int) {
    RowBuffer x, y;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, row_offset(a.x, r) + begin, x, count);
      load_row(kernels_, a.y, row_offset(a.y, r) + begin, y, count);
      kernels_.add(x, y, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

void CpuOps::execute(const MulSigmoidArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t heads = a.x.dim(1), n = a.x.dim(2);
  for_each_row(threads_, a.x.dim(0) * heads, n, [&](int64_t item, int) {
    const int64_t r = item / heads, h = item % heads;
    RowBuffer x, gate;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, row_offset(a.x, r, h) + begin, x, count);
      load_row(kernels_, a.gate, row_offset(a.gate, r, h) + begin, gate, count);
      kernels_.sigmoid(gate, count);
      rnd(gate, count);
      kernels_.mul(x, gate, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r, h) + begin, count);
    });
  });
}

void CpuOps::execute(const StreamMixArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t n = a.out.dim(1);
  const float share = 1.0f / static_cast<float>(a.streams);
  for_each_row(threads_, a.out.dim(0), n * a.streams, [&](int64_t r, int) {
    RowBuffer total, x, u;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      std::fill_n(total.f, kRowChunk, 0.0f);
      for (int64_t c = 0; c < a.streams; ++c) {
        load_row(kernels_, a.u, row_offset(a.u, r) + c * n + begin, u, count);
        load_row(kernels_, a.x, row_offset(a.x, r) + c * n + begin, x, count);
        kernels_.sigmoid(u, count);
        rnd(u, count);
        kernels_.mul(x, u, count);
        rnd(x, count);
        kernels_.add(total, x, count);
      }
      kernels_.scale(total, share, count);
      store_row(kernels_, total, a.out, row_offset(a.out, r) + begin, count);
    });
  });
}

void CpuOps::execute(const StreamWriteArgs& a) {
  const Rnd rnd(kernels_, a.stack.dtype(), a.rounding);
  const int64_t n = a.y.dim(1);
  for_each_row(threads_, a.y.dim(0), n * a.streams, [&](int64_t r, int) {
    RowBuffer stack, y;
    for (int64_t c = 0; c < a.streams; ++c) {
      const float logit = load_one(a.logits, row_offset(a.logits, r) + c) / static_cast<float>(a.streams);
      const float inj = rnd.one(2.0f * rnd.one(sigmoid_one(kernels_, rnd.one(logit))));
      for_each_chunk(n, [&](int64_t begin, int64_t count) {
        const int64_t at = row_offset(a.stack, r) + c * n + begin;
        load_row(kernels_, a.stack, at, stack, count);
        load_row(kernels_, a.y, row_offset(a.y, r) + begin, y, count);
        kernels_.scale(y, inj, count);
        rnd(y, count);
        kernels_.add(stack, y, count);
        store_row(kernels_, stack, a.stack, at, count);
      });
    }
  });
}

void CpuOps::execute(const GatedNormArgs& a) {
  const Rnd rnd(kernels_, a.x.dtype(), a.rounding);
  const int64_t heads = a.x.dim(1), n = a.x.dim(2);
  for_each_row(threads_, a.x.dim(0) * heads, n, [&](int64_t item, int) {
    const int64_t r = item / heads, h = item % heads, from = row_offset(a.x, r, h);
    const float scale = inverse_rms(kernels_, a.x, from, n, a.eps);
    RowBuffer x, z;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.x, from + begin, x, count);
      kernels_.scale(x, scale, count);
      rnd(x, count);
      std::memcpy(z.f, a.w.as<float>() + begin, static_cast<size_t>(count) * sizeof(float));
      kernels_.mul(x, z, count);
      rnd(x, count);
      load_row(kernels_, a.z, row_offset(a.z, r, h) + begin, z, count);
      switch (a.gate) {
        case Gate::sigmoid:
          kernels_.sigmoid(z, count);
          break;
        case Gate::silu:
          kernels_.silu(z, count);
          break;
      }
      kernels_.mul(x, z, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r, h) + begin, count);
    });
  });
}

void CpuOps::execute(const MeanPoolArgs& a) {
  const int64_t n = a.out.dim(1);
  const float share = 1.0f / static_cast<float>(a.pool);
  for_each_row(threads_, a.out.dim(0), n * a.pool, [&](int64_t b, int) {
    RowBuffer total, x;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      std::fill_n(total.f, kRowChunk, 0.0f);
      for (int64_t i = 0; i < a.pool; ++i) {
        load_row(kernels_, a.x, row_offset(a.x, b * a.pool + i) + begin, x, count);
        kernels_.add(total, x, count);
      }
      kernels_.scale(total, share, count);
      store_row(kernels_, total, a.out, row_offset(a.out, b) + begin, count);
    });
  });
}

void CpuOps::execute(const SignedRootGateArgs& a) {
  const Rnd rnd(kernels_, a.key.dtype(), a.rounding);
  const int64_t streams = a.key.dim(1), n = a.key.dim(2);
  const float floor = rnd.one(1e-6f), root = std::sqrt(static_cast<float>(n));
  for_each_row(threads_, a.key.dim(0) * streams, 3 * n, [&](int64_t item, int) {
    const int64_t r = item / streams, c = item % streams;
    RowBuffer x, y;
    float sum = 0;
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.key, row_offset(a.key, r, c) + begin, x, count);
      load_row(kernels_, a.query, row_offset(a.query, r, c) + begin, y, count);
      kernels_.mul(x, y, count);
      rnd(x, count);
      sum += kernels_.sum(x, count);
    });
    const float s = rnd.one(rnd.one(sum) / root);
    const float sign = s > 0 ? 1.0f : s < 0 ? -1.0f : 0.0f;
    const float gate = rnd.one(std::sqrt(std::max(std::abs(s), floor))) * sign;
    const float share = rnd.one(sigmoid_one(kernels_, gate));
    for_each_chunk(n, [&](int64_t begin, int64_t count) {
      load_row(kernels_, a.value, row_offset(a.value, r) + begin, x, count);
      kernels_.scale(x, share, count);
      store_row(kernels_, x, a.out, row_offset(a.out, r, c) + begin, count);
    });
  });
}

int64_t CpuOps::scratch_bytes(const HyperReadArgs& a) const {
  Arena arena;
  HyperReadScratch(arena, a, nested_scratch_bytes(a, [this](const auto& part) { return scratch_bytes(part); }));
  return arena.peak_bytes();
}

void CpuOps::execute(const HyperReadArgs& a) {
  if (a.stack.dim(0) == 0) return;
  Arena arena = scratch_arena();
  const int64_t nested = nested_scratch_bytes(a, [this](const auto& part) { return scratch_bytes(part); });
  for_each_part(a, HyperReadScratch(arena, a, nested), [this](const auto& part) { execute(part); });
}

void CpuOps::execute(const TopkArgs& a) {
  const int64_t k = a.ids.dim(1);
  for_each_row(threads_, a.x.dim(0), a.x.dim(1), [&](int64_t r, int) {
    Logit best[kTopkMax];
    const bool has_order = largest_logits({a.x.row<float>(r), static_cast<size_t>(a.x.dim(1))},
                                          std::span(best).first(static_cast<size_t>(k)));
    for (int64_t s = 0; s < k; ++s) {
      a.ids.row<int32_t>(r)[s] = has_order ? best[s].id : -1;
      if (has_order) a.values.row<float>(r)[s] = best[s].value;
    }
  });
}

}  // namespace offload::cpu
