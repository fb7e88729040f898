#include "core/jinja/builtins.h"

#include <algorithm>

#include "core/jinja/arithmetic.h"
#include "core/jinja/format.h"

namespace offload::jinja {

// --- arguments -------------------------------------------------------------------------------------------------------

Bound::Bound(std::string_view callee, const Arguments& arguments, std::initializer_list<std::string_view> parameters)
    : callee_(callee), parameters_(parameters), values_(parameters.size()) {
  if (arguments.positional.size() > parameters_.size())
    throw_error(ErrorCode::input, "{} takes at most {} arguments, found {}", callee, parameters_.size(),
                arguments.positional.size());
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = {arguments.positional[i], true};
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::find(parameters_.begin(), parameters_.end(), name);
    if (found == parameters_.end())
      throw_error(ErrorCode::input, "{} has no argument named '{}'", callee, printable(name, 60));
    Slot& slot = values_[static_cast<size_t>(found - parameters_.begin())];
    if (slot.given) throw_error(ErrorCode::input, "{} got its argument '{}' twice", callee, name);
    slot = {value, true};
  }
}

const Value& Bound::need(size_t i) const {
  if (!values_[i].given) throw_error(ErrorCode::input, "{} needs its argument '{}'", callee_, parameters_[i]);
  return values_[i].value;
}

const Text* Bound::text(size_t i) const {
  if (!values_[i].given || values_[i].value.is(Kind::none)) return nullptr;
  if (!values_[i].value.is(Kind::string))
    throw_error(ErrorCode::input, "{} needs a string as '{}', found {}", callee_, parameters_[i],
                type_name(values_[i].value));
  return &values_[i].value.as_text();
}

int64_t Bound::integer(size_t i, int64_t fallback) const {
  if (!values_[i].given || values_[i].value.is(Kind::none)) return fallback;
  if (!values_[i].value.is_integral())
    throw_error(ErrorCode::input, "{} needs an integer as '{}', found {}", callee_, parameters_[i],
                type_name(values_[i].value));
  return values_[i].value.as_integer();
}

bool Bound::flag(size_t i, bool fallback) const {
  return values_[i].given ? truth(values_[i].value) : fallback;
}

// --- attributes and items --------------------------------------------------------------------------------------------

namespace {

Value loop_attribute(const LoopState& loop, const Text& name) {
  const auto length = static_cast<int64_t>(loop.items.size());
  const std::string& word = name.bytes();
  if (word == "index") return Value::integer(loop.index0 + 1);
  if (word == "index0") return Value::integer(loop.index0);
  if (word == "revindex") return Value::integer(length - loop.index0);
  if (word == "revindex0") return Value::integer(length - loop.index0 - 1);
  if (word == "first") return Value::boolean(loop.index0 == 0);
  if (word == "last") return Value::boolean(loop.index0 + 1 == length);
  if (word == "length") return Value::integer(length);
  if (word == "depth") return Value::integer(1);
  if (word == "depth0") return Value::integer(0);
  if (word == "previtem" && loop.index0 > 0) return loop.items[static_cast<size_t>(loop.index0) - 1];
  if (word == "nextitem" && loop.index0 + 1 < length) return loop.items[static_cast<size_t>(loop.index0) + 1];
  return Value::undefined(&name);
}

Value item_of_sequence(const Sequence& sequence, int64_t index) {
  const auto length = static_cast<int64_t>(sequence.items.size());
  if (index < 0) index += length;
  if (!sequence.indexable() || index < 0 || index >= length) return {};
  return sequence.items[static_cast<size_t>(index)];
}

Value character_of(const Text& text, int64_t index, Heap& heap) {
  if (index < 0) index += static_cast<int64_t>(code_points(text.bytes()));
  if (index < 0) return {};
  const size_t begin = byte_of_code_point(text.bytes(), static_cast<size_t>(index));
  if (begin >= text.size()) return {};
  size_t end = begin;
  next_code_point(text.bytes(), end);
  return heap.string(text.slice(begin, end));
}

}  // namespace

Value get_attribute(const Value& value, const Text& name, Heap& heap) {
  if (value.is(Kind::mapping)) value.as_mapping().note_read();
  if (is_method(value, name.bytes()))
    return heap.callable({Callable::Sort::method, name.bytes(), value, nullptr, nullptr});
  switch (value.kind()) {
    case Kind::undefined:
      throw_undefined(value);
    case Kind::mapping:
    case Kind::name_space:
      if (const Value* found = value.as_mapping().find(name.bytes())) return *found;
      return Value::undefined(&name);
    case Kind::loop:
      return loop_attribute(value.as_loop(), name);
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
    case Kind::string:
    case Kind::sequence:
    case Kind::callable:
      return Value::undefined(&name);
  }
  return {};
}

Value get_item(const Value& value, const Value& key, Heap& heap) {
  if (value.is(Kind::undefined)) throw_undefined(value);
  if (value.is(Kind::sequence) && key.is_integral()) return item_of_sequence(value.as_sequence(), key.as_integer());
  if (value.is(Kind::string) && key.is_integral()) return character_of(value.as_text(), key.as_integer(), heap);
  if (value.is(Kind::mapping)) {
    value.as_mapping().note_read();
    const bool hashable = !key.is(Kind::mapping) && !(key.is(Kind::sequence) && key.as_sequence().shape == Shape::list);
    if (const Value* found = hashable ? value.as_mapping().find(key, heap) : nullptr) return *found;
    if (key.is(Kind::string) && is_method(value, key.as_text().bytes()))
      return get_attribute(value, key.as_text(), heap);
    return key.is(Kind::string) ? Value::undefined(&key.as_text()) : Value();
  }
  if (key.is(Kind::string)) return get_attribute(value, key.as_text(), heap);
  return {};
}

namespace {

struct Range {
  int64_t begin;
  int64_t end;
  int64_t step;
};

// Python's slice.indices(length).
Range slice_range(const Value& begin, const Value& end, const Value& step, int64_t length) {
  const auto part = [](const Value& value, int64_t fallback) {
    if (value.is(Kind::none)) return fallback;
    if (value.is(Kind::undefined)) throw_undefined(value);
    if (!value.is_integral())
      throw_error(ErrorCode::input, "the parts of a slice are integers, found {}", type_name(value));
    return value.as_integer();
  };
  Range range{0, 0, part(step, 1)};
  if (range.step == 0) throw_error(ErrorCode::input, "the step of a slice is zero");
  range.step = std::clamp(range.step, -length - 1, length + 1);
  const bool down = range.step < 0;
  const auto clip = [&](int64_t at) {
    if (at < 0) at = at < -length ? -1 : at + length;
    return std::clamp<int64_t>(at, down ? -1 : 0, down ? length - 1 : length);
  };
  range.begin = begin.is(Kind::none) ? (down ? length - 1 : 0) : clip(part(begin, 0));
  range.end = end.is(Kind::none) ? (down ? -1 : length) : clip(part(end, 0));
  return range;
}

template <typename Visit>
void each_of(const Range& range, Visit&& visit) {
  for (int64_t at = range.begin; range.step > 0 ? at < range.end : at > range.end; at += range.step)
    visit(static_cast<size_t>(at));
}

}  // namespace

Value get_slice(const Value& value, const Value& begin, const Value& end, const Value& step, Heap& heap) {
  if (value.is(Kind::undefined)) throw_undefined(value);
  if (value.is(Kind::string)) {
    const Text& text = value.as_text();
    const Range range = slice_range(begin, end, step, static_cast<int64_t>(code_points(text.bytes())));
    if (range.step == 1) {
      if (range.end <= range.begin) return heap.string(Text());
      const size_t first = byte_of_code_point(text.bytes(), static_cast<size_t>(range.begin));
      const std::string_view rest = std::string_view(text.bytes()).substr(first);
      return heap.string(
          text.slice(first, first + byte_of_code_point(rest, static_cast<size_t>(range.end - range.begin))));
    }
    std::vector<size_t> starts;
    for (size_t at = 0; at < text.size(); next_code_point(text.bytes(), at)) starts.push_back(at);
    starts.push_back(text.size());
    Text out;
    each_of(range, [&](size_t at) { out.append_slice(text, starts[at], starts[at + 1]); });
    return heap.string(std::move(out));
  }
  if (value.is(Kind::sequence) && value.as_sequence().indexable()) {
    const Sequence& sequence = value.as_sequence();
    const Range range = slice_range(begin, end, step, static_cast<int64_t>(sequence.items.size()));
    std::vector<Value> items;
    each_of(range, [&](size_t at) { items.push_back(sequence.items[at]); });
    Sequence* made = heap.sequence(sequence.shape, std::move(items));
    if (sequence.shape == Shape::range) {
      // Unsigned: a range that ends near the largest integer may only be printed wrong.
      const auto at = [&](int64_t index) {
        return static_cast<int64_t>(static_cast<uint64_t>(sequence.range_start) +
                                    static_cast<uint64_t>(index) * static_cast<uint64_t>(sequence.range_step));
      };
      made->range_start = at(range.begin);
      made->range_stop = at(range.end);
      made->range_step =
          static_cast<int64_t>(static_cast<uint64_t>(sequence.range_step) * static_cast<uint64_t>(range.step));
    }
    return Value::sequence(made);
  }
  throw_error(ErrorCode::input, "{} cannot be sliced", type_name(value));
}

int64_t length(const Value& value) {
  switch (value.kind()) {
    case Kind::undefined:
      return 0;
    case Kind::string:
      return static_cast<int64_t>(code_points(value.as_text().bytes()));
    case Kind::sequence:
      if (!value.as_sequence().sized()) break;
      return static_cast<int64_t>(value.as_sequence().items.size());
    case Kind::mapping:
      return static_cast<int64_t>(value.as_mapping().entries().size());
    case Kind::loop:
      return static_cast<int64_t>(value.as_loop().items.size());
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
    case Kind::name_space:
    case Kind::callable:
      break;
  }
  throw_error(ErrorCode::input, "{} has no length", type_name(value));
}

// --- functions -------------------------------------------------------------------------------------------------------

namespace {

Value make_range(const Arguments& arguments, Heap& heap) {
  const Bound bound("range", arguments, {"start", "stop", "step"});
  if (!bound[0]) throw_error(ErrorCode::input, "range needs an argument");
  for (size_t i = 0; i < 3; ++i)
    if (bound[i] && !bound[i]->is_integral())
      throw_error(ErrorCode::input, "range needs integers, found {}", type_name(*bound[i]));
  Sequence* made = heap.sequence(Shape::range);
  made->range_start = bound[1] ? bound.integer(0, 0) : 0;
  made->range_stop = bound[1] ? bound.integer(1, 0) : bound.integer(0, 0);
  made->range_step = bound.integer(2, 1);
  const int64_t step = made->range_step;
  if (step == 0) throw_error(ErrorCode::input, "the step of range is zero");
  for (int64_t at = made->range_start; step > 0 ? at < made->range_stop : at > made->range_stop;) {
    if (static_cast<int64_t>(made->items.size()) >= kRangeItemsMax)
      throw_error(ErrorCode::input, "range gives more than {} items", kRangeItemsMax);
    made->items.push_back(Value::integer(at));
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  heap.charge(static_cast<int64_t>(made->items.size() * sizeof(Value)));
  return Value::sequence(made);
}

void put_all(Mapping& into, const Value& source, std::string_view callee, Heap& heap) {
  if (source.is(Kind::mapping)) {
    const auto entries = source.as_mapping().entries();
    for (const Mapping::Entry& entry : entries) into.set(entry.key, entry.value, heap);
    return;
  }
  for (const Value& each : iterate(source, heap)) {
    const std::vector<Value> pair = iterate(each, heap);
    if (pair.size() != 2) throw_error(ErrorCode::input, "{} needs pairs of a key and a value", callee);
    into.set(pair[0], pair[1], heap);
  }
}

Mapping* make_mapping(std::string_view callee, const Arguments& arguments, Heap& heap) {
  if (arguments.positional.size() > 1) throw_error(ErrorCode::input, "{} takes one mapping at most", callee);
  Mapping* made = heap.mapping();
  if (!arguments.positional.empty()) put_all(*made, arguments.positional[0], callee, heap);
  for (const auto& [name, value] : arguments.named) made->set(heap.string(name), value, heap);
  return made;
}

Value strftime_now(const Arguments& arguments, Heap& heap, const Clock& clock) {
  constexpr size_t kFormatBytesMax = 256;
  const Bound bound("strftime_now", arguments, {"format"});
  bound.need(0);
  const Text* format = bound.text(0);
  if (format == nullptr || format->size() > kFormatBytesMax)
    throw_error(ErrorCode::input, "strftime_now needs a format of at most {} bytes", kFormatBytesMax);
  // The mark in front makes the result non-empty, so that 0 means failure.
  const std::string marked = "." + format->bytes();
  char buffer[kFormatBytesMax * 64];
  const std::tm now = clock();
  const size_t count = std::strftime(buffer, sizeof buffer, marked.c_str(), &now);
  if (count == 0)
    throw_error(ErrorCode::input, "strftime_now cannot format the time with {}", printable(format->bytes()));
  const std::string_view made(buffer + 1, count - 1);
  if (find_invalid_utf8(made) != std::string_view::npos)
    throw_error(ErrorCode::input, "strftime_now gives no UTF-8 with {}", printable(format->bytes()));
  return heap.string(Text(made, format->untrusted().empty() ? Trust::trusted : Trust::untrusted));
}

}  // namespace

bool is_function(std::string_view name) {
  for (const std::string_view known : {"raise_exception", "strftime_now", "namespace", "range", "dict"})
    if (name == known) return true;
  return false;
}

Value call_function(std::string_view name, const Arguments& arguments, Heap& heap, const Clock& clock) {
  if (name == "range") return make_range(arguments, heap);
  if (name == "dict") return Value::mapping(make_mapping(name, arguments, heap));
  if (name == "namespace") return Value::name_space(make_mapping(name, arguments, heap));
  if (name == "strftime_now") return strftime_now(arguments, heap, clock);
  OFL_ASSERT(name == "raise_exception");
  const Bound bound(name, arguments, {"message"});
  heap.raised = true;
  throw Raised{to_text(bound.need(0), heap).bytes()};
}

// --- tests -----------------------------------------------------------------------------------------------------------

namespace {

bool is_sequence(const Value& value) {
  return value.is(Kind::string) || value.is(Kind::mapping) || value.is(Kind::undefined) ||
         (value.is(Kind::sequence) && value.as_sequence().indexable());
}

bool is_iterable(const Value& value) {
  return is_sequence(value) || value.is(Kind::sequence) || value.is(Kind::loop);
}

// value % divisor == remainder.
bool leaves(const Value& value, const Value& divisor, int64_t remainder, Heap& heap) {
  return equal(apply_binary(BinaryOp::modulo, value, divisor, heap), Value::integer(remainder), heap);
}

// Whether all cased characters are already what `to` makes of them, and there is one.
bool is_in_case(const Value& value, Case to, Heap& heap) {
  const Text text = to_text(value, heap);
  const std::string lower = change_case(text, Case::lower).bytes();
  return change_case(text, to).bytes() == text.bytes() && change_case(text, Case::upper).bytes() != lower;
}

bool comparison_test(std::string_view name, const Value& left, const Value& right, Heap& heap) {
  if (name == "ne" || name == "!=") return !equal(left, right, heap);
  const int sign = order(left, right, heap);
  if (name == "lt" || name == "lessthan") return sign == -1;
  if (name == "le") return sign == -1 || sign == 0;
  if (name == "gt" || name == "greaterthan") return sign == 1;
  return sign == 1 || sign == 0;
}

bool same_object(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::none:
    case Kind::undefined:
      return true;
    case Kind::boolean:
      return a.as_boolean() == b.as_boolean();
    case Kind::integer:
      return a.as_integer() == b.as_integer();
    case Kind::real:
      return a.as_real() == b.as_real();
    default:
      return a.identity() == b.identity();
  }
}

}  // namespace

bool apply_test(std::string_view name, const Value& value, const Arguments& arguments, Heap& heap) {
  const auto alone = [&](bool result) {
    const Bound bound(name, arguments, {});
    return result;
  };
  const auto operand = [&]() -> const Value& {
    if (arguments.positional.size() != 1 || !arguments.named.empty())
      throw_error(ErrorCode::input, "the test '{}' needs one argument", name);
    return arguments.positional[0];
  };
  if (name == "defined") return alone(!value.is(Kind::undefined));
  if (name == "undefined") return alone(value.is(Kind::undefined));
  if (name == "none") return alone(value.is(Kind::none));
  if (name == "string") return alone(value.is(Kind::string));
  if (name == "mapping") return alone(value.is(Kind::mapping));
  if (name == "sequence") return alone(is_sequence(value));
  if (name == "iterable") return alone(is_iterable(value));
  if (name == "number") return alone(value.is_number());
  if (name == "integer") return alone(value.is(Kind::integer));
  if (name == "float") return alone(value.is(Kind::real));
  if (name == "boolean") return alone(value.is(Kind::boolean));
  if (name == "true") return alone(value.is(Kind::boolean) && value.as_boolean());
  if (name == "false") return alone(value.is(Kind::boolean) && !value.as_boolean());
  if (name == "callable") return alone(value.is(Kind::callable) || value.is(Kind::undefined));
  if (name == "equalto" || name == "eq" || name == "==") return equal(value, operand(), heap);
  if (name == "in") return contains(operand(), value, heap);
  if (name == "sameas") return same_object(value, operand());
  if (name == "odd") return alone(leaves(value, Value::integer(2), 1, heap));
  if (name == "even") return alone(leaves(value, Value::integer(2), 0, heap));
  if (name == "divisibleby") return leaves(value, operand(), 0, heap);
  if (name == "lower") return alone(is_in_case(value, Case::lower, heap));
  if (name == "upper") return alone(is_in_case(value, Case::upper, heap));
  for (const std::string_view known : {"ne", "!=", "lt", "lessthan", "le", "gt", "greaterthan", "ge"})
    if (name == known) return comparison_test(name, value, operand(), heap);
  throw_error(ErrorCode::input, "there is no test named '{}'", printable(name, 60));
}

}  // namespace offload::jinja
