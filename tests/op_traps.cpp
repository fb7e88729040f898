#include "op_traps.h"

#include <doctest/doctest.h>

namespace offload {
namespace {

std::vector<double> normals(std::string_view seed, int64_t count, double scale = 1) {
  CaseRandom random(seed);
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(scale * random.normal());
  return values;
}

std::vector<double> slice(const std::vector<double>& values, int64_t begin, int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

// One F32 token from a zero state with a_log = dt_bias = a = b = 0, so that beta = 0.5.
std::vector<double> one_token_delta(OpValues& v, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                                    const std::vector<double>& qkv) {
  const Tensor out = v.blank(kF32, {1, heads * value_dim});
  v.run(GatedDeltaArgs{.qkv = v.put(kF32, {1, static_cast<int64_t>(qkv.size())}, qkv),
                       .a = v.fill(kF32, {1, heads}, 0),
                       .b = v.fill(kF32, {1, heads}, 0),
                       .a_log = v.fill(kF32, {heads}, 0),
                       .dt_bias = v.fill(kF32, {heads}, 0),
                       .state = v.fill(kF32, {heads, key_dim, value_dim}, 0),
                       .out = out,
                       .key_heads = key_heads});
  return v.take(out);
}

// Random F32 rows through the rule, in the recurrent or the chunked form: the outputs, then the final state.
std::vector<double> random_delta(OpValues& v, int64_t rows, int64_t chunk_rows, double a_log) {
  constexpr int64_t kHeads = 3, kDim = 8, kWidth = 2 * kDim + kHeads * kDim;
  const Tensor out = v.blank(kF32, {rows, kHeads * kDim});
  const Tensor state = v.put(kF32, {kHeads, kDim, kDim}, normals("state", kHeads * kDim * kDim));
  v.run(GatedDeltaArgs{.qkv = v.put(kF32, {rows, kWidth}, normals("qkv", rows * kWidth)),
                       .a = v.put(kF32, {rows, kHeads}, normals("a", rows * kHeads)),
                       .b = v.put(kF32, {rows, kHeads}, normals("b", rows * kHeads)),
                       .a_log = v.fill(kF32, {kHeads}, a_log),
                       .dt_bias = v.fill(kF32, {kHeads}, 0),
                       .state = state,
                       .out = out,
                       .key_heads = 1,
                       .chunk_rows = chunk_rows});
  std::vector<double> values = v.take(out);
  for (const double value : v.take(state)) values.push_back(value);
  return values;
}

struct Routing {
  std::vector<double> ids, weights;
};
Routing route(OpValues& v, const std::vector<double>& logits, int64_t k, bool normalise, DType round_to = kF32) {
  const Tensor ids = v.blank(DType::i32, {1, k}), weights = v.blank(kF32, {1, k});
  v.run(RouterTopkArgs{.logits = v.put(kBf16, {1, static_cast<int64_t>(logits.size())}, logits),
                       .ids = ids,
                       .weights = weights,
                       .normalise = normalise,
                       .round_to = round_to});
  return {v.take(ids), v.take(weights)};
}

}  // namespace

void trap_17_the_division_by_the_stream_count_is_inside_the_gate(OpValues& v) {
  const double silu_of_4_over[] = {1.7615941559557649, 0.7310585786300049};  // silu(4 / 2), silu(4 / 4)
  const double injection[] = {1.7615941559557649, 1.4621171572600098};       // 2 sigmoid(4 / 2), 2 sigmoid(4 / 4)
  for (const int i : {0, 1}) {
    const int64_t streams = i == 0 ? 2 : 4;
    const Tensor gate = v.blank(kF32, {1, 1});
    v.run(ScaledSiluArgs{.x = v.fill(kF32, {1, 1}, 4), .out = gate, .scale = 1.0f / static_cast<float>(streams)});
    CHECK(max_difference(v.take(gate), {silu_of_4_over[i]}) < 1e-6);
    const Tensor stack = v.fill(kF32, {1, streams}, 0);
    v.run(StreamWriteArgs{
        .stack = stack, .y = v.fill(kF32, {1, 1}, 1), .logits = v.fill(kF32, {1, streams}, 4), .streams = streams});
    CHECK(max_difference(v.take(stack), std::vector<double>(static_cast<size_t>(streams), injection[i])) < 1e-6);
  }
}

void trap_18_the_mix_is_a_mean_over_streams(OpValues& v) {
  for (const int64_t streams : {2, 4}) {
    const Tensor out = v.blank(kF32, {1, 3});
    v.run(StreamMixArgs{.x = v.fill(kF32, {1, streams * 3}, 6),
                        .u = v.fill(kF32, {1, streams * 3}, 0),
                        .out = out,
                        .streams = streams});
    CHECK(v.take(out) == std::vector<double>{3, 3, 3});
  }
}

void trap_19_a_zero_update_leaves_the_stack_bits_alone(OpValues& v) {
  const Tensor stack = v.put(kBf16, {3, 8}, normals("stack", 24, 30));
  const std::vector<double> before = v.take(stack);
  v.run(StreamWriteArgs{.stack = stack,
                        .y = v.fill(kBf16, {3, 2}, 0),
                        .logits = v.put(kBf16, {3, 4}, normals("logits", 12)),
                        .streams = 4});
  CHECK(v.take(stack) == before);
}

void trap_20_each_stream_has_its_own_statistic_and_weights(OpValues& v) {
  std::vector<double> x = normals("x", 4 * 16);
  const auto norm = [&](const std::vector<double>& w) {
    const Tensor out = v.blank(kF32, {1, 4, 16});
    v.run(RmsNormArgs{.x = v.put(kF32, {1, 4, 16}, x), .w = v.put(kF32, {4, 16}, w), .out = out});
    return v.take(out);
  };
  const std::vector<double> w = normals("w", 4 * 16, 0.3), plain = norm(w);
  for (int64_t j = 16; j < 32; ++j) x[static_cast<size_t>(j)] *= 10;
  const std::vector<double> scaled = norm(w);
  CHECK(slice(scaled, 0, 16) == slice(plain, 0, 16));
  CHECK(slice(scaled, 32, 32) == slice(plain, 32, 32));
  CHECK(max_difference(scaled, plain) < 1e-4);  // the scaled stream differs by eps alone
  std::vector<double> other = w;
  other[63] += 1;  // the last weight reaches the last element and no other
  const std::vector<double> weighted = norm(other);
  CHECK(slice(weighted, 0, 63) == slice(scaled, 0, 63));
  CHECK(weighted[63] != scaled[63]);
}

void trap_21_the_injection_is_one_at_zero_and_between_0_and_2(OpValues& v) {
  const Tensor stack = v.put(kF32, {1, 6}, {1, 2, 1, 2, 1, 2});
  v.run(StreamWriteArgs{
      .stack = stack, .y = v.put(kF32, {1, 2}, {8, -3}), .logits = v.put(kF32, {1, 3}, {0, 240, -240}), .streams = 3});
  CHECK(max_difference(v.take(stack), {9, -1, 17, -4, 1, 2}) < 1e-6);
}

void trap_22_streams_are_stream_major(OpValues& v) {
  const Tensor out = v.blank(kBf16, {1, 12});
  v.run(GatherRowsArgs{
      .table = v.put(kBf16, {2, 3}, {7, 7, 7, 1, 2, 3}), .ids = v.put(DType::i32, {1}, {1}), .out = out, .copies = 4});
  CHECK(v.take(out) == std::vector<double>{1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3});
}

void trap_24_value_heads_share_key_heads_in_consecutive_groups(OpValues& v) {
  // Key head 0 has q = k, key head 1 has q orthogonal to k: only value heads 0, 1, 2 answer.
  const std::vector<double> out =
      one_token_delta(v, 2, 6, 2, 1, {1, 0, /**/ 1, 0, /**/ 1, 0, /**/ 0, 1, /**/ 1, 2, 3, 4, 5, 6});
  const double half_root = 0.35355339059327373;  // beta / sqrt(2)
  CHECK(max_difference(out, {half_root, 2 * half_root, 3 * half_root, 0, 0, 0}) < 1e-5);
}

void trap_25_the_l2_epsilon_is_added_to_the_sum_of_squares(OpValues& v) {
  // |k|^2 = 1e-6, so k shrinks by sqrt(1/2); a mean would give 0.894, max(norm, eps) 1.
  const std::vector<double> out = one_token_delta(v, 1, 1, 4, 1, {1, 0, 0, 0, /**/ 1e-3, 0, 0, 0, /**/ 8});
  CHECK(max_difference(out, {1.4142135623730951}) < 1e-5);  // 0.5 * 8 * sqrt(1/2) / sqrt(4)
}

void trap_26_queries_are_scaled_after_normalisation(OpValues& v) {
  for (const double length : {1.0, 50.0}) {
    const std::vector<double> out = one_token_delta(v, 1, 1, 4, 1, {length, 0, 0, 0, /**/ 3 * length, 0, 0, 0, /**/ 8});
    CHECK(max_difference(out, {2}) < 1e-5);  // 0.5 * 8 / sqrt(4)
  }
}

void trap_27_the_output_is_read_after_the_update(OpValues& v) {
  // o = beta (q . k) v: with q = (3, 4) / 5, k = (1, 0), beta = 1/2 and the factor 1/sqrt(2).
  const std::vector<double> out = one_token_delta(v, 1, 1, 2, 3, {3, 4, /**/ 1, 0, /**/ 1, -2, 4});
  const double factor = 0.5 * 0.6 * 0.70710678118654752;
  CHECK(max_difference(out, {factor, -2 * factor, 4 * factor}) < 1e-5);
}

void trap_29_chunks_with_tails_equal_the_recurrence(OpValues& v) {
  for (const int64_t rows : {1, 2, 63, 64, 65, 127, 128, 130}) {
    CAPTURE(rows);
    CHECK(max_difference(random_delta(v, rows, 64, 0), random_delta(v, rows, 0, 0)) < 2e-5);
  }
}

void trap_30_the_convolution_caches_its_inputs(OpValues& v) {
  constexpr int64_t kRows = 6, kChannels = 2;
  const std::vector<double> x = normals("x", kRows * kChannels);
  const Tensor w = v.put(kF32, {kChannels, 4}, normals("w", kChannels * 4));
  const Tensor history = v.fill(kF32, {3, kChannels}, 0), all = v.blank(kF32, {kRows, kChannels});
  v.run(CausalConvSiluArgs{.x = v.put(kF32, {kRows, kChannels}, x), .w = w, .history = history, .out = all});
  CHECK(v.take(history) == v.take(v.put(kF32, {3, kChannels}, slice(x, 6, 6))));
  const Tensor stepwise = v.fill(kF32, {3, kChannels}, 0);
  for (int64_t t = 0; t < kRows; ++t) {
    const Tensor one = v.blank(kF32, {1, kChannels});
    v.run(CausalConvSiluArgs{
        .x = v.put(kF32, {1, kChannels}, slice(x, t * kChannels, kChannels)), .w = w, .history = stepwise, .out = one});
    CHECK(v.take(one) == slice(v.take(all), t * kChannels, kChannels));
  }
  CHECK(v.take(stepwise) == v.take(history));
}

void trap_32_strong_decay_gives_no_infinity(OpValues& v) {
  for (const int64_t chunk_rows : {0, 64}) {
    for (const double value : random_delta(v, 70, chunk_rows, 8)) CHECK(std::isfinite(value));  // g about -2000
    CHECK(max_difference(random_delta(v, 70, chunk_rows, 8), random_delta(v, 70, 0, 8)) < 2e-5);
  }
}

void trap_34_a_zero_output_gate_halves(OpValues& v) {
  const Tensor out = v.blank(kBf16, {1, 2, 2});
  v.run(MulSigmoidArgs{.x = v.put(kBf16, {1, 2, 2}, {1, -3, 8, 0.5}), .gate = v.fill(kBf16, {1, 2, 2}, 0), .out = out});
  CHECK(v.take(out) == std::vector<double>{0.5, -1.5, 4, 0.25});
}

void trap_36_relu_comes_before_the_sum_over_heads(OpValues& v) {
  const Tensor out = v.blank(kF32, {1, 1});
  v.run(BlockScoresArgs{.q = v.put(kBf16, {1, 4, 2}, {3, 0, -3, 0, 0, 1, 0, -1}),
                        .keys = v.put(kBf16, {1, 2}, {2, 0}),
                        .out = out,
                        .first = 0,
                        .ratio = 1,
                        .scale = 0.70710678f});
  CHECK(max_difference(v.take(out), {6 * 0.70710678118654752}) < 1e-5);
}

void trap_38_the_last_complete_block_competes(OpValues& v) {
  // n = 12 visible positions: the query's own block 2 is complete and loses.
  const Tensor blocks = v.blank(DType::i32, {1, 2}), counts = v.blank(DType::i32, {1});
  v.run(BlockTopkArgs{
      .scores = v.put(kF32, {1, 3}, {2, 3, 1}), .blocks = blocks, .counts = counts, .first = 11, .ratio = 4});
  CHECK(v.take(counts) == std::vector<double>{2});
  CHECK(v.take(blocks) == std::vector<double>{0, 1});
}

void trap_39_the_visible_count_includes_the_query(OpValues& v) {
  const auto attended = [&](int64_t visible, int64_t budget) {
    const int64_t complete = visible / 4;
    const Tensor blocks = v.blank(DType::i32, {1, budget}), counts = v.blank(DType::i32, {1});
    v.run(BlockTopkArgs{.scores = v.fill(kF32, {1, complete}, 0),
                        .blocks = blocks,
                        .counts = counts,
                        .first = visible - 1,
                        .ratio = 4});
    return 4 * static_cast<int64_t>(v.take(counts)[0]) + visible % 4;
  };
  const int64_t published[][2] = {{3, 3},       {2051, 2051}, {2052, 2048}, {2053, 2049},
                                  {2054, 2050}, {2055, 2051}, {2056, 2048}};
  for (const auto& [visible, expected] : published) CHECK(attended(visible, 512) == expected);
  const int64_t tiny[][2] = {{19, 19}, {20, 16}, {21, 17}, {23, 19}, {24, 16}};
  for (const auto& [visible, expected] : tiny) CHECK(attended(visible, 4) == expected);
}

void trap_48_router_weights_are_a_renormalised_softmax_over_all(OpValues& v) {
  // Logits 0, 0, 1, 1: e^1 / (2 + 2 e) over all four; 1/2 when renormalised over the two largest.
  const Routing plain = route(v, {0, 0, 1, 1}, 2, false);
  CHECK(max_difference(plain.weights, {0.36552928931500245, 0.36552928931500245}) < 1e-6);
  CHECK(max_difference(route(v, {0, 0, 1, 1}, 2, true).weights, {0.5, 0.5}) < 1e-6);
  for (int i = 0; i < 20; ++i) {
    const Routing rounded = route(v, normals(fmt::format("logits {}", i), 512), 10, true, kBf16);
    CHECK(std::abs(sum(rounded.weights) - 1) <= 0x1p-8);
    for (const double weight : rounded.weights)
      CHECK(weight == static_cast<double>(to_float(to_bf16(static_cast<float>(weight)))));
  }
}

void trap_49_equal_logits_pick_the_lower_id(OpValues& v) {
  std::vector<double> logits(512, -2.0);
  for (int i = 0; i < 9; ++i) logits[static_cast<size_t>(500 - 7 * i)] = 1.0;  // nine clear winners
  logits[300] = logits[77] = logits[511] = 0.5;                                // three for the tenth place
  const Routing routing = route(v, logits, 10, true);
  CHECK(routing.ids == std::vector<double>{444, 451, 458, 465, 472, 479, 486, 493, 500, 77});
}

void trap_51_router_weights_follow_their_ids(OpValues& v) {
  for (const int64_t experts : {8, 128, 256, 257, 512}) {
    CAPTURE(experts);
    std::vector<double> logits = normals(fmt::format("logits of {}", experts), experts);
    for (double& logit : logits) logit = static_cast<double>(to_float(to_bf16(static_cast<float>(logit))));
    const Routing routing = route(v, logits, 8, false);
    double denominator = 0;
    for (const double logit : logits) denominator += std::exp(logit);
    for (size_t s = 0; s < routing.ids.size(); ++s) {
      const auto id = static_cast<size_t>(routing.ids[s]);
      CHECK(std::abs(routing.weights[s] - std::exp(logits[id]) / denominator) < 1e-6);
      if (s > 0) CHECK(routing.weights[s] <= routing.weights[s - 1]);
    }
  }
}

void trap_52_the_shared_gate_scales_the_shared_expert_only(OpValues& v) {
  const Tensor out = v.blank(kF32, {1, 2});
  v.run(MoeCombineArgs{.parts = v.put(kF32, {2, 2}, {1, 2, 10, 20}),
                       .weights = v.put(kF32, {1, 2}, {0.75, 0.25}),
                       .present = {},
                       .shared = v.put(kF32, {1, 2}, {8, 6}),
                       .gate = v.fill(kF32, {1, 1}, 0),
                       .out = out});
  CHECK(v.take(out) == std::vector<double>{0.75 + 2.5 + 4, 1.5 + 5 + 3});
}

void trap_56_dilated_taps_are_three_rows_apart(OpValues& v) {
  std::vector<double> impulse(12, 0.0);
  impulse[1] = 1;
  const Tensor history = v.fill(kF32, {9, 1}, 0), out = v.blank(kF32, {12, 1});
  v.run(CausalConvSiluArgs{.x = v.put(kF32, {12, 1}, impulse),
                           .w = v.put(kF32, {1, 4}, {4, 3, 2, 1}),
                           .history = history,
                           .out = out,
                           .dilation = 3});
  std::vector<double> expected(12, 0.0);
  expected[1] = 0.7310585786300049;  // silu(1), silu(2), silu(3), silu(4)
  expected[4] = 1.7615941559557649;
  expected[7] = 2.8577223804673;
  expected[10] = 3.9280551601516338;
  CHECK(max_difference(v.take(out), expected) < 1e-6);
}

void trap_57_a_zero_convolution_leaves_the_direct_branch(OpValues& v) {
  const std::vector<double> gated = normals("gated", 8);
  const Tensor g = v.put(kBf16, {2, 4}, gated), conv = v.blank(kBf16, {2, 4}), out = v.blank(kBf16, {2, 4});
  v.run(CausalConvSiluArgs{.x = v.put(kBf16, {2, 4}, normals("normalised", 8)),
                           .w = v.fill(kBf16, {4, 4}, 0),
                           .history = v.fill(kBf16, {9, 4}, 0),
                           .out = conv,
                           .dilation = 3});
  v.run(AddArgs{.x = g, .y = conv, .out = out});
  CHECK(v.take(out) == v.take(g));
}

void trap_58_a_zero_query_gives_half_the_value(OpValues& v) {
  for (const Rounding rounding : {Rounding::fused, Rounding::reference}) {
    const Tensor out = v.blank(kBf16, {1, 2, 3});
    v.run(SignedRootGateArgs{.key = v.put(kBf16, {1, 2, 3}, normals("key", 6)),
                             .query = v.fill(kBf16, {1, 2, 3}, 0),
                             .value = v.put(kBf16, {1, 3}, {2, -6, 0.5}),
                             .out = out,
                             .rounding = rounding});
    CHECK(v.take(out) == std::vector<double>{1, -3, 0.25, 1, -3, 0.25});
  }
}

}  // namespace offload
