#include "core/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "core/base.h"

namespace offload {

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  for (std::string& text : stops) {
    if (text.empty()) throw_error(ErrorCode::usage, "a stop string is empty; give at least one character");
    Stop stop{std::move(text), {}, 0};
    stop.fallback.assign(stop.text.size() + 1, 0);
    for (size_t i = 1, border = 0; i < stop.text.size(); ++i) {
      while (border > 0 && stop.text[i] != stop.text[border]) border = stop.fallback[border];
      if (stop.text[i] == stop.text[border]) ++border;
      stop.fallback[i + 1] = border;
    }
    stops_.push_back(std::move(stop));
  }
}

std::string StopMatcher::feed(std::string_view piece) {
  if (stopped_) return {};
  size_t longest = 0;  // what the input ends with that a stop string begins with
  for (size_t at = 0; at < piece.size(); ++at) {
    held_.push_back(piece[at]);
    longest = 0;
    size_t match = 0;
    for (Stop& stop : stops_) {
      while (stop.matched > 0 && stop.text[stop.matched] != piece[at]) stop.matched = stop.fallback[stop.matched];
      if (stop.text[stop.matched] == piece[at]) ++stop.matched;
      if (stop.matched == stop.text.size()) match = std::max(match, stop.matched);
      longest = std::max(longest, stop.matched);
    }
    if (match > 0) {
      stopped_ = true;
      held_.resize(held_.size() - match);
      return std::exchange(held_, {});
    }
  }
  if (piece.empty()) return {};
  std::string shown = held_.substr(0, held_.size() - longest);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopMatcher::finish() {
  return std::exchange(held_, {});
}

}  // namespace offload
