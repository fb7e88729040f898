#include "core/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "core/base.h"

namespace offload {
namespace {

constexpr size_t kPatternBytesMax = 16384;
// A match may take this many steps per byte of text, and never fewer than kStepsMin. A tokenizer's pattern takes a few
// per byte; one with nested repetition takes 2^n and is stopped.
constexpr uint64_t kStepsPerByteMax = 64;
constexpr uint64_t kStepsMin = 1'000'000;
constexpr size_t kJitStackBytesMin = 32 * 1024;
constexpr size_t kJitStackBytesMax = 1024 * 1024;
constexpr uint32_t kHeapKibMax = 1024 * 1024;

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

}  // namespace

void Pcre2Free::operator()(pcre2_real_code_8* code) const {
  pcre2_code_free(code);
}
void Pcre2Free::operator()(pcre2_real_match_data_8* data) const {
  pcre2_match_data_free(data);
}
void Pcre2Free::operator()(pcre2_real_match_context_8* context) const {
  pcre2_match_context_free(context);
}
void Pcre2Free::operator()(pcre2_real_jit_stack_8* stack) const {
  pcre2_jit_stack_free(stack);
}

RegexScratch::RegexScratch()
    : match_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)),
      jit_stack_(pcre2_jit_stack_create(kJitStackBytesMin, kJitStackBytesMax, nullptr)) {
  if (!match_ || !context_) throw_error(ErrorCode::resource, "out of memory for a regex match");
  pcre2_set_heap_limit(context_.get(), kHeapKibMax);
  if (jit_stack_) pcre2_jit_stack_assign(context_.get(), nullptr, jit_stack_.get());
}

Regex::Regex(std::string_view pattern, RegexSyntax syntax, std::string_view origin)
    : pattern_(pattern), origin_(origin) {
  if (pattern.empty() || pattern.size() > kPatternBytesMax)
    throw_error(ErrorCode::input, "{}: pre_tokenizer pattern has {} bytes; expected 1 to {}", origin, pattern.size(),
                kPatternBytesMax);
  // UCP and the rest are meaningless for a literal, and PCRE2 refuses them there.
  const uint32_t options = syntax == RegexSyntax::literal
                               ? PCRE2_UTF | PCRE2_LITERAL
                               : PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
  int code = 0;
  PCRE2_SIZE offset = 0;
  code_.reset(pcre2_compile(bytes_of(pattern), pattern.size(), options, &code, &offset, nullptr));
  if (!code_)
    throw_error(ErrorCode::input, "{}: pre_tokenizer pattern {}: {} at byte {}", origin, printable(pattern),
                error_text(code), offset);
  has_jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

int Regex::match(std::string_view text, size_t start, RegexScratch& scratch) const {
  const auto interpret = [&](uint32_t options) {
    return pcre2_match(code_.get(), bytes_of(text), text.size(), start, PCRE2_NO_UTF_CHECK | options,
                       scratch.match_.get(), scratch.context_.get());
  };
  if (!has_jit_ || !scratch.jit_stack_) return interpret(PCRE2_NO_JIT);
  const int count = pcre2_jit_match(code_.get(), bytes_of(text), text.size(), start, PCRE2_NO_UTF_CHECK,
                                    scratch.match_.get(), scratch.context_.get());
  return count == PCRE2_ERROR_JIT_STACKLIMIT ? interpret(PCRE2_NO_JIT) : count;
}

void Regex::split(std::string_view text, RegexScratch& scratch, std::vector<std::string_view>& pieces) const {
  const uint64_t steps = std::max(kStepsMin, kStepsPerByteMax * text.size());
  pcre2_set_match_limit(scratch.context_.get(), static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));
  pcre2_set_depth_limit(scratch.context_.get(), UINT32_MAX);
  size_t cut = 0;  // text before this is in `pieces`
  for (size_t at = 0; at < text.size();) {
    const int count = match(text, at, scratch);
    if (count == PCRE2_ERROR_NOMATCH) break;
    if (count < 0)
      throw_error(ErrorCode::input, "{}: pre_tokenizer pattern {} failed on a text of {} bytes: {}", origin_,
                  printable(pattern_), text.size(), error_text(count));
    const PCRE2_SIZE* found = pcre2_get_ovector_pointer(scratch.match_.get());
    const size_t first = found[0], last = found[1];
    if (last <= first) {  // empty, or turned round by \K: look again one code point further on
      at = std::max(at, first) + 1;
      while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) ++at;
      continue;
    }
    if (first > cut) pieces.push_back(text.substr(cut, first - cut));
    pieces.push_back(text.substr(first, last - first));
    at = cut = last;
  }
  if (cut < text.size()) pieces.push_back(text.substr(cut));
}

}  // namespace offload
