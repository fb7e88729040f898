// How a value becomes text: Python's str and repr, and the JSON the reference renderer writes.
//
// Every function throws Error{input} when the result exceeds the heap's limits. Thread-safe: no state.
#ifndef OFFLOAD_CORE_JINJA_FORMAT_H_
#define OFFLOAD_CORE_JINJA_FORMAT_H_

#include <optional>
#include <string>

#include "core/jinja/value.h"

namespace offload::jinja {

// str(value): what {{ }} prints. A string is itself, undefined is empty.
Text to_text(const Value& value, Heap& heap);
// repr(value).
Text to_repr(const Value& value, Heap& heap);
// Shortest text that reads back as `value`, in Python's spelling: 1.0, 0.1, 1e+16, inf.
std::string real_text(double value);

// The arguments of json.dumps that templates use.
struct JsonStyle {
  std::optional<std::string> indent;  // what one level adds; null: all on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool ascii_only = false;
  bool sort_keys = false;
};

// json.dumps(value): throws Error{input} for what has no JSON form (undefined, functions, iterators).
Text to_json(const Value& value, const JsonStyle& style, Heap& heap);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_FORMAT_H_
