#include "bench_shapes.h"

#include <fmt/format.h>

#include <cmath>

namespace offload::tools {
namespace {

constexpr int64_t kRotateBytes = int64_t{2} << 30;
constexpr int64_t kHidden = 2560, kIntermediate = 640, kExperts = 512, kTopK = 10, kStreams = 4;
constexpr int64_t kHeads = 24, kKvHeads = 2, kHeadDim = 256, kIndexHeads = 4, kIndexDim = 128, kRatio = 4;
constexpr int64_t kLowRank = 320, kVocabulary = 248320;
constexpr int64_t kKeyHeads = 16, kValueHeads = 48, kDeltaDim = 128;
constexpr int64_t kQkvColumns = (2 * kKeyHeads + kValueHeads) * kDeltaDim;
constexpr int64_t kPromptRows = 512, kLongPromptRows = 8192;
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

// Uniform numbers of variance 1 / columns, as dummy weights are.
Tensor weights(BenchMemory& memory, int64_t rows, int64_t columns) {
  return memory.numbers(kBf16, {rows, columns}, std::sqrt(3.0f / static_cast<float>(columns)));
}

// Cases of a long prompt have a group of their own: a CPU takes minutes for them.
std::string_view group_of(int64_t rows) {
  return rows >= kLongPromptRows ? "prompt" : "published";
}

void add_linear(std::vector<BenchCase>& cases, int64_t rows, int64_t columns, bool rotates, int64_t k = kHidden) {
  cases.push_back({"linear", fmt::format("{}/linear/m={},n={},k={}", group_of(rows), rows, columns, k),
                   [=](BenchMemory& memory) -> PreparedBench {
                     const int64_t sets = rotates ? 1 + kRotateBytes / (columns * k * 2) : 1;
                     const Tensor x = memory.numbers(kBf16, {rows, k});
                     const Tensor w = weights(memory, sets * columns, k);
                     const Tensor out = memory.empty(kBf16, {rows, columns});
                     return {[=](Ops& ops, int64_t call) {
                               ops(LinearArgs{.x = x, .w = w.narrow(0, call % sets * columns, columns), .out = out});
                             },
                             {out}};
                   }});
}

// `runs` experts of `rows` rows each.
void add_experts(std::vector<BenchCase>& cases, int64_t runs, int64_t rows, bool rotates) {
  cases.push_back(
      {"swiglu_experts", fmt::format("{}/swiglu_experts/experts={},rows={}", group_of(runs * rows), runs, rows),
       [=](BenchMemory& memory) -> PreparedBench {
         constexpr int64_t kElements = 3 * kIntermediate * kHidden;  // gate, up, down of one expert
         const int64_t sets = rotates ? 1 + kRotateBytes / (runs * kElements * 2) : 1;
         const Tensor x = memory.numbers(kBf16, {rows, kHidden});
         const Tensor w = weights(memory, sets * runs * 3 * kIntermediate, kHidden);
         const Tensor out = memory.empty(kF32, {runs * rows, kHidden});
         struct Plan {
           std::vector<ExpertRun> experts;
           std::vector<int32_t> rows, out_rows;
         };
         Plan plan;
         for (int64_t e = 0; e < sets * runs; ++e) {
           const bf16* first = w.as<bf16>() + e * kElements;
           plan.experts.push_back({first, first + 2 * kIntermediate * kHidden, e % runs * rows, rows});
         }
         for (int64_t i = 0; i < runs * rows; ++i) {
           plan.rows.push_back(static_cast<int32_t>(i % rows));
           plan.out_rows.push_back(static_cast<int32_t>(i));
         }
         return {
             [=, plan = std::move(plan)](Ops& ops, int64_t call) {
               SwigluExpertsArgs args;
               args.x = x;
               args.out = out;
               args.runs =
                   std::span(plan.experts).subspan(static_cast<size_t>(call % sets * runs), static_cast<size_t>(runs));
               args.rows = plan.rows;
               args.out_rows = plan.out_rows;
               args.intermediate = kIntermediate;
               ops(args);
             },
             {out}};
       }});
}

// One row through experts that the device finds itself; each call through others.
void add_routed(std::vector<BenchCase>& cases) {
  cases.push_back(
      {"swiglu_routed", "published/swiglu_routed/rows=1", [](BenchMemory& memory) -> PreparedBench {
         constexpr int64_t kSets = 20, kHeld = kSets * kTopK;
         const auto itself = [](int64_t i) { return static_cast<int32_t>(i); };
         const Tensor ids = memory.ids({kSets, kTopK}, itself);
         SwigluRoutedArgs args;
         args.x = memory.numbers(kBf16, {1, kHidden});
         args.slots = memory.ids({kHeld}, itself);
         args.slab = weights(memory, kHeld * 3 * kIntermediate, kHidden).reshaped({kHeld, 3 * kIntermediate * kHidden});
         args.out = memory.empty(kBf16, {kTopK, kHidden});
         args.present = memory.empty(DType::u8, {1, kTopK});
         args.intermediate = kIntermediate;
         return {[=](Ops& ops, int64_t call) {
                   SwigluRoutedArgs own = args;
                   own.ids = ids.narrow(0, call % kSets, 1);
                   ops(own);
                 },
                 {args.out}};
       }});
}

void add_hyper_read(std::vector<BenchCase>& cases) {
  cases.push_back({"hyper_read", "published/hyper_read/rows=1", [](BenchMemory& memory) -> PreparedBench {
                     constexpr int64_t kWidth = kStreams * kHidden, kSets = 100;  // more than a cache holds
                     const Tensor down = weights(memory, kSets * kLowRank, kWidth);
                     const Tensor up = weights(memory, kSets * kWidth, kLowRank);
                     HyperReadArgs args;
                     args.stack = memory.numbers(kBf16, {1, kWidth});
                     args.norm = memory.numbers(kF32, {kStreams, kHidden});
                     args.inject = weights(memory, kStreams, kWidth);
                     args.out = memory.empty(kBf16, {1, kHidden});
                     args.logits = memory.empty(kF32, {1, kStreams});
                     args.streams = kStreams;
                     return {[=](Ops& ops, int64_t call) {
                               HyperReadArgs own = args;
                               own.down = down.narrow(0, call % kSets * kLowRank, kLowRank);
                               own.up = up.narrow(0, call % kSets * kWidth, kWidth);
                               ops(own);
                             },
                             {args.out}};
                   }});
}

// A case of `rows` rows whose arguments are the same at every call; `make` returns them. `more` behind the rows.
template <typename Make>
void add_fixed(std::vector<BenchCase>& cases, std::string op, int64_t rows, const std::string& more, const Make& make) {
  std::string name = fmt::format("{}/{}/rows={}{}", group_of(rows), op, rows, more);
  cases.push_back({std::move(op), std::move(name), [=](BenchMemory& memory) -> PreparedBench {
                     const auto args = make(memory);
                     return {[=](Ops& ops, int64_t) { ops(args); }, {args.out}};
                   }});
}

// What a sampler that keeps 20 asks for, and the greedy one.
void add_topk(std::vector<BenchCase>& cases, int64_t k) {
  cases.push_back({"topk", fmt::format("published/topk/rows=1,k={}", k), [=](BenchMemory& memory) -> PreparedBench {
                     const TopkArgs args{.x = memory.numbers(kF32, {1, kVocabulary}, 4.0f),
                                         .values = memory.empty(kF32, {1, k}),
                                         .ids = memory.empty(DType::i32, {1, k})};
                     return {[=](Ops& ops, int64_t) { ops(args); }, {args.values, args.ids}};
                   }});
}

void add_attention(std::vector<BenchCase>& cases, int64_t rows, int64_t positions, int64_t budget) {
  add_fixed(
      cases, "attention", rows,
      fmt::format(",positions={}{}", positions, budget > 0 ? fmt::format(",blocks={}", budget) : ""),
      [=](BenchMemory& memory) {
        AttentionArgs args;
        args.q = memory.numbers(kBf16, {rows, kHeads, kHeadDim});
        args.k = memory.numbers(kBf16, {positions, kKvHeads, kHeadDim});
        args.v = memory.numbers(kBf16, {positions, kKvHeads, kHeadDim});
        args.out = memory.empty(kBf16, {rows, kHeads, kHeadDim});
        args.first = positions - rows;
        args.scale = 1.0f / 16;
        if (budget == 0) return args;
        const int64_t step = args.first / kRatio / budget;
        args.blocks = memory.ids({rows, budget}, [=](int64_t i) { return static_cast<int32_t>(i % budget * step); });
        args.counts = memory.ids({rows}, [=](int64_t) { return static_cast<int32_t>(budget); });
        args.ratio = kRatio;
        return args;
      });
}

void add_gated_delta(std::vector<BenchCase>& cases, int64_t rows, int64_t chunk_rows) {
  add_fixed(cases, "gated_delta", rows, fmt::format(",chunk={}", chunk_rows), [=](BenchMemory& memory) {
    GatedDeltaArgs args{.qkv = memory.numbers(kBf16, {rows, kQkvColumns}),
                        .a = memory.numbers(kBf16, {rows, kValueHeads}),
                        .b = memory.numbers(kBf16, {rows, kValueHeads}),
                        .a_log = memory.numbers(kF32, {kValueHeads}),
                        .dt_bias = memory.numbers(kF32, {kValueHeads}),
                        .state = memory.numbers(kF32, {kValueHeads, kDeltaDim, kDeltaDim}, 0.1f),
                        .out = memory.empty(kBf16, {rows, kValueHeads * kDeltaDim})};
    args.key_heads = kKeyHeads;
    args.chunk_rows = chunk_rows;
    return args;
  });
}

void add_pointwise(std::vector<BenchCase>& cases, int64_t m) {
  const auto name = [m](std::string_view op) { return fmt::format("{}/{}/rows={}", group_of(m), op, m); };
  add_fixed(cases, "rms_norm", m, "", [=](BenchMemory& memory) {
    return RmsNormArgs{.x = memory.numbers(kBf16, {m, kStreams, kHidden}),
                       .w = memory.numbers(kF32, {1, kHidden}),
                       .out = memory.empty(kBf16, {m, kStreams, kHidden})};
  });
  add_fixed(cases, "causal_conv_silu", m, "", [=](BenchMemory& memory) {
    return CausalConvSiluArgs{.x = memory.numbers(kBf16, {m, kQkvColumns}),
                              .w = memory.numbers(kBf16, {kQkvColumns, 4}),
                              .history = memory.numbers(kBf16, {3, kQkvColumns}),
                              .out = memory.empty(kBf16, {m, kQkvColumns})};
  });
  add_fixed(cases, "gated_norm", m, "", [=](BenchMemory& memory) {
    return GatedNormArgs{.x = memory.numbers(kBf16, {m, kValueHeads, kDeltaDim}),
                         .z = memory.numbers(kBf16, {m, kValueHeads, kDeltaDim}),
                         .w = memory.numbers(kF32, {kDeltaDim}),
                         .out = memory.empty(kBf16, {m, kValueHeads, kDeltaDim})};
  });
  add_fixed(cases, "norm_rope", m, "", [=](BenchMemory& memory) {
    return NormRopeArgs{.x = memory.numbers(kBf16, {m, kHeads, kHeadDim}),
                        .w = memory.numbers(kF32, {kHeadDim}),
                        .table = memory.numbers(kF32, {m, 32, 2}),
                        .out = memory.empty(kBf16, {m, kHeads, kHeadDim})};
  });
  add_fixed(cases, "stream_mix", m, "", [=](BenchMemory& memory) {
    return StreamMixArgs{.x = memory.numbers(kBf16, {m, kStreams * kHidden}),
                         .u = memory.numbers(kBf16, {m, kStreams * kHidden}),
                         .out = memory.empty(kBf16, {m, kHidden}),
                         .streams = kStreams};
  });
  add_fixed(cases, "swiglu", m, "", [=](BenchMemory& memory) {
    return SwigluArgs{.x = memory.numbers(kBf16, {m, 2 * kIntermediate}),
                      .out = memory.empty(kBf16, {m, kIntermediate})};
  });
  add_fixed(cases, "mul_sigmoid", m, "", [=](BenchMemory& memory) {
    return MulSigmoidArgs{.x = memory.numbers(kBf16, {m, kHeads, kHeadDim}),
                          .gate = memory.numbers(kBf16, {m, kHeads, kHeadDim}),
                          .out = memory.empty(kBf16, {m, kHeads, kHeadDim})};
  });
  add_fixed(cases, "moe_combine", m, "", [=](BenchMemory& memory) {
    return MoeCombineArgs{.parts = memory.numbers(kF32, {m * kTopK, kHidden}),
                          .weights = memory.numbers(kF32, {m, kTopK}, 0.1f, 0.1f),
                          .present = {},
                          .shared = memory.numbers(kBf16, {m, kHidden}),
                          .gate = memory.numbers(kBf16, {m, 1}),
                          .out = memory.empty(kBf16, {m, kHidden})};
  });
  cases.push_back(
      {"router_topk", name("router_topk"), [=](BenchMemory& memory) -> PreparedBench {
         const Tensor logits = memory.numbers(kF32, {m, kExperts}, 4.0f);
         const Tensor ids = memory.empty(DType::i32, {m, kTopK}), share = memory.empty(kF32, {m, kTopK});
         return {[=](Ops& ops, int64_t) { ops(RouterTopkArgs{.logits = logits, .ids = ids, .weights = share}); },
                 {ids, share}};
       }});
  cases.push_back({"stream_write", name("stream_write"), [=](BenchMemory& memory) -> PreparedBench {
                     const Tensor stack = memory.numbers(kBf16, {m, kStreams * kHidden});
                     const Tensor y = memory.numbers(kBf16, {m, kHidden}, 0.01f);
                     const Tensor logits = memory.numbers(kBf16, {m, kStreams});
                     return {[=](Ops& ops, int64_t) {
                               ops(StreamWriteArgs{.stack = stack, .y = y, .logits = logits, .streams = kStreams});
                             },
                             {stack}};
                   }});
}

}  // namespace

std::vector<BenchCase> published_shapes() {
  std::vector<BenchCase> cases;
  add_experts(cases, kTopK, 1, true);
  add_routed(cases);
  add_hyper_read(cases);
  add_linear(cases, 1, kQkvColumns, true);
  // The other products of a decode step: hyper-connection, recurrent and attention mixers, router with shared expert.
  add_linear(cases, 1, kLowRank, true, kStreams * kHidden);
  add_linear(cases, 1, kStreams, true, kStreams * kHidden);
  add_linear(cases, 1, kStreams * kHidden, true, kLowRank);
  add_linear(cases, 1, kQkvColumns + kValueHeads * kDeltaDim + 2 * kValueHeads, true);
  add_linear(cases, 1, kHidden, true, kValueHeads * kDeltaDim);
  add_linear(cases, 1, 2 * kHeads * kHeadDim + 2 * kKvHeads * kHeadDim + (kIndexHeads + 1) * kIndexDim, true);
  add_linear(cases, 1, kExperts + 2 * kIntermediate + 1, true);
  add_linear(cases, 1, kHidden, true, kIntermediate);
  add_linear(cases, 1, kVocabulary, false);
  for (const int64_t k : {1, 32}) add_topk(cases, k);
  for (const int64_t columns : {1280, 2560, 6144, 10240, 12288}) add_linear(cases, kPromptRows, columns, false);
  for (const int64_t columns : {2560, 10240, 16480}) add_linear(cases, kLongPromptRows, columns, false);
  add_linear(cases, kLongPromptRows, kHidden, false, kValueHeads * kDeltaDim);
  add_experts(cases, kExperts / 4, kLongPromptRows * kTopK / kExperts, false);
  add_experts(cases, 4, 160, false);
  add_experts(cases, 16, 10, false);  // what 512 tokens give each of 512 experts
  add_gated_delta(cases, 1, 0);
  add_gated_delta(cases, kPromptRows, 64);
  add_gated_delta(cases, kLongPromptRows, 64);
  add_attention(cases, 1, 32768, 0);
  add_attention(cases, 1, 32768, 512);
  add_attention(cases, kPromptRows, 4096, 0);
  add_attention(cases, kLongPromptRows, 2 * kLongPromptRows, 512);
  add_fixed(cases, "block_scores", 1, ",positions=32768", [](BenchMemory& memory) {
    constexpr int64_t kBlocks = 32768 / kRatio;
    BlockScoresArgs args{.q = memory.numbers(kBf16, {1, kIndexHeads, kIndexDim}),
                         .keys = memory.numbers(kBf16, {kBlocks, kIndexDim}),
                         .out = memory.numbers(kF32, {1, kBlocks})};
    args.first = kBlocks * kRatio - 1;
    args.ratio = kRatio;
    return args;
  });
  add_pointwise(cases, 1);
  add_pointwise(cases, kPromptRows);
  add_pointwise(cases, kLongPromptRows);
  return cases;
}

}  // namespace offload::tools
