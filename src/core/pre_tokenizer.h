// Cuts text into the words that BPE works on: Split, Digits and ByteLevel stages, applied one after another.
//
// Patterns are taken from tokenizer.json as they stand and run by PCRE2 (UTF, UCP, JIT where the CPU has one). Letter
// and mark classes are those of the installed PCRE2's Unicode version. `\s` is made Unicode White_Space: PCRE2's own
// also holds U+180E. Refuses by name: other stage types, behaviours other than Isolated, and the constructs that the
// reference's regex engine reads differently (class intersection, nested classes, \h). Thread rule: PreTokenizer is
// immutable; a PreTokenizerScratch belongs to one thread.
#ifndef OFFLOAD_CORE_PRE_TOKENIZER_H_
#define OFFLOAD_CORE_PRE_TOKENIZER_H_

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace offload {

class Regex;
class RegexScratch;

// Working memory of split(). Words that no longer are substrings of the text (add_prefix_space) live here.
class PreTokenizerScratch {
 public:
  PreTokenizerScratch();
  ~PreTokenizerScratch();

 private:
  friend class PreTokenizer;
  std::unique_ptr<RegexScratch> regex_;
  std::vector<std::string_view> pieces_;
  std::deque<std::string> prefixed_;
};

class PreTokenizer {
 public:
  // Reads the value of tokenizer.json's "pre_tokenizer" (null: the whole text is one word). Throws Error{input}.
  PreTokenizer(const Json& json, std::string_view origin);
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  // True when a ByteLevel stage is present: words are then read as bytes, not as code points.
  bool byte_level() const { return byte_level_; }

  // Replaces `words` by the words of `text`. They view `text` or `scratch`, until the next call with that scratch.
  // REQUIRES: `text` is valid UTF-8. Throws Error{input} when a pattern needs more than its share of steps.
  void split(std::string_view text, PreTokenizerScratch& scratch, std::vector<std::string_view>& words) const;

 private:
  struct Stage {
    std::unique_ptr<Regex> regex;  // null: the stage cuts nothing
    bool add_prefix_space = false;
  };
  void add_stages(const Json& json, std::string_view origin, int depth);

  std::vector<Stage> stages_;
  bool byte_level_ = false;
};

// The PCRE2 spelling of a pattern of tokenizer.json. Throws Error{input}. Public for tests.
std::string to_pcre2_pattern(std::string_view pattern, std::string_view origin);

}  // namespace offload

#endif  // OFFLOAD_CORE_PRE_TOKENIZER_H_
