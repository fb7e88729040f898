// The normalizers of tokenizer.json that the supported models use: NFC, Prepend, Replace of a string, and their
// Sequence.
//
// Refuses the rest by name (Strip, Lowercase, Precompiled, ...). Thread rule: immutable after construction.
#ifndef OFFLOAD_CORE_NORMALIZER_H_
#define OFFLOAD_CORE_NORMALIZER_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace offload {

class Normalizer {
 public:
  // Reads the value of tokenizer.json's "normalizer" (null: none). Throws Error{input}.
  Normalizer(const Json& json, std::string_view origin);

  // Returns the normal form: `text` itself when nothing changes, else a view of `buffer`. REQUIRES: valid UTF-8.
  std::string_view apply(std::string_view text, std::string& buffer) const;

 private:
  enum class Kind { nfc, prepend, replace };
  struct Step {
    Kind kind;
    std::string from;  // replace: what to look for, not empty
    std::string to;    // replace: what to put there; prepend: what to put before a text that is not empty
  };
  void add_steps(const Json& json, std::string_view origin, int depth);

  std::vector<Step> steps_;
};

// Reads {"pattern": {"String": from}, "content": to} of a Replace normalizer or decoder; refuses a Regex pattern.
void read_string_replacement(const Json& json, std::string_view origin, std::string_view component, std::string& from,
                             std::string& to);
// Every `from` of `text`, left to right, replaced by `to`. REQUIRES: `from` is not empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace offload

#endif  // OFFLOAD_CORE_NORMALIZER_H_
