// What an engine makes of a golden prompt and the chain of tokens that follows it.
#ifndef OFFLOAD_TESTS_GOLDEN_CHAIN_H_
#define OFFLOAD_TESTS_GOLDEN_CHAIN_H_

#include "golden.h"
#include "offload/engine.h"

namespace offload {

// 106 tokens: with chunks of 20 a last one of 6, which is as short as a decode step.
inline const GoldenPrompt& long_chinese(const Golden& golden) {
  return golden.prompts()[5];
}

// Logits of every prompt row, then of each token of a forced chain.
inline std::vector<float> chain_logits(Engine& engine, const GoldenPrompt& prompt, size_t chain_tokens) {
  Sequence sequence = engine.new_sequence();
  std::vector<float> out;
  const auto keep = [&](int64_t, std::span<const float> logits) {
    out.insert(out.end(), logits.begin(), logits.end());
  };
  engine.feed(sequence, prompt.ids, Engine::LogitRows::all, keep);
  for (size_t i = 0; i < chain_tokens; ++i)
    engine.feed(sequence, std::span(prompt.fp32.tokens).subspan(i, 1), Engine::LogitRows::last, keep);
  return out;
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_GOLDEN_CHAIN_H_
