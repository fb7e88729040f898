// PCRE2 behind the one question a pre-tokenizer asks: where do the matches of a pattern cut this text?
//
// Refuses to be a general regex interface: no groups, no replacement. Matching recurses neither on the machine stack
// nor per character: the JIT has its own bounded stack and the interpreter, which takes over when that is full, keeps
// its frames on the heap. Thread rule: Regex is immutable; a RegexScratch belongs to one thread.
#ifndef OFFLOAD_CORE_REGEX_H_
#define OFFLOAD_CORE_REGEX_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

// PCRE2's types, named here so that its header with its macros stays in regex.cpp.
struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace offload {

enum class RegexSyntax { pcre2, literal };

struct Pcre2Free {
  void operator()(pcre2_real_code_8* code) const;
  void operator()(pcre2_real_match_data_8* data) const;
  void operator()(pcre2_real_match_context_8* context) const;
  void operator()(pcre2_real_jit_stack_8* stack) const;
};

class RegexScratch {
 public:
  RegexScratch();

 private:
  friend class Regex;
  std::unique_ptr<pcre2_real_match_data_8, Pcre2Free> match_;
  std::unique_ptr<pcre2_real_match_context_8, Pcre2Free> context_;
  std::unique_ptr<pcre2_real_jit_stack_8, Pcre2Free> jit_stack_;  // null where there is no JIT
};

class Regex {
 public:
  // Throws Error{input} naming `origin`, the pattern and PCRE2's reason.
  Regex(std::string_view pattern, RegexSyntax syntax, std::string_view origin);

  // Appends the matches of `text` and the gaps between them, in order; together they are `text`. Empty matches cut
  // nothing. REQUIRES: `text` is not empty and valid UTF-8. Throws Error{input} when the pattern backtracks beyond
  // kStepsPerByteMax.
  void split(std::string_view text, RegexScratch& scratch, std::vector<std::string_view>& pieces) const;

 private:
  int match(std::string_view text, size_t start, RegexScratch& scratch) const;

  std::string pattern_;
  std::string origin_;
  std::unique_ptr<pcre2_real_code_8, Pcre2Free> code_;
  bool has_jit_ = false;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_REGEX_H_
