// Ends a text at the first stop string, however the text is cut into pieces.
//
// The match that completes first wins; of those that complete at the same byte, the longest. So the result does not
// depend on the cutting. Emits everything that can no longer be part of a match at once. Thread rule: one text, one
// thread.
#ifndef OFFLOAD_CORE_STOP_MATCHER_H_
#define OFFLOAD_CORE_STOP_MATCHER_H_

#include <string>
#include <string_view>
#include <vector>

namespace offload {

class StopMatcher {
 public:
  // Throws Error{usage} when a stop string is empty. No stop strings: everything passes.
  explicit StopMatcher(std::vector<std::string> stops);

  // Takes the next piece of text and returns what may be shown now. After a match it takes and returns nothing.
  std::string feed(std::string_view piece);
  // The text ended another way: what was held back. Empty after a match.
  std::string finish();

  bool stopped() const { return stopped_; }

 private:
  struct Stop {
    std::string text;
    std::vector<size_t> fallback;  // of Knuth-Morris-Pratt: [i] = longest proper border of the first i bytes
    size_t matched = 0;            // bytes of `text` that the input now ends with
  };
  std::vector<Stop> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_STOP_MATCHER_H_
