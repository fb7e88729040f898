#include "offload/session.h"

#include <algorithm>

namespace offload {

void Session::reset() {
  state_.reset();
  tokens_.clear();
  is_broken_ = false;
}

int64_t Session::reuse(std::span<const int32_t> prompt) {
  OFL_ASSERT(!prompt.empty());
  const bool extends = prompt.size() > tokens_.size() && std::equal(tokens_.begin(), tokens_.end(), prompt.begin());
  if (is_broken_ || !extends) reset();
  return length();
}

void Session::feed(std::span<const int32_t> tokens, Engine::LogitRows rows, const Engine::LogitSink& sink,
                   const std::function<bool()>& should_stop) {
  OFL_ASSERT(!is_broken_);
  is_broken_ = true;
  const auto stop = [&] {
    if (should_stop && should_stop()) throw Error(ErrorCode::interrupted, "interrupted");
  };
  // Within a step of several rows alone: a tap ends what a device does at one go.
  Model::LayerTap tap;
  if (should_stop && tokens.size() > 1) tap = [&](size_t, const Tensor&) { stop(); };
  stop();
  engine_.feed(state_, tokens, rows, sink, tap);
  is_broken_ = false;
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

}  // namespace offload
