// What a template can name without defining it: attributes, methods, global functions, filters and tests.
//
// Every function throws Error{input} without a place (the interpreter adds the line) on wrong arguments and on what is
// known but refused. Thread-safe: no state.
#ifndef OFFLOAD_CORE_JINJA_BUILTINS_H_
#define OFFLOAD_CORE_JINJA_BUILTINS_H_

#include <ctime>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/jinja/value.h"

namespace offload::jinja {

// Says the local time, for strftime_now.
using Clock = std::function<std::tm()>;

// What raise_exception throws: the template's own sentence.
struct Raised {
  std::string sentence;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// Arguments matched to the parameter names of a builtin; throws Error{input} on one too many or unknown.
class Bound {
 public:
  Bound(std::string_view callee, const Arguments& arguments, std::initializer_list<std::string_view> parameters);

  // The argument of parameter `i`, or null.
  const Value* operator[](size_t i) const { return values_[i].given ? &values_[i].value : nullptr; }
  // The same, required.
  const Value& need(size_t i) const;
  // Optional arguments of one type; none counts as absent for text and integer.
  const Text* text(size_t i) const;
  int64_t integer(size_t i, int64_t fallback) const;
  bool flag(size_t i, bool fallback) const;

 private:
  struct Slot {
    Value value;
    bool given = false;
  };
  std::string_view callee_;
  std::vector<std::string_view> parameters_;
  std::vector<Slot> values_;
};

// value.name: attributes and methods first, then the key of a mapping; undefined (with `hint`) when there is neither.
Value get_attribute(const Value& value, const Text& name, Heap& heap);
// value[key]: the item first, then the attribute.
Value get_item(const Value& value, const Value& key, Heap& heap);
// value[begin:end:step]; none stands for an absent part.
Value get_slice(const Value& value, const Value& begin, const Value& end, const Value& step, Heap& heap);

// Whether `name` is a method of `value` (supported or not).
bool is_method(const Value& value, std::string_view name);
Value call_method(const Value& self, std::string_view name, const Arguments& arguments, Heap& heap);

bool is_function(std::string_view name);
Value call_function(std::string_view name, const Arguments& arguments, Heap& heap, const Clock& clock);

Value apply_filter(std::string_view name, const Value& input, const Arguments& arguments, Heap& heap);
bool apply_test(std::string_view name, const Value& input, const Arguments& arguments, Heap& heap);

// len(value).
int64_t length(const Value& value);
// Items [first, last) of a list as a new value; `value` as a string of pieces with `separator` between.
Text joined(const std::vector<Value>& items, const Text& separator, Heap& heap);
Value items_view(const Mapping& mapping, Shape shape, Heap& heap);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_BUILTINS_H_
