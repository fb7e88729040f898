// The decode loop on the demo checkpoint: what ends an answer, what is emitted, and what a session keeps.
#include "offload/generation.h"

#include <doctest/doctest.h>

#include "core/detokenizer.h"
#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/ref_ops.h"
#include "cpu/thread_collective.h"

namespace offload::generation_test {

namespace {

using Ids = std::vector<int32_t>;

constexpr int64_t kContext = 64;

// One engine for all cases: loading it is most of their time.
struct Demo {
  Demo() : backend(std::make_unique<cpu::RefOps>()), tokenizer(Tokenizer::load(dir())), engine(options(), backend) {}

  static std::string dir() { return OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp"; }
  static EngineOptions options() {
    EngineOptions options;
    options.model_dir = dir();
    options.context = kContext;
    options.chunk = 16;
    options.load_threads = 2;
    return options;
  }

  cpu::CpuBackend backend;
  Tokenizer tokenizer;
  Engine engine;
};

Demo& demo() {
  static Demo loaded;
  return loaded;
}

const std::string kQuestion =
    "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const std::string kAnswer = "The capital of Japan is Tokyo.";
constexpr int32_t kImEnd = 4073;

GenerationOptions greedy() {
  GenerationOptions options;
  options.stop_ids = {kImEnd, 4071};
  options.sampling.temperature = 0;
  return options;
}

struct Streamed {
  GenerationResult result;
  std::vector<std::string> deltas;
  Ids tokens;

  std::string joined() const {
    std::string text;
    for (const std::string& delta : deltas) text += delta;
    return text;
  }
};

Streamed ask(Session& session, const Ids& prompt, const GenerationOptions& options,
             GenerationCallbacks callbacks = {}) {
  Streamed streamed;
  callbacks.on_text = [&](std::string_view delta) {
    CHECK(!delta.empty());
    streamed.deltas.emplace_back(delta);
  };
  callbacks.on_token = [&](int32_t id) { streamed.tokens.push_back(id); };
  streamed.result = generate(session, prompt, options, &demo().tokenizer, callbacks);
  CHECK(streamed.joined() == streamed.result.text);
  CHECK(streamed.tokens == streamed.result.tokens);
  CHECK(streamed.result.prompt_tokens == static_cast<int64_t>(prompt.size()));
  return streamed;
}

Streamed ask(const GenerationOptions& options, GenerationCallbacks callbacks = {}) {
  Session session(demo().engine);
  return ask(session, demo().tokenizer.encode(kQuestion), options, std::move(callbacks));
}

std::string usage_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    return error.message();
  }
  return "";
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

TEST_CASE("a_greedy_answer_streams_and_ends_at_the_stop_token_which_is_not_shown") {
  const Streamed streamed = ask(greedy());
  CHECK(streamed.result.text == kAnswer);
  CHECK(streamed.deltas.size() > 2);
  CHECK(streamed.result.finish_reason == FinishReason::stop);
  CHECK(streamed.result.tokens.back() == kImEnd);
  CHECK(streamed.result.prefill_s > 0);
  CHECK(streamed.result.decode_tokens_per_s() > 0);
  CHECK(demo().tokenizer.decode(streamed.result.tokens) == kAnswer);
}

TEST_CASE("a_stop_string_across_token_borders_ends_the_text_before_it") {
  for (const auto& [stop_string, expected] :
       std::vector<std::pair<std::string, std::string>>{{"pan is To", "The capital of Ja"},
                                                        {"Tokyo.", "The capital of Japan is "},
                                                        {"T", ""},
                                                        {"zzz", kAnswer},
                                                        {"Tokyo.!", kAnswer}}) {
    const std::string& stop = stop_string;
    CAPTURE(stop);
    GenerationOptions options = greedy();
    options.stop_strings = {stop, "never said"};
    const Streamed streamed = ask(options);
    CHECK(streamed.result.text == expected);
    CHECK(streamed.result.finish_reason == FinishReason::stop);
    CHECK((streamed.result.tokens.back() == kImEnd) == (expected == kAnswer));
  }
}

TEST_CASE("max_tokens_ends_the_answer_and_what_was_held_back_is_sent") {
  GenerationOptions options = greedy();
  options.max_tokens = 3;
  options.stop_strings = {"of Japan is Tokyo and nothing else"};
  const Streamed streamed = ask(options);
  CHECK(streamed.result.tokens.size() == 3);
  CHECK(streamed.result.finish_reason == FinishReason::length);
  CHECK(streamed.result.text == demo().tokenizer.decode(streamed.result.tokens));
  options.max_tokens = 0;
  const Streamed none = ask(options);
  CHECK(none.result.tokens.empty());
  CHECK(none.result.finish_reason == FinishReason::length);
}

TEST_CASE("a_full_context_ends_the_answer_as_length") {
  GenerationOptions options = greedy();
  options.ignore_eos = true;
  const Streamed streamed = ask(options);
  CHECK(streamed.result.finish_reason == FinishReason::length);
  // The last token needs no room: nothing is computed from it.
  CHECK(streamed.result.prompt_tokens + static_cast<int64_t>(streamed.result.tokens.size()) == kContext + 1);
  CHECK(!contains(streamed.result.text, "<|im_end|>"));
  Session session(demo().engine);
  const Ids exact(static_cast<size_t>(kContext), 5);
  CHECK(ask(session, exact, options).result.tokens.size() == 1);
}

TEST_CASE("prompts_that_cannot_be_answered_are_refused_before_any_work") {
  Session session(demo().engine);
  bool worked = false;
  GenerationCallbacks callbacks;
  callbacks.on_logits = [&](int32_t, std::span<const float>) { worked = true; };
  const auto refuse = [&](const Ids& prompt, const GenerationOptions& options) {
    return usage_error([&] { generate(session, prompt, options, &demo().tokenizer, callbacks); });
  };
  CHECK(contains(refuse({}, greedy()), "the prompt is empty"));
  const std::string too_long = refuse(Ids(65, 1), greedy());
  CHECK(contains(too_long, "65 tokens"));
  CHECK(contains(too_long, "--context"));
  CHECK(contains(refuse({1, 4096}, greedy()), "id 4096"));
  CHECK(contains(refuse({-1}, greedy()), "id -1"));
  GenerationOptions bad = greedy();
  bad.sampling.top_p = 0;
  CHECK(contains(refuse({1}, bad), "--top-p"));
  bad = greedy();
  bad.stop_strings = {""};
  CHECK(contains(refuse({1}, bad), "stop string is empty"));
  bad.stop_strings = {"x"};
  CHECK(contains(usage_error([&] { generate(session, Ids{1}, bad, nullptr, callbacks); }), "no tokenizer"));
  CHECK(!worked);
  CHECK(session.length() == 0);
}

TEST_CASE("logits_are_reported_for_the_prompt_and_for_each_sampled_token_but_the_last") {
  Ids consumed;
  Ids best;
  GenerationCallbacks callbacks;
  callbacks.on_logits = [&](int32_t id, std::span<const float> logits) {
    CHECK(logits.size() == 4096);
    consumed.push_back(id);
    best.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + 4080) - logits.begin()));
  };
  const Streamed streamed = ask(greedy(), callbacks);
  Ids expected = demo().tokenizer.encode(kQuestion);
  const size_t prompt_rows = expected.size();
  expected.insert(expected.end(), streamed.result.tokens.begin(), streamed.result.tokens.end() - 1);
  CHECK(consumed == expected);
  for (size_t i = 0; i < streamed.result.tokens.size(); ++i)
    CHECK(best[prompt_rows - 1 + i] == streamed.result.tokens[i]);
}

TEST_CASE("no_token_that_the_tokenizer_lacks_is_ever_drawn") {
  const Tokenizer tiny = Tokenizer::load(OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/tiny");
  REQUIRE(tiny.vocab_size() < demo().engine.spec().vocab / 10);
  GenerationOptions options;
  options.sampling.temperature = 1e6;  // nearly uniform over all that may be drawn
  Session session(demo().engine);
  const GenerationResult result = generate(session, Ids{1, 2, 3}, options, &tiny);
  CHECK(result.tokens.size() > 50);
  for (const int32_t id : result.tokens) CHECK(tiny.is_token(id));
}

TEST_CASE("the_same_seed_gives_the_same_answer_and_another_seed_another") {
  GenerationOptions options = greedy();
  options.sampling.temperature = 3;
  options.max_tokens = 12;
  options.sampling.seed = 5;
  const Ids first = ask(options).result.tokens;
  CHECK(ask(options).result.tokens == first);
  options.sampling.seed = 6;
  CHECK(ask(options).result.tokens != first);
}

// Counts the selections of the largest logits that a lane runs.
class TopkCount final : public OpObserver {
 public:
  void op_begins() override {}
  void op_ended(std::string_view name, const Cost&) override { count += name == "topk" ? 1 : 0; }
  int64_t count = 0;
};

TEST_CASE("an_answer_drawn_from_the_largest_logits_is_the_one_drawn_from_whole_rows") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    cpu::ThreadGroup group(ranks);
    std::vector<std::unique_ptr<cpu::CpuBackend>> owned;
    std::vector<std::unique_ptr<Collective>> owned_ends;
    std::vector<Backend*> backends;
    std::vector<Collective*> ends;
    for (int rank = 0; rank < ranks; ++rank) {
      owned.push_back(std::make_unique<cpu::CpuBackend>(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{})));
      backends.push_back(owned.back().get());
      if (ranks == 1) continue;
      owned_ends.push_back(group.end(rank));
      ends.push_back(owned_ends.back().get());
    }
    Engine engine(Demo::options(), Devices(backends, ends));
    Session session(engine);
    TopkCount selections;
    backends.back()->ops().set_observer(&selections);
    GenerationCallbacks whole_rows;
    whole_rows.on_logits = [](int32_t, std::span<const float>) {};
    const Ids prompt = demo().tokenizer.encode(kQuestion);
    const auto answer = [&](const GenerationOptions& options, const GenerationCallbacks& callbacks) {
      const int64_t before = selections.count;
      const Ids tokens = generate(session, prompt, options, &demo().tokenizer, callbacks).tokens;
      CHECK(selections.count - before == (callbacks.on_logits ? 0 : static_cast<int64_t>(tokens.size())));
      return tokens;
    };
    for (const double temperature : {0.0, 0.8, 4.0}) {
      for (const double top_p : {1.0, 0.9}) {
        for (uint64_t seed = 0; seed < 3; ++seed) {
          GenerationOptions options = greedy();
          options.ignore_eos = true;
          options.max_tokens = 16;
          options.sampling = {.temperature = temperature, .top_k = 20, .top_p = top_p, .seed = seed};
          CHECK(answer(options, {}) == answer(options, whole_rows));
        }
      }
    }
  }
}

TEST_CASE("a_next_turn_computes_only_what_it_adds_and_answers_as_if_asked_at_once") {
  Session session(demo().engine);
  const Streamed first = ask(session, demo().tokenizer.encode(kQuestion), greedy());
  const int64_t kept = session.length();
  const Ids prompt = demo().tokenizer.encode(kQuestion + kAnswer + "<|im_end|>\n<|im_start|>user\nAnd?");
  REQUIRE(static_cast<int64_t>(prompt.size()) > kept);
  GenerationOptions options = greedy();
  options.max_tokens = 4;
  const Streamed second = ask(session, prompt, options);
  CHECK(second.result.reused_tokens == kept);
  Session fresh(demo().engine);
  const Streamed at_once = ask(fresh, prompt, options);
  CHECK(at_once.result.reused_tokens == 0);
  CHECK(at_once.result.tokens == second.result.tokens);
  // Another prompt, and the same prompt again, start from nothing.
  CHECK(ask(session, demo().tokenizer.encode(kQuestion), greedy()).result.text == kAnswer);
  CHECK(ask(session, demo().tokenizer.encode(kQuestion), greedy()).result.reused_tokens == 0);
}

TEST_CASE("stopping_from_outside_ends_between_tokens_or_inside_the_prompt_and_leaves_a_usable_session") {
  const Ids prompt = demo().tokenizer.encode(kQuestion);
  size_t rows = 0;
  GenerationCallbacks callbacks;
  callbacks.on_logits = [&](int32_t, std::span<const float>) { ++rows; };
  callbacks.should_stop = [&] { return rows >= prompt.size() + 3; };
  Session session(demo().engine);
  const Streamed stopped = ask(session, prompt, greedy(), callbacks);
  CHECK(stopped.result.finish_reason == FinishReason::interrupted);
  CHECK(stopped.result.tokens.size() == 4);  // the last was drawn from the row at which it was time to stop
  CHECK(kAnswer.starts_with(stopped.result.text));

  int layers = 0;
  GenerationCallbacks at_layer;
  at_layer.should_stop = [&] { return ++layers == 5; };
  Session other(demo().engine);
  const Streamed inside = ask(other, prompt, greedy(), at_layer);
  CHECK(inside.result.finish_reason == FinishReason::interrupted);
  CHECK(inside.result.tokens.empty());
  CHECK(inside.result.prefill_s > 0);
  CHECK(inside.result.prefill_tokens_per_s() == 0);  // of a part
  CHECK(layers == 5);
  CHECK(ask(other, prompt, greedy()).result.text == kAnswer);
}

TEST_CASE("an_answer_without_a_tokenizer_has_tokens_and_no_text") {
  Session session(demo().engine);
  const GenerationResult result = generate(session, demo().tokenizer.encode(kQuestion), greedy(), nullptr);
  CHECK(result.text.empty());
  CHECK(demo().tokenizer.decode(result.tokens) == kAnswer);
}

TEST_CASE("a_plan_is_made_without_loading_and_a_budget_below_it_is_refused_with_the_sum") {
  EngineOptions options = Demo::options();
  options.plan_only = true;
  cpu::CpuBackend backend(std::make_unique<cpu::RefOps>());
  const Engine planned(options, backend);
  CHECK(planned.memory().total() == demo().engine.memory().total());
  const int64_t needed = planned.budget().total(MemoryPlace::ram());
  CHECK(needed >= planned.memory().total());
  options.ram_budget_bytes = needed;
  CHECK(Engine(options, backend).memory().total() == planned.memory().total());
  options.ram_budget_bytes = needed - 1;
  try {
    const Engine refused(options, backend);
    FAIL("a plan above the budget was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resource);
    CHECK(contains(error.message(), "--ram-budget"));
  }
}

}  // namespace offload::generation_test
