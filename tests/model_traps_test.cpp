// The model-level traps of the qwen4_exp specification (section 8), on variations of the demo checkpoint.
//
// Where the other numbers are tested: config_test 1-4; model_layout_test 5, 7-11, 15; ngram_test 53-55, 60;
// op_traps 17-22, 24-27, 29, 30, 32, 34, 36, 38, 39, 48, 49, 51, 52, 56-58; long_sequence_test 28, 35, 46;
// tiny_golden_test 3, 14, 17, 18, 23-27, 30, 33, 37, 40, 53, 56, 61 against the published implementation;
// model_golden_test 29-31, 37, 40, 60; ops_test and cpu_ops_test 31; tokenizer_test 76. Trap 50 is how those compare:
// logits first, away from ties. Traps of block formats, FP8, MTP, GPUs and serving are not about this arm.
#include <doctest/doctest.h>

#include <cstring>

#include "golden.h"
#include "model_runner.h"
#include "offload/generation.h"
#include "stored_model.h"

namespace offload::model_traps_test {

namespace {

using Ids = std::vector<int32_t>;

constexpr Arithmetic kBf16Fused{DType::bf16, Rounding::fused};
constexpr Arithmetic kBf16Reference{DType::bf16, Rounding::reference};
constexpr int32_t kEos = 4073;        // the demo's eos_token_id, which ends a turn
constexpr int32_t kEndOfText = 4071;  // its other stop id
constexpr double kToRounding = 5e-4;  // of FP32 logits up to 31, sums in another order
constexpr double kOtherModel = 0.05;  // what a misreading moves at least

const Golden& golden() {
  static const Golden loaded;
  return loaded;
}

const GoldenPrompt& prompt(const std::string& name) {
  for (const GoldenPrompt& each : golden().prompts())
    if (each.name == name) return each;
  throw_error(ErrorCode::internal, "no prompt {}", name);
}

// The demo changed and written to a folder, loaded.
class ChangedDemo {
 public:
  explicit ChangedDemo(const std::function<void(StoredModel&)>& change, Arithmetic arithmetic = kFp32Arithmetic,
                       int64_t chunk = 512, int64_t context = 512)
      : runner_((write(change), folder_.path()), arithmetic, chunk, context) {}

  ModelRunner& runner() { return runner_; }
  std::vector<float> logits(const Ids& ids, const std::vector<size_t>& pieces = {SIZE_MAX}) {
    return runner_.logits(ids, pieces);
  }
  // The stacks [ids, 4 * 128] after layer `layer`, in one step.
  std::vector<float> stack_after(size_t layer, const Ids& ids) {
    std::vector<float> out;
    Sequence sequence = runner_.engine().new_sequence();
    runner_.feed(sequence, ids, [&](size_t at, const Tensor& stack) {
      if (at == layer) out.assign(stack.as<float>(), stack.as<float>() + stack.elements());
    });
    return out;
  }

 private:
  void write(const std::function<void(StoredModel&)>& change) {
    StoredModel model = StoredModel::demo();
    change(model);
    model.write(folder_);
  }

  StoredFolder folder_;
  ModelRunner runner_;
};

void unchanged(StoredModel&) {}

void set_zero(StoredTensor& tensor) {
  std::fill(tensor.bytes.begin(), tensor.bytes.end(), std::byte{0});
}

std::function<void(StoredModel&)> with_budget(int64_t budget) {
  return [budget](StoredModel& model) { model.config["indexer_budget"] = budget; };
}

// Without routed experts a row's bits depend on no later row: the number of rows that an expert has in a step, and with
// it the order of its sums, depends on where later rows are routed.
std::function<void(StoredModel&)> with_budget_and_no_routed_experts(int64_t budget) {
  return [budget](StoredModel& model) {
    model.config["indexer_budget"] = budget;
    for (auto& [name, tensor] : model.tensors)
      if (name.find(".experts.") != std::string::npos && name.ends_with("down_proj.weight")) set_zero(tensor);
  };
}

// Rows of a [rows * unit, columns] tensor in groups of `unit` rows: group i becomes group order[i] of the old one.
void permute_rows(StoredTensor& tensor, int64_t begin, int64_t unit, const std::vector<int64_t>& order) {
  const int64_t row_bytes = static_cast<int64_t>(tensor.bytes.size()) / tensor.shape[0];
  const std::vector<std::byte> old = tensor.bytes;
  for (size_t i = 0; i < order.size(); ++i)
    std::copy_n(old.begin() + (begin + order[i] * unit) * row_bytes, unit * row_bytes,
                tensor.bytes.begin() + (begin + static_cast<int64_t>(i) * unit) * row_bytes);
}

void permute_columns(StoredTensor& tensor, int64_t unit, const std::vector<int64_t>& order) {
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1], bytes = dtype_bytes(tensor.dtype);
  const std::vector<std::byte> old = tensor.bytes;
  for (int64_t r = 0; r < rows; ++r)
    for (size_t i = 0; i < order.size(); ++i)
      std::copy_n(old.begin() + (r * columns + order[i] * unit) * bytes, unit * bytes,
                  tensor.bytes.begin() + (r * columns + static_cast<int64_t>(i) * unit) * bytes);
}

std::span<const float> rows_of(const std::vector<float>& values, size_t rows_in_all, size_t begin, size_t count) {
  const size_t width = values.size() / rows_in_all;
  return std::span(values).subspan(begin * width, count * width);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

Ids greedy_chain(ModelRunner& runner, const Ids& ids, size_t count) {
  Sequence sequence = runner.engine().new_sequence();
  std::vector<float> logits = runner.feed(sequence, ids);
  Ids chain;
  while (chain.size() < count) {
    const auto last = std::span(logits).last(static_cast<size_t>(runner.vocab()));
    chain.push_back(static_cast<int32_t>(argmax(last)));
    logits = runner.feed(sequence, std::span(chain).last(1));
  }
  return chain;
}

// Ids of ordinary tokens, no two alike.
Ids ordinary_ids(size_t count, int32_t first = 300) {
  Ids ids;
  for (size_t i = 0; i < count; ++i) ids.push_back(first + static_cast<int32_t>(7 * i % 3500));
  return ids;
}

}  // namespace

TEST_CASE("trap_06_a_zero_norm_weight_is_the_identity_scale_but_zero_in_the_gated_norm") {
  const Ids& ids = prompt("english").ids;
  // The final mixer with hc_norm 0, in double, from the last stack: no norm follows it (trap 7).
  ChangedDemo demo([](StoredModel& model) { set_zero(model.at("model.hyper_connection_mixer.hc_norm.weight")); });
  const std::vector<float> stack = demo.stack_after(7, ids), logits = demo.logits(ids);
  const StoredModel stored = StoredModel::demo();
  const auto values = [&](const std::string& name) { return stored.tensors.at(name).as_f32(); };
  const StoredTensor down = values("model.hyper_connection_mixer.input_mix_weight_down.weight"),
                     up = values("model.hyper_connection_mixer.input_mix_weight_up.weight"),
                     head = values("lm_head.weight");
  const auto dot = [](const StoredTensor& w, int64_t row, const std::vector<double>& x) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i)
      sum += double{w.value(row * static_cast<int64_t>(x.size()) + static_cast<int64_t>(i))} * x[i];
    return sum;
  };
  const auto row = static_cast<int64_t>(ids.size()) - 1;
  std::vector<double> normed(512), low(32), hidden(128);
  for (int64_t c = 0; c < 4; ++c) {
    double squares = 0;
    for (int64_t j = 0; j < 128; ++j) squares += std::pow(stack[static_cast<size_t>(row * 512 + c * 128 + j)], 2);
    for (int64_t j = 0; j < 128; ++j)
      normed[static_cast<size_t>(c * 128 + j)] =
          stack[static_cast<size_t>(row * 512 + c * 128 + j)] / std::sqrt(squares / 128 + 1e-6);
  }
  for (int64_t r = 0; r < 32; ++r) {
    const double t = dot(down, r, normed) / 4;
    low[static_cast<size_t>(r)] = t / (1 + std::exp(-t));
  }
  for (int64_t d = 0; d < 512; ++d)
    hidden[static_cast<size_t>(d % 128)] += normed[static_cast<size_t>(d)] / (1 + std::exp(-dot(up, d, low))) / 4;
  for (int64_t id = 0; id < 4096; id += 37)
    CHECK(std::abs(double{logits[static_cast<size_t>(row * 4096 + id)]} - dot(head, id, hidden)) <= kToRounding);

  // With linear_attn.norm 0 the mixer's output is 0, whatever its last matrix is.
  const auto silent = [](StoredModel& model) { set_zero(model.at("model.layers.0.linear_attn.norm.weight")); };
  ChangedDemo zero(silent), zero_and_other([&](StoredModel&model) {
    silent(model);
    model.at("model.layers.0.linear_attn.out_proj.weight") = model.at("model.layers.1.linear_attn.out_proj.weight");
  });
  CHECK(same_bits(zero.logits(ids), zero_and_other.logits(ids)));
  CHECK(largest_difference(zero.logits(ids), ChangedDemo(unchanged).logits(ids)) > kOtherModel);
}

TEST_CASE("trap_23_and_24_key_heads_own_contiguous_rows_and_consecutive_value_heads") {
  // Key heads in another order, each with its two value heads: the same model, were q, k and v rows or the pairing of
  // heads any other (h mod 4), another one.
  const Ids& ids = prompt("english").ids;
  const std::vector<int64_t> keys{2, 0, 3, 1}, values{4, 5, 0, 1, 6, 7, 2, 3}, apart{4, 0, 5, 1, 6, 7, 2, 3};
  const auto reorder = [&](const std::vector<int64_t>& value_order) {
    return [&keys, value_order](StoredModel& model) {
      for (int layer : {0, 1, 2, 4, 5, 6}) {
        const std::string stem = fmt::format("model.layers.{}.linear_attn.", layer);
        for (const char* name : {"in_proj_qkv.weight", "conv1d.weight"}) {
          permute_rows(model.at(stem + name), 0, 32, keys);
          permute_rows(model.at(stem + name), 128, 32, keys);
          permute_rows(model.at(stem + name), 256, 32, value_order);
        }
        permute_rows(model.at(stem + "in_proj_z.weight"), 0, 32, value_order);
        for (const char* name : {"in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"})
          permute_rows(model.at(stem + name), 0, 1, value_order);
        permute_columns(model.at(stem + "out_proj.weight"), 32, value_order);
      }
    };
  };
  const std::vector<float> expected = ChangedDemo(unchanged).logits(ids);
  CHECK(largest_difference(ChangedDemo(reorder(values)).logits(ids), expected) <= kToRounding);
  CHECK(largest_difference(ChangedDemo(reorder(apart)).logits(ids), expected) > kOtherModel);
}

TEST_CASE("trap_33_query_and_gate_alternate_per_head_and_heads_share_keys_in_consecutive_groups") {
  const Ids& ids = prompt("english").ids;
  const auto reorder = [](std::vector<int64_t> heads, int64_t unit) {
    return [heads, unit](StoredModel& model) {
      for (int layer : {3, 7}) {
        const std::string stem = fmt::format("model.layers.{}.self_attn.", layer);
        permute_rows(model.at(stem + "q_proj.weight"), 0, unit, heads);
        permute_columns(model.at(stem + "o_proj.weight"), 64, heads);
      }
    };
  };
  const std::vector<float> expected = ChangedDemo(unchanged).logits(ids);
  // Query heads 0 and 1 share a key head: their order is free. 128 rows are the query and the gate of one head.
  CHECK(largest_difference(ChangedDemo(reorder({1, 0, 3, 2}, 128)).logits(ids), expected) <= kToRounding);
  CHECK(largest_difference(ChangedDemo(reorder({2, 1, 0, 3}, 128)).logits(ids), expected) > kOtherModel);
  CHECK(largest_difference(ChangedDemo(reorder({1, 0, 3, 2}, 64)).logits(ids), expected) > kOtherModel);
}

TEST_CASE("trap_41_a_small_budget_acts_from_its_first_dropped_block_on_and_not_before") {
  const Ids& ids = prompt("long_chinese").ids;
  for (const Arithmetic& arithmetic : {kFp32Arithmetic, kBf16Reference, kBf16Fused}) {
    const std::vector<float> dense = ChangedDemo(with_budget_and_no_routed_experts(4096), arithmetic).logits(ids),
                             small = ChangedDemo(with_budget_and_no_routed_experts(16), arithmetic).logits(ids);
    // Rows of up to 19 visible positions attend everything, though the step as a whole selects.
    CHECK(same_bits(rows_of(small, ids.size(), 0, 19), rows_of(dense, ids.size(), 0, 19)));
    CHECK(largest_difference(rows_of(small, ids.size(), 19, 20), rows_of(dense, ids.size(), 19, 20)) > kOtherModel);
  }
}

TEST_CASE("trap_42_below_the_budget_selecting_and_dense_attention_have_the_same_bits") {
  Ids ids = prompt("long_code").ids;
  const Ids more = prompt("long_english").ids;
  while (ids.size() < 1700) ids.insert(ids.end(), more.begin(), more.end());
  ids.resize(1720);
  for (const size_t length : {size_t{100}, size_t{1700}}) {
    CAPTURE(length);
    // The last rows select (length + 4 positions or more), the first `length` need not.
    const auto budget = static_cast<int64_t>(length);
    const auto run = [&](int64_t tokens) {
      ChangedDemo demo(with_budget_and_no_routed_experts(tokens), kBf16Fused, 2048, 2048);
      return demo.logits({ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length) + 20});
    };
    const std::vector<float> selecting = run(budget), dense = run(8192);
    CHECK(same_bits(rows_of(selecting, length + 20, 0, length), rows_of(dense, length + 20, 0, length)));
    CHECK(!same_bits(selecting, dense));
  }
}

TEST_CASE("trap_40_and_44_blocks_do_not_depend_on_how_a_prompt_is_cut") {
  const Ids& ids = prompt("long_chinese").ids;
  ChangedDemo demo(with_budget(16));
  const std::vector<float> at_once = demo.logits(ids);
  for (const std::vector<size_t>& pieces :
       {std::vector<size_t>{1}, {3}, {5}, {7, 1, 1, 13, 64, 44}, {2, 21}, {64}, {19, 1, 1}}) {
    CAPTURE(pieces.front());
    CHECK(largest_difference(demo.logits(ids, pieces), at_once) <= kToRounding);
  }
}

TEST_CASE("trap_44_and_60_interleaved_sequences_do_not_see_each_other") {
  const Ids &a = prompt("long_chinese").ids, &b = prompt("long_english").ids;
  for (const Arithmetic& arithmetic : {kFp32Arithmetic, kBf16Fused}) {
    ChangedDemo demo(with_budget(16), arithmetic);
    const std::vector<size_t> pieces{5, 1, 6, 17};
    const size_t count = 100;
    const Ids first(a.begin(), a.begin() + count), second(b.begin(), b.begin() + count);
    const std::vector<float> alone_first = demo.logits(first, pieces), alone_second = demo.logits(second, pieces);
    Sequence one = demo.runner().engine().new_sequence(), two = demo.runner().engine().new_sequence();
    std::vector<float> got_first, got_second;
    for (size_t at = 0, piece = 0; at < count; ++piece) {
      const size_t size = std::min(pieces[piece % pieces.size()], count - at);
      const auto feed = [&](Sequence& sequence, const Ids& ids, std::vector<float>& got) {
        const std::vector<float> rows = demo.runner().feed(sequence, std::span(ids).subspan(at, size));
        got.insert(got.end(), rows.begin(), rows.end());
      };
      feed(one, first, got_first);
      feed(two, second, got_second);
      at += size;
    }
    CHECK(same_bits(got_first, alone_first));
    CHECK(same_bits(got_second, alone_second));
  }
}

TEST_CASE("trap_43_a_reused_slot_selects_as_a_fresh_one") {
  const Ids &before = prompt("long_english").ids, &ids = prompt("long_chinese").ids;
  for (const Arithmetic& arithmetic : {kFp32Arithmetic, kBf16Reference, kBf16Fused}) {
    ChangedDemo demo(with_budget(16), arithmetic);
    const std::vector<float> fresh = demo.logits(ids, {30, 1});
    Sequence slot = demo.runner().engine().new_sequence();
    for (const size_t held : {size_t{445}, size_t{18}, size_t{3}, size_t{21}}) {  // above and below the budget
      CAPTURE(held);
      slot.reset();
      demo.runner().feed(slot, std::span(before).first(held));
      slot.reset();
      CHECK(slot.length() == 0);
      std::vector<float> again;
      for (size_t at = 0; at < ids.size();) {
        const size_t size = std::min(at % 31 == 0 ? size_t{30} : size_t{1}, ids.size() - at);
        const std::vector<float> rows = demo.runner().feed(slot, std::span(ids).subspan(at, size));
        again.insert(again.end(), rows.begin(), rows.end());
        at += size;
      }
      CHECK(same_bits(again, fresh));
    }
  }
}

TEST_CASE("trap_45_twenty_greedy_runs_across_the_budget_give_the_same_ids") {
  const Ids& whole = prompt("long_chinese").ids;
  const Ids ids(whole.begin(), whole.begin() + 90);  // selection starts at the tenth token decoded
  ModelRunner runner(Golden::model_dir(), kBf16Fused);
  const Ids chain = greedy_chain(runner, ids, 24);
  for (int repeat = 0; repeat < 20; ++repeat) CHECK(greedy_chain(runner, ids, 24) == chain);
}

TEST_CASE("trap_53_the_config_names_the_id_that_cuts_n_grams_and_its_first_one_counts") {
  bool seen = false;
  for (const char* name : {"english", "chinese", "code", "fact"}) {
    const Ids& ids = prompt(name).ids;
    if (std::find(ids.begin(), ids.end() - 1, kEos) == ids.end() - 1) continue;
    CAPTURE(std::string(name));
    seen = true;
    const auto with_eos = [&](const Json& eos) {
      return ChangedDemo([&](StoredModel& model) { model.config["eos_token_id"] = eos; }).logits(ids);
    };
    const std::vector<float> expected = with_eos(kEos);
    CHECK(same_bits(with_eos(Json::array({kEos, kEndOfText})), expected));
    CHECK(largest_difference(with_eos(Json::array({kEndOfText, kEos})), expected) > 1);
    CHECK(largest_difference(with_eos(kEndOfText), expected) > 1);
  }
  CHECK(seen);
}

TEST_CASE("trap_55_56_and_61_an_id_reaches_later_rows_through_its_n_grams_and_the_dilated_convolution_alone") {
  // Silencing the mixers of layers 0 and 1 leaves the n-gram embedding of layer 1 as the only way through time.
  ChangedDemo demo([](StoredModel& model) {
    for (int layer : {0, 1}) set_zero(model.at(fmt::format("model.layers.{}.linear_attn.out_proj.weight", layer)));
  });
  const auto rows_changed = [&](int32_t second) {
    Ids ids = ordinary_ids(20);
    ids[1] = second;
    const std::vector<float> before = demo.stack_after(1, ids);
    ids[0] += 1;
    const std::vector<float> after = demo.stack_after(1, ids);
    std::vector<size_t> changed;
    for (size_t r = 0; r < ids.size(); ++r)
      if (!same_bits(rows_of(before, ids.size(), r, 1), rows_of(after, ids.size(), r, 1))) changed.push_back(r);
    return changed;
  };
  // Rows 0, 1 and 2 have id 0 in an n-gram; the convolution carries each 3, 6 and 9 rows on.
  CHECK(rows_changed(kEndOfText) == std::vector<size_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  // An end of text at 1 keeps its own context and hides id 0 from row 2; the convolution runs through it.
  CHECK(rows_changed(kEos) == std::vector<size_t>{0, 1, 3, 4, 6, 7, 9, 10});
}

TEST_CASE("trap_59_a_session_that_goes_back_computes_as_a_fresh_one") {
  ModelRunner runner(Golden::model_dir(), kBf16Fused);
  const Ids& whole = prompt("long_chinese").ids;
  const auto prefix = [&](size_t count) { return Ids(whole.begin(), whole.begin() + static_cast<int64_t>(count)); };
  const auto answer = [&](Session& session, const Ids& ids) {
    std::vector<float> last;
    const int64_t kept = session.reuse(ids);
    session.feed(std::span(ids).subspan(static_cast<size_t>(kept)), Engine::LogitRows::last,
                 [&](int64_t, std::span<const float> logits) { last.assign(logits.begin(), logits.end()); });
    return last;
  };
  const auto fresh = [&](const Ids& ids) {
    Session session(runner.engine());
    return answer(session, ids);
  };
  Session session(runner.engine());
  answer(session, prefix(40));
  answer(session, prefix(104));
  CHECK(session.length() == 104);
  CHECK(same_bits(answer(session, prefix(40)), fresh(prefix(40))));  // back, then on another way
  Ids other = prefix(39);
  other.insert(other.end(), {kEos, 300, 301});
  CHECK(same_bits(answer(session, other), fresh(other)));
  other.back() = 302;  // only the last id differs: the two ids and nine rows of the n-gram layer go back with the rest
  CHECK(same_bits(answer(session, other), fresh(other)));
  CHECK(same_bits(answer(session, prefix(40)), fresh(prefix(40))));
  CHECK(same_bits(answer(session, prefix(40)), fresh(prefix(40))));
}

TEST_CASE("trap_65_no_logit_or_stack_of_any_prompt_is_nan_infinite_or_all_zero") {
  for (const Arithmetic& arithmetic : {kFp32Arithmetic, kBf16Reference, kBf16Fused}) {
    ModelRunner runner(Golden::model_dir(), arithmetic, 64, 2048);
    for (const GoldenPrompt& each : golden().prompts()) {
      if (each.ids.size() > 110 && arithmetic.activations == DType::f32) continue;  // the goldens compare those rows
      Sequence sequence = runner.engine().new_sequence();
      size_t layers = 0;
      const std::vector<float> logits = runner.feed(sequence, each.ids, [&](size_t, const Tensor& stack) {
        ++layers;
        const auto element = [&](int64_t i) {
          return stack.dtype() == DType::f32 ? stack.as<float>()[i] : to_float(stack.as<bf16>()[i]);
        };
        for (int64_t r = 0; r < stack.dim(0); ++r) {
          double sum = 0;
          for (int64_t j = 0; j < stack.dim(1); ++j) sum += std::abs(double{element(r * stack.dim(1) + j)});
          REQUIRE(std::isfinite(sum));
          REQUIRE(sum > 0);
        }
      });
      CHECK(layers == 8 * ((each.ids.size() + 63) / 64));
      for (size_t r = 0; r < each.ids.size(); ++r) {
        double sum = 0;
        for (const float logit : rows_of(logits, each.ids.size(), r, 1)) sum += std::abs(double{logit});
        REQUIRE(std::isfinite(sum));
        REQUIRE(sum > 0);
      }
    }
  }
}

TEST_CASE("trap_68_one_chunk_schedule_gives_one_result_and_another_differs_by_rounding_only") {
  const Ids& ids = prompt("long_chinese").ids;
  for (const int64_t chunk : {64, 32, 7}) {
    CAPTURE(chunk);
    ModelRunner in_chunks(Golden::model_dir(), kFp32Arithmetic, chunk), whole(Golden::model_dir());
    const std::vector<float> logits = in_chunks.logits(ids);
    CHECK(same_bits(logits, in_chunks.logits(ids)));
    CHECK(same_bits(logits, whole.logits(ids, {static_cast<size_t>(chunk)})));
    CHECK(largest_difference(logits, whole.logits(ids)) <= kToRounding);
  }
}

TEST_CASE("trap_73_rows_of_lm_head_past_the_tokenizer_are_never_drawn") {
  const Tokenizer tokenizer = Tokenizer::load(Golden::model_dir());
  REQUIRE(tokenizer.vocab_size() == 4080);
  const Ids& ids = prompt("english").ids;
  GenerationOptions options;
  options.sampling.temperature = 0;
  options.max_tokens = 12;
  ModelRunner plain(Golden::model_dir(), kBf16Fused);
  Session plain_session(plain.engine());
  const Ids expected = generate(plain_session, ids, options, &tokenizer).tokens;
  // Every padding row four times the row of the token that wins.
  ChangedDemo demo(
      [&](StoredModel& model) {
        StoredTensor& head = model.at("lm_head.weight");
        for (int64_t row = 4080; row < 4096; ++row)
          for (int64_t j = 0; j < 128; ++j) head.set(row * 128 + j, 4 * head.value(expected[0] * 128 + j));
      },
      kBf16Fused);
  Session session(demo.runner().engine());
  int64_t padding_wins = 0;
  GenerationCallbacks callbacks;
  callbacks.on_logits = [&](int32_t, std::span<const float> logits) { padding_wins += argmax(logits) >= 4080; };
  CHECK(generate(session, ids, options, &tokenizer, callbacks).tokens == expected);
  CHECK(padding_wins > 0);
  CHECK(generate(session, ids, options, &tokenizer).tokens == expected);  // the row's largest alone do not decide
  options.sampling = {.temperature = 0.8, .top_k = 3};
  const Ids drawn = generate(session, ids, options, &tokenizer, callbacks).tokens;
  CHECK(generate(session, ids, options, &tokenizer).tokens == drawn);
  options.sampling = {.temperature = 5};
  for (uint64_t seed = 0; seed < 3; ++seed) {
    options.sampling.seed = seed;
    for (const int32_t id : generate(session, ids, options, &tokenizer).tokens) CHECK(id < 4080);
  }
}

}  // namespace offload::model_traps_test
