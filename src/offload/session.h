// Session: one conversation's place in a model: the tokens fed so far and the state they left.
//
// A next prompt that begins with all of them costs only what is new; any other starts again from nothing. Knows no
// text. Confined to the engine's thread; the engine outlives it.
#ifndef OFFLOAD_OFFLOAD_SESSION_H_
#define OFFLOAD_OFFLOAD_SESSION_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "offload/engine.h"

namespace offload {

class Session {
 public:
  // Allocates the state. Throws Error{resource}.
  explicit Session(Engine& engine) : engine_(engine), state_(engine.new_sequence()) {}

  Engine& engine() const { return engine_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }

  // How many of the prompt's first tokens are kept in the state; the rest is to be fed. At least one token is left to
  // feed, since its logits are needed. Starts the state again when the prompt is not longer or differs.
  // REQUIRES: prompt is not empty.
  int64_t reuse(std::span<const int32_t> prompt);

  // Engine::feed. When it throws, the next reuse() starts again from nothing. `should_stop` is asked between layers;
  // true throws Error{interrupted}.
  void feed(std::span<const int32_t> tokens, Engine::LogitRows rows, const Engine::LogitSink& sink,
            const std::function<bool()>& should_stop = {});

 private:
  void reset();

  Engine& engine_;
  Sequence state_;
  std::vector<int32_t> tokens_;
  bool is_broken_ = false;  // a feed threw: the state may be between two tokens
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_SESSION_H_
