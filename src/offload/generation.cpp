#include "offload/generation.h"

#include <algorithm>
#include <chrono>

#include "core/detokenizer.h"
#include "core/stop_matcher.h"

namespace offload {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// Token ids to text that may be shown: detokenized, and ended by the first stop string.
class TextStream {
 public:
  TextStream(const Tokenizer* tokenizer, const std::vector<std::string>& stops,
             const std::function<void(std::string_view)>& on_text, std::string& text)
      : stops_(stops), on_text_(on_text), text_(text) {
    if (tokenizer != nullptr) detokenizer_.emplace(*tokenizer);
  }

  // False once a stop string is complete.
  bool feed(int32_t id) {
    if (detokenizer_) emit(stops_.feed(detokenizer_->feed(id)));
    return !stops_.stopped();
  }
  // False when what was held back completes a stop string.
  bool finish() {
    if (detokenizer_ && !stops_.stopped()) {
      emit(stops_.feed(detokenizer_->finish()));
      emit(stops_.finish());
    }
    return !stops_.stopped();
  }

 private:
  void emit(const std::string& delta) {
    if (delta.empty()) return;
    text_ += delta;
    if (on_text_) on_text_(delta);
  }

  std::optional<StreamDetokenizer> detokenizer_;
  StopMatcher stops_;
  const std::function<void(std::string_view)>& on_text_;
  std::string& text_;
};

// Rows past the tokenizer's ids and the holes among them are padding of the matrix, not tokens.
std::vector<bool> drawable_ids(const Tokenizer* tokenizer) {
  std::vector<bool> allowed;
  if (tokenizer == nullptr) return allowed;
  allowed.resize(static_cast<size_t>(tokenizer->vocab_size()));
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) allowed[static_cast<size_t>(id)] = tokenizer->is_token(id);
  return allowed;
}

// One answer. `next_` is sampled but not yet fed.
class Decoder {
 public:
  Decoder(Session& session, const GenerationOptions& options, const Tokenizer* tokenizer,
          const GenerationCallbacks& callbacks)
      : session_(session),
        options_(options),
        callbacks_(callbacks),
        sampler_(options.sampling, drawable_ids(tokenizer)),
        text_(tokenizer, options.stop_strings, callbacks_.on_text, result_.text) {}

  GenerationResult run(std::span<const int32_t> prompt) {
    result_.prompt_tokens = static_cast<int64_t>(prompt.size());
    result_.finish_reason = answer(prompt);
    if (!text_.finish() && result_.finish_reason == FinishReason::length) result_.finish_reason = FinishReason::stop;
    return std::move(result_);
  }

 private:
  FinishReason answer(std::span<const int32_t> prompt) {
    if (!prefill(prompt)) return FinishReason::interrupted;
    if (limit() == 0) return FinishReason::length;
    const Stopwatch watch;
    while (true) {
      const int32_t id = next_id();
      result_.decode_s = watch.seconds();
      result_.tokens.push_back(id);
      if (callbacks_.on_token) callbacks_.on_token(id);
      if (is_stop(id)) return FinishReason::stop;
      if (!text_.feed(id)) return FinishReason::stop;
      if (static_cast<int64_t>(result_.tokens.size()) >= limit() || session_.length() >= session_.engine().context())
        return FinishReason::length;
      if (callbacks_.should_stop && callbacks_.should_stop()) return FinishReason::interrupted;
      feed({&id, 1}, {});
      sampler_.observe({&id, 1});
    }
  }

  // Where the largest logits decide, the whole row need not go to the host.
  int32_t next_id() {
    if (!asks_for_largest()) return sampler_.sample(last_logits_);
    const auto drawn = sampler_.sample(session_.engine().largest_logits(sampler_.largest_wanted()));
    if (drawn) return *drawn;
    session_.engine().last_logits(
        [&](int64_t, std::span<const float> logits) { last_logits_.assign(logits.begin(), logits.end()); });
    return sampler_.sample(last_logits_);
  }
  bool asks_for_largest() const {
    const int64_t wanted = sampler_.largest_wanted();
    return wanted > 0 && wanted <= kTopkMax && !callbacks_.on_logits;
  }

  // False when interrupted.
  bool prefill(std::span<const int32_t> prompt) {
    const Stopwatch watch;
    result_.reused_tokens = session_.reuse(prompt);
    sampler_.observe(prompt);
    try {
      feed(prompt.subspan(static_cast<size_t>(result_.reused_tokens)), callbacks_.should_stop);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::interrupted) throw;
      result_.prefill_s = watch.seconds();
      return false;
    }
    result_.prefill_s = watch.seconds();
    return true;
  }

  void feed(std::span<const int32_t> tokens, const std::function<bool()>& should_stop) {
    const auto rows = callbacks_.on_logits ? Engine::LogitRows::all
                      : asks_for_largest() ? Engine::LogitRows::none
                                           : Engine::LogitRows::last;
    const auto last = static_cast<int64_t>(tokens.size()) - 1;
    session_.feed(
        tokens, rows,
        [&](int64_t row, std::span<const float> logits) {
          if (callbacks_.on_logits) callbacks_.on_logits(tokens[static_cast<size_t>(row)], logits);
          if (row == last) last_logits_.assign(logits.begin(), logits.end());
        },
        should_stop);
  }

  bool is_stop(int32_t id) const {
    return !options_.ignore_eos &&
           std::find(options_.stop_ids.begin(), options_.stop_ids.end(), id) != options_.stop_ids.end();
  }
  int64_t limit() const { return options_.max_tokens.value_or(session_.engine().context()); }

  Session& session_;
  const GenerationOptions& options_;
  const GenerationCallbacks& callbacks_;
  Sampler sampler_;
  GenerationResult result_;
  TextStream text_;
  std::vector<float> last_logits_;
};

}  // namespace

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::interrupted:
      return "interrupted";
  }
  return "";
}

double GenerationResult::prefill_tokens_per_s() const {
  return prefill_s > 0 && !prefill_was_cut() ? static_cast<double>(fed_tokens()) / prefill_s : 0;
}

double GenerationResult::decode_tokens_per_s() const {
  return tokens.size() > 1 && decode_s > 0 ? static_cast<double>(tokens.size() - 1) / decode_s : 0;
}

void check_prompt(std::span<const int32_t> prompt, int64_t context, int64_t vocab) {
  if (prompt.empty()) throw_error(ErrorCode::usage, "the prompt is empty; give it at least one token");
  if (static_cast<int64_t>(prompt.size()) > context)
    throw_error(ErrorCode::usage, "the prompt has {} tokens, the context {}; raise --context or shorten the prompt",
                prompt.size(), context);
  for (size_t i = 0; i < prompt.size(); ++i)
    if (prompt[i] < 0 || prompt[i] >= vocab)
      throw_error(ErrorCode::usage, "token {} of the prompt is id {}, outside the model's vocabulary 0..{}", i,
                  prompt[i], vocab - 1);
}

void check_generation(const GenerationOptions& options, const Tokenizer* tokenizer) {
  check_sampling(options.sampling, OptionSpelling::flag);
  if (options.max_tokens && *options.max_tokens < 0)
    throw_error(ErrorCode::usage, "--max-tokens is {}; expected 0 or more", *options.max_tokens);
  if (!options.stop_strings.empty() && tokenizer == nullptr)
    throw_error(ErrorCode::usage, "--stop needs text, and this model has no tokenizer");
  const StopMatcher refuses_empty_strings(options.stop_strings);
}

GenerationResult generate(Session& session, std::span<const int32_t> prompt, const GenerationOptions& options,
                          const Tokenizer* tokenizer, const GenerationCallbacks& callbacks) {
  check_generation(options, tokenizer);
  check_prompt(prompt, session.engine().context(), session.engine().spec().vocab);
  return Decoder(session, options, tokenizer, callbacks).run(prompt);
}

}  // namespace offload
