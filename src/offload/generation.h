// generate: the decode loop, from prompt ids to an ended answer, streamed.
//
// Feeds the prompt, samples, detokenizes, and ends at a stop token, a stop string, a length or the caller's wish. Emits
// no part of a matched stop string and not the stop token. Does NOT render templates and prints nothing. Confined to
// the engine's thread.
#ifndef OFFLOAD_OFFLOAD_GENERATION_H_
#define OFFLOAD_OFFLOAD_GENERATION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/sampler.h"
#include "core/tokenizer.h"
#include "offload/session.h"

namespace offload {

struct GenerationOptions {
  std::optional<int64_t> max_tokens;  // 0: only the prompt is computed; absent: until the context is full
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop_strings;  // need a tokenizer
  bool ignore_eos = false;                // stop_ids end nothing
  SamplingOptions sampling;
};

struct GenerationCallbacks {
  // Text that is certain, never empty. May throw to end the generation.
  std::function<void(std::string_view delta)> on_text;
  // Each token sampled, the stop token too, before its text.
  std::function<void(int32_t id)> on_token;
  // Asked for the logits of every row that is computed: those of the prompt, then of each sampled token but the last.
  // `id` is the token that the row consumed; logits: F32 [vocab], unmasked.
  std::function<void(int32_t id, std::span<const float> logits)> on_logits;
  // Asked between tokens, and between layers of a prompt; true ends the answer as FinishReason::interrupted.
  std::function<bool()> should_stop;
};

enum class FinishReason { stop, length, interrupted };
std::string_view finish_reason_name(FinishReason reason);

struct GenerationResult {
  std::vector<int32_t> tokens;  // sampled, the stop token included
  std::string text;             // all deltas joined; empty without a tokenizer
  FinishReason finish_reason = FinishReason::length;
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;  // of the prompt, found in the session
  double prefill_s = 0;       // until it ended or was interrupted
  double decode_s = 0;        // from the first sampled token to the last

  int64_t fed_tokens() const { return prompt_tokens - reused_tokens; }
  // The prompt was interrupted: an unknown part of it was fed.
  bool prefill_was_cut() const { return finish_reason == FinishReason::interrupted && tokens.empty(); }
  double prefill_tokens_per_s() const;  // 0 when it was cut
  double decode_tokens_per_s() const;   // 0 when fewer than two tokens were sampled
};

// What can be said about a prompt before a model is loaded. Throws Error{usage} when it is empty, longer than `context`
// or holds an id outside 0..vocab - 1.
void check_prompt(std::span<const int32_t> prompt, int64_t context, int64_t vocab);

// Throws Error{usage} for options that cannot be met; flags are named as on the command line.
void check_generation(const GenerationOptions& options, const Tokenizer* tokenizer);

// Answers `prompt`, continuing from what `session` holds of it. `tokenizer` may be null: no text then. Throws what
// check_prompt and check_generation throw before any work, and Error{internal} for logits that are no numbers.
GenerationResult generate(Session& session, std::span<const int32_t> prompt, const GenerationOptions& options,
                          const Tokenizer* tokenizer, const GenerationCallbacks& callbacks = {});

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_GENERATION_H_
