#include "op_handed.h"

#include <doctest/doctest.h>

#include "core/json.h"

namespace offload {
namespace {

Json load(const std::string& name) {
  const std::string path = std::string(OFFLOAD_SOURCE_DIR) + "/tests/data/ops/" + name;
  return parse_json(read_text_file(path, int64_t{1} << 20), name);
}

// All numbers of nested arrays, in order.
void append_numbers(const Json& json, std::vector<double>& out) {
  if (json.is_array()) {
    for (const Json& item : json) append_numbers(item, out);
  } else {
    out.push_back(json.get<double>());
  }
}
std::vector<double> numbers(const Json& json) {
  std::vector<double> out;
  append_numbers(json, out);
  return out;
}

// --- gated delta rule: the file holds beta and g; the op takes what they are made of ---

struct DeltaRun {
  std::vector<double> outputs, state;
};

DeltaRun run_delta(OpValues& v, const Json& inputs, int64_t begin, int64_t end, const std::vector<double>& state,
                   int64_t chunk_rows) {
  std::vector<double> qkv, a, b;
  for (int64_t t = begin; t < end; ++t) {
    const auto row = static_cast<size_t>(t);
    for (const char* part : {"q", "k", "v"}) append_numbers(inputs[part][row], qkv);
    const double g = inputs["g"][row].get<double>(), beta = inputs["beta"][row].get<double>();
    a.push_back(std::log(std::expm1(-g)));  // softplus(a) = -g with a_log = dt_bias = 0
    b.push_back(std::log(beta / (1 - beta)));
  }
  const int64_t rows = end - begin;
  const Tensor memory = v.put(kF32, {1, 4, 4}, state), out = v.blank(kF32, {rows, 4});
  v.run(GatedDeltaArgs{.qkv = v.put(kF32, {rows, 12}, qkv),
                       .a = v.put(kF32, {rows, 1}, a),
                       .b = v.put(kF32, {rows, 1}, b),
                       .a_log = v.fill(kF32, {1}, 0),
                       .dt_bias = v.fill(kF32, {1}, 0),
                       .state = memory,
                       .out = out,
                       .key_heads = 1,
                       .chunk_rows = chunk_rows});
  return {v.take(out), v.take(memory)};
}

// --- mixture of experts ---

// Routing of all rows, then every expert with its rows in order, then the combination: what a layer does, in F32.
struct MoeLayer {
  int64_t hidden = 0, intermediate = 0, experts = 0, top_k = 0;
  bool normalise = true;
  double scale = 1;  // the op has none: its caller folds it into the weights
  Tensor gate_up, down;
  Tensor shared_gate_up, shared_down;  // of one shared expert, or empty
};

struct MoeResult {
  std::vector<double> ids, weights, out;
};

// out[rows[i]] = expert(x[rows[i]]) for groups of row numbers.
void run_experts(OpValues& v, const MoeLayer& layer, const Tensor& x, const Tensor& out,
                 const std::vector<std::vector<int32_t>>& slots, int64_t slots_per_row) {
  std::vector<ExpertRun> runs;
  std::vector<int32_t> rows, out_rows;
  for (int64_t e = 0; e < layer.experts; ++e) {
    const auto& mine = slots[static_cast<size_t>(e)];
    runs.push_back({.gate_up = layer.gate_up.narrow(0, e, 1).data(),
                    .down = layer.down.narrow(0, e, 1).data(),
                    .begin = static_cast<int64_t>(rows.size()),
                    .count = static_cast<int64_t>(mine.size())});
    for (const int32_t slot : mine) {
      rows.push_back(static_cast<int32_t>(slot / slots_per_row));
      out_rows.push_back(slot);
    }
  }
  v.run(SwigluExpertsArgs{.x = x,
                          .out = out,
                          .runs = runs,
                          .rows = rows,
                          .out_rows = out_rows,
                          .intermediate = layer.intermediate,
                          .weight_dtype = kF32});
}

MoeResult run_moe(OpValues& v, const MoeLayer& layer, int64_t tokens, const std::vector<double>& x_values,
                  const std::vector<double>& logits, const std::vector<double>& shared_gate) {
  const Tensor ids = v.blank(DType::i32, {tokens, layer.top_k}), weights = v.blank(kF32, {tokens, layer.top_k});
  v.run(RouterTopkArgs{.logits = v.put(kF32, {tokens, layer.experts}, logits),
                       .ids = ids,
                       .weights = weights,
                       .normalise = layer.normalise});
  MoeResult result{v.take(ids), v.take(weights), {}};
  for (double& weight : result.weights) weight *= layer.scale;

  std::vector<std::vector<int32_t>> slots(static_cast<size_t>(layer.experts));
  for (size_t slot = 0; slot < result.ids.size(); ++slot) {
    REQUIRE(result.ids[slot] >= 0);
    REQUIRE(result.ids[slot] < static_cast<double>(layer.experts));
    slots[static_cast<size_t>(result.ids[slot])].push_back(static_cast<int32_t>(slot));
  }
  const Tensor x = v.put(kF32, {tokens, layer.hidden}, x_values);
  const Tensor parts = v.blank(kF32, {tokens * layer.top_k, layer.hidden});
  run_experts(v, layer, x, parts, slots, layer.top_k);

  MoeCombineArgs combine{.parts = parts,
                         .weights = v.put(kF32, {tokens, layer.top_k}, result.weights),
                         .present = {},
                         .shared = {},
                         .gate = {},
                         .out = v.blank(kF32, {tokens, layer.hidden})};
  if (layer.shared_gate_up) {
    MoeLayer dense = layer;
    dense.experts = 1;
    dense.gate_up = layer.shared_gate_up;
    dense.down = layer.shared_down;
    std::vector<std::vector<int32_t>> all(1);
    for (int64_t t = 0; t < tokens; ++t) all[0].push_back(static_cast<int32_t>(t));
    combine.shared = v.blank(kF32, {tokens, layer.hidden});
    run_experts(v, dense, x, combine.shared, all, 1);
    combine.gate = v.blank(kF32, {tokens, 1});
    v.run(LinearArgs{.x = x, .w = v.put(kF32, {1, layer.hidden}, shared_gate), .out = combine.gate});
  }
  v.run(combine);
  result.out = v.take(combine.out);
  return result;
}

// The weights of an expert as the op wants them: gate rows, then up rows.
std::vector<double> gate_up_of(const Json& expert) {
  std::vector<double> values = numbers(expert["gate"]);
  append_numbers(expert["up"], values);
  return values;
}

void check_moe_file(OpValues& v, const std::string& name) {
  const Json file = load(name);
  MoeLayer layer;
  layer.hidden = file["hidden"].get<int64_t>();
  layer.intermediate = file["inter"].get<int64_t>();
  layer.experts = static_cast<int64_t>(file["experts"].size());
  layer.top_k = file["top_k"].get<int64_t>();
  layer.normalise = file["options"].value("norm", true);
  layer.scale = file["options"].value("scale", 1.0);
  std::vector<double> gate_up, down;
  for (const Json& expert : file["experts"]) {
    for (const double value : gate_up_of(expert)) gate_up.push_back(value);
    append_numbers(expert["down"], down);
  }
  layer.gate_up = v.put(kF32, {layer.experts, 2 * layer.intermediate, layer.hidden}, gate_up);
  layer.down = v.put(kF32, {layer.experts, layer.hidden, layer.intermediate}, down);
  std::vector<double> shared_gate;
  if (!file["shared"].is_null()) {
    layer.shared_gate_up = v.put(kF32, {1, 2 * layer.intermediate, layer.hidden}, gate_up_of(file["shared"]));
    layer.shared_down = v.put(kF32, {1, layer.hidden, layer.intermediate}, numbers(file["shared"]["down"]));
    shared_gate = numbers(file["shared_gate"]);
  }
  const auto tokens = static_cast<int64_t>(file["x"].size());
  const MoeResult result = run_moe(v, layer, tokens, numbers(file["x"]), numbers(file["router_logits"]), shared_gate);
  std::vector<double> ids, weights;
  for (const Json& row : file["expected_routing"]) {
    append_numbers(row["ids"], ids);
    append_numbers(row["weights"], weights);
  }
  CHECK(result.ids == ids);
  CHECK(max_difference(result.weights, weights) < 1e-6 * layer.scale);
  CHECK(max_difference(result.out, numbers(file["expected_output"])) < 1e-5);
}

// One step of all tokens against steps of 512: more token-expert pairs than 65535 in the first.
void check_prefill(OpValues& v, int64_t tokens, int64_t top_k) {
  constexpr int64_t kHidden = 4, kInter = 2, kExperts = 12, kStep = 512;
  CaseRandom random(fmt::format("prefill {}x{}", tokens, top_k));
  const auto draw = [&](int64_t count) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(random.normal());
    return values;
  };
  MoeLayer layer;
  layer.hidden = kHidden;
  layer.intermediate = kInter;
  layer.experts = kExperts;
  layer.top_k = top_k;
  layer.gate_up = v.put(kF32, {kExperts, 2 * kInter, kHidden}, draw(kExperts * 2 * kInter * kHidden));
  layer.down = v.put(kF32, {kExperts, kHidden, kInter}, draw(kExperts * kHidden * kInter));
  const std::vector<double> x = draw(tokens * kHidden), logits = draw(tokens * kExperts);
  const MoeResult whole = run_moe(v, layer, tokens, x, logits, {});
  MoeResult steps;
  for (int64_t t = 0; t < tokens; t += kStep) {
    const int64_t end = std::min(t + kStep, tokens);
    const MoeResult step = run_moe(v, layer, end - t, {x.begin() + t * kHidden, x.begin() + end * kHidden},
                                   {logits.begin() + t * kExperts, logits.begin() + end * kExperts}, {});
    steps.ids.insert(steps.ids.end(), step.ids.begin(), step.ids.end());
    steps.weights.insert(steps.weights.end(), step.weights.begin(), step.weights.end());
    steps.out.insert(steps.out.end(), step.out.begin(), step.out.end());
  }
  CHECK(static_cast<int64_t>(whole.ids.size()) == tokens * top_k);
  CHECK(static_cast<int64_t>(whole.ids.size()) > 65535);
  CHECK(whole.ids == steps.ids);
  CHECK(whole.weights == steps.weights);
  CHECK(max_difference(whole.out, steps.out) < 1e-5);
}

}  // namespace

void gated_delta_lengths_leave_the_right_state(OpValues& v) {
  const Json file = load("gdn_lengths.json"), inputs = load("gdn_inputs.json");
  for (const Json& test : file["cases"])
    for (const int64_t chunk_rows : {0, 16, 32, 64}) {
      const auto length = test["length"].get<int64_t>();
      CAPTURE(length);
      CAPTURE(chunk_rows);
      const DeltaRun run = run_delta(v, inputs, 0, length, std::vector<double>(16, 0.0), chunk_rows);
      CHECK(max_difference(run.state, numbers(test["final_state"])) < 1e-5);
      CHECK(max_difference({run.outputs.end() - 4, run.outputs.end()}, numbers(test["last_output"])) < 1e-5);
    }
}

void gated_delta_slots_start_from_zero_and_continue(OpValues& v) {
  const Json file = load("gdn_slots.json"), inputs = load("gdn_inputs.json");
  for (const int64_t chunk_rows : {0, 64}) {
    std::vector<double> state(16, 0.0);
    for (const Json& step : file["steps"]) {
      if (step.contains("event")) {  // the request ends; the next one starts from zero whatever its length
        state.assign(16, 0.0);
        continue;
      }
      const auto begin = step["tokens"][0].get<int64_t>(), end = step["tokens"][1].get<int64_t>();
      state = run_delta(v, inputs, begin, end, state, chunk_rows).state;
      CHECK(max_difference(state, numbers(step["final_state"])) < 1e-5);
    }
  }
}

void rope_rotates_the_first_part_of_a_head_in_halves(OpValues& v) {
  const Json file = load("rope_partial.json");
  const auto dim = file["head_dim"].get<int64_t>();
  const auto rotary = static_cast<int64_t>(static_cast<double>(dim) * file["partial_rotary_factor"].get<double>());
  std::vector<double> frequencies;
  for (int64_t i = 0; i < rotary / 2; ++i)
    frequencies.push_back(
        std::pow(file["rope_theta"].get<double>(), -2.0 * static_cast<double>(i) / static_cast<double>(rotary)));
  for (const Json& test : file["cases"]) {
    const Tensor table = v.blank(kF32, {1, rotary / 2, 2}), out = v.blank(kF32, {1, 1, dim});
    v.run(RopeTableArgs{
        .inv_freq = v.put(kF32, {rotary / 2}, frequencies), .out = table, .first = test["position"].get<int64_t>()});
    v.run(NormRopeArgs{.x = v.put(kF32, {1, 1, dim}, numbers(file["x"])), .w = {}, .table = table, .out = out});
    // The angle is rounded to FP32 by contract: 4097 * 0.000316 to 6e-8, below what the file allows.
    CHECK(max_difference(v.take(out), numbers(test["expected"])) < 1e-5);
  }
}

void attention_weights_are_a_softmax_over_what_is_visible(OpValues& v) {
  const Json file = load("softmax_masked_rows.json");
  // The scores of a row as q . k with q = (1, 0, 0, 0), the probabilities as V = the identity.
  const auto weights = [&](size_t row, int64_t first, int64_t ratio) {
    std::vector<double> k(16, NAN), identity(16, 0.0);
    for (size_t p = 0; p < 4; ++p) {
      identity[5 * p] = 1;
      const Json& score = file["scores"][row][p];
      for (size_t j = 0; j < 4; ++j) k[4 * p + j] = score.is_null() ? NAN : j == 0 ? score.get<double>() : 0.0;
    }
    AttentionArgs args{.q = v.put(kF32, {1, 1, 4}, {1, 0, 0, 0}),
                       .k = v.put(kF32, {4, 1, 4}, k),
                       .v = v.put(kF32, {4, 1, 4}, identity),
                       .out = v.blank(kF32, {1, 1, 4}),
                       .blocks = {},
                       .counts = {},
                       .first = first,
                       .ratio = ratio};
    if (ratio > 0) {  // no block is selected: the tail alone is visible
      args.blocks = v.blank(DType::i32, {1, 1});
      args.counts = v.put(DType::i32, {1}, {0});
    }
    v.run(args);
    return v.take(args.out);
  };
  CHECK(max_difference(weights(0, 1, 0), numbers(file["expected"][0])) < 2e-6);
  CHECK(max_difference(weights(1, 3, 4), numbers(file["expected"][1])) < 2e-6);
  CHECK(max_difference(weights(2, 3, 3), numbers(file["expected"][2])) < 2e-6);
  CHECK(max_difference(weights(3, 3, 0), numbers(file["expected"][3])) < 2e-6);
}

void results_beyond_the_fp16_range_stay_finite(OpValues& v) {
  const Json file = load("fp16_overflow.json");
  for (const DType a : {DType::f32, DType::bf16}) {
    const auto close = [&](const Tensor& out, const Json& expected) {
      for (const double value : v.take(out)) {
        const double wanted = expected.is_array() ? expected[0].get<double>() : expected.get<double>();
        CHECK(std::abs(value - wanted) <= 0.004 * wanted);
      }
    };
    for (const Json& test : file["cases"]) {
      const std::string op = test["op"].get<std::string>();
      if (op == "matmul") {
        const Tensor out = v.blank(a, {1, 1});
        v.run(LinearArgs{
            .x = v.put(a, {1, 8}, numbers(test["x"])), .w = v.put(a, {1, 8}, numbers(test["w"])), .out = out});
        close(out, test["expected"]);
      } else if (op == "silu(gate)*up") {
        const Tensor out = v.blank(a, {1, 1});
        v.run(SwigluArgs{.x = v.put(a, {1, 2}, {test["gate"][0].get<double>(), test["up"][0].get<double>()}),
                         .out = out});
        close(out, test["expected"]);
      } else if (op == "residual add") {
        const Tensor out = v.blank(a, {1, 1});
        v.run(
            AddArgs{.x = v.put(a, {1, 1}, numbers(test["a"])), .y = v.put(a, {1, 1}, numbers(test["b"])), .out = out});
        close(out, test["expected"]);
      } else if (op == "rmsnorm") {
        const Tensor out = v.blank(a, {1, 1, 4});
        v.run(RmsNormArgs{.x = v.put(a, {1, 1, 4}, numbers(test["x"])),
                          .w = v.put(kF32, {1, 4}, numbers(test["weight"])),
                          .out = out,
                          .eps = test["eps"].get<float>(),
                          .weight = NormWeight::plain});
        close(out, test["expected"]);
      } else {
        CHECK(op == "inf then norm");  // whoever samples reports it, not an op
      }
    }
  }
}

void equal_router_logits_pick_lower_ids(OpValues& v) {
  check_moe_file(v, "ties_pick_lower_id.json");
}
void as_many_experts_as_there_are_may_be_chosen(OpValues& v) {
  check_moe_file(v, "k_equals_expert_count.json");
}
void all_tokens_may_go_to_one_expert(OpValues& v) {
  check_moe_file(v, "all_tokens_to_one_expert.json");
}
void experts_without_tokens_change_nothing(OpValues& v) {
  check_moe_file(v, "some_experts_get_no_token.json");
}
void a_step_without_tokens_does_nothing(OpValues& v) {
  check_moe_file(v, "no_tokens_at_all.json");
}
void the_shared_expert_is_gated_per_token(OpValues& v) {
  check_moe_file(v, "shared_expert_with_gate.json");
}
void router_weights_without_renormalising_take_a_scale(OpValues& v) {
  check_moe_file(v, "scale_without_renormalising.json");
}

void routing_of_128_experts_top_8_has_the_right_weights(OpValues& v) {
  const Json file = load("routing_128_top_8.json");
  const auto experts = file["experts"].get<int64_t>(), k = file["top_k"].get<int64_t>();
  for (size_t row = 0; row < file["expected"].size(); ++row) {
    std::vector<double> logits(static_cast<size_t>(experts), file["default_logit"].get<double>());
    for (const auto& [id, logit] : file["set_logits"][row].items())
      logits[static_cast<size_t>(std::stoi(id))] = logit.get<double>();
    for (const DType a : {DType::f32, DType::bf16}) {  // every logit is exact in BF16
      const Tensor ids = v.blank(DType::i32, {1, k}), weights = v.blank(kF32, {1, k});
      v.run(RouterTopkArgs{.logits = v.put(a, {1, experts}, logits), .ids = ids, .weights = weights});
      CHECK(v.take(ids) == numbers(file["expected"][row]["ids"]));
      CHECK(max_difference(v.take(weights), numbers(file["expected"][row]["weights"])) < 1e-6);
    }
  }
}

void prefill_of_6554_tokens_top_10_equals_steps_of_512(OpValues& v) {
  check_prefill(v, 6554, 10);
}
void prefill_of_8192_tokens_top_8_equals_steps_of_512(OpValues& v) {
  check_prefill(v, 8192, 8);
}
void prefill_of_65536_tokens_top_1_equals_steps_of_512(OpValues& v) {
  check_prefill(v, 65536, 1);
}

}  // namespace offload
