#include "core/jinja/value.h"

#include <cmath>
#include <functional>
#include <limits>

namespace offload::jinja {

Value Value::undefined(const Text* hint) {
  Value value;
  value.as_.hint = hint;
  return value;
}

Value Value::null_content() {
  Value value(Kind::none);
  value.as_.boolean = true;
  return value;
}

Value Value::boolean(bool boolean) {
  Value value(Kind::boolean);
  value.as_.boolean = boolean;
  return value;
}

Value Value::integer(int64_t integer) {
  Value value(Kind::integer);
  value.as_.integer = integer;
  return value;
}

Value Value::real(double real) {
  Value value(Kind::real);
  value.as_.real = real;
  return value;
}

Value Value::string(const Text* text) {
  Value value(Kind::string);
  value.as_.text = text;
  return value;
}

Value Value::sequence(Sequence* sequence) {
  Value value(Kind::sequence);
  value.as_.sequence = sequence;
  return value;
}

Value Value::mapping(Mapping* mapping) {
  Value value(Kind::mapping);
  value.as_.mapping = mapping;
  return value;
}

Value Value::name_space(Mapping* mapping) {
  Value value(Kind::name_space);
  value.as_.mapping = mapping;
  return value;
}

Value Value::callable(const Callable* callable) {
  Value value(Kind::callable);
  value.as_.callable = callable;
  return value;
}

Value Value::loop(LoopState* loop) {
  Value value(Kind::loop);
  value.as_.loop = loop;
  return value;
}

// --- mapping ---------------------------------------------------------------------------------------------------------

const Value* Mapping::find(const Value& key, Heap& heap) const {
  const int64_t at = index_of(key, heap);
  return at < 0 ? nullptr : &entries_[static_cast<size_t>(at)].value;
}

int64_t Mapping::index_of(const Value& key, Heap& heap) const {
  const size_t key_hash = hash(key, heap);
  if (index_.empty()) {
    for (size_t i = 0; i < entries_.size(); ++i)
      if (equal(entries_[i].key, key, heap)) return static_cast<int64_t>(i);
    return -1;
  }
  const auto [first, last] = index_.equal_range(key_hash);
  for (auto it = first; it != last; ++it)
    if (equal(entries_[it->second].key, key, heap)) return static_cast<int64_t>(it->second);
  return -1;
}

const Value* Mapping::find(std::string_view key) const {
  const auto matches = [&](const Entry& entry) {
    return entry.key.is(Kind::string) && entry.key.as_text().bytes() == key;
  };
  if (index_.empty()) {
    for (const Entry& entry : entries_)
      if (matches(entry)) return &entry.value;
    return nullptr;
  }
  const auto [first, last] = index_.equal_range(std::hash<std::string_view>()(key));
  for (auto it = first; it != last; ++it)
    if (matches(entries_[it->second])) return &entries_[it->second].value;
  return nullptr;
}

void Mapping::set(const Value& key, const Value& value, Heap& heap) {
  if (const int64_t at = index_of(key, heap); at >= 0) {
    entries_[static_cast<size_t>(at)].value = value;
    return;
  }
  heap.charge(2 * sizeof(Entry));
  entries_.push_back({key, value});
  if (entries_.size() == kLinearMax + 1) {
    for (size_t i = 0; i < entries_.size(); ++i) index_.emplace(hash(entries_[i].key, heap), i);
  } else if (entries_.size() > kLinearMax) {
    index_.emplace(hash(key, heap), entries_.size() - 1);
  }
}

// --- heap ------------------------------------------------------------------------------------------------------------

void Heap::out_of_work() {
  throw_error(ErrorCode::input, "the template needs more than {} steps for this request; it probably loops", kWorkMax);
}

void Heap::out_of_bytes() {
  throw_error(ErrorCode::input, "the template needs more than {} MiB of memory for this request", kHeapBytesMax >> 20);
}

const Text* Heap::text(Text text) {
  if (text.size() > kOutputBytesMax)
    throw_error(ErrorCode::input, "the template makes a string above {} bytes", kOutputBytesMax);
  charge(static_cast<int64_t>(text.size() + sizeof(Text) + text.untrusted().size() * sizeof(Span)));
  return &texts_.emplace_back(std::move(text));
}

Sequence* Heap::sequence(Shape shape, std::vector<Value> items) {
  if (static_cast<int64_t>(items.size()) > kSequenceItemsMax)
    throw_error(ErrorCode::input, "the template makes a list above {} items", kSequenceItemsMax);
  charge(static_cast<int64_t>(items.size() * sizeof(Value) + sizeof(Sequence)));
  Sequence& made = sequences_.emplace_back();
  made.shape = shape;
  made.items = std::move(items);
  return &made;
}

Mapping* Heap::mapping() {
  charge(sizeof(Mapping));
  return &mappings_.emplace_back();
}

LoopState* Heap::loop(std::vector<Value> items) {
  charge(static_cast<int64_t>(items.size() * sizeof(Value) + sizeof(LoopState)));
  LoopState& made = loops_.emplace_back();
  made.items = std::move(items);
  return &made;
}

Value Heap::callable(Callable callable) {
  charge(sizeof(Callable));
  return Value::callable(&callables_.emplace_back(std::move(callable)));
}

Value Heap::undefined(std::string hint) {
  return Value::undefined(text(Text(hint, Trust::trusted)));
}

Value Heap::from_json(const OrderedJson& json, Trust trust, int depth) {
  if (depth > kValueDepthMax) throw_error(ErrorCode::input, "a value is nested deeper than {} levels", kValueDepthMax);
  const auto valid = [](const std::string& bytes) -> const std::string& {
    if (find_invalid_utf8(bytes) != std::string_view::npos)
      throw_error(ErrorCode::input, "a string is not valid UTF-8: {}", printable(bytes, 60));
    return bytes;
  };
  switch (json.type()) {
    case OrderedJson::value_t::null:
      return Value::none();
    case OrderedJson::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case OrderedJson::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        throw_error(ErrorCode::input, "the integer {} is beyond 64-bit signed", json.get<uint64_t>());
      return Value::integer(json.get<int64_t>());
    case OrderedJson::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case OrderedJson::value_t::number_float:
      return Value::real(json.get<double>());
    case OrderedJson::value_t::string:
      return string(Text(valid(json.get_ref<const std::string&>()), trust));
    case OrderedJson::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const OrderedJson& item : json) items.push_back(from_json(item, trust, depth + 1));
      return list(std::move(items));
    }
    case OrderedJson::value_t::object: {
      Mapping* made = mapping();
      for (const auto& [key, value] : json.items())
        made->set(string(Text(valid(key), trust)), from_json(value, trust, depth + 1), *this);
      return Value::mapping(made);
    }
    case OrderedJson::value_t::binary:
    case OrderedJson::value_t::discarded:
      break;
  }
  throw_error(ErrorCode::input, "a value has no JSON type");
}

// --- Python's notions ------------------------------------------------------------------------------------------------

std::string_view type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::undefined:
      return "undefined";
    case Kind::none:
      return "NoneType";
    case Kind::boolean:
      return "bool";
    case Kind::integer:
      return "int";
    case Kind::real:
      return "float";
    case Kind::string:
      return "str";
    case Kind::mapping:
      return "dict";
    case Kind::name_space:
      return "namespace";
    case Kind::callable:
      return "function";
    case Kind::loop:
      return "loop";
    case Kind::sequence:
      switch (value.as_sequence().shape) {
        case Shape::list:
          return "list";
        case Shape::tuple:
          return "tuple";
        case Shape::range:
          return "range";
        case Shape::keys:
          return "dict_keys";
        case Shape::values:
          return "dict_values";
        case Shape::items:
          return "dict_items";
        case Shape::iterator:
          return "iterator";
      }
  }
  return "value";
}

void throw_undefined(const Value& value) {
  const Text* hint = value.undefined_hint();
  throw_error(ErrorCode::input, "{} is undefined", hint ? printable(hint->bytes()) : "a value");
}

bool truth(const Value& value) {
  switch (value.kind()) {
    case Kind::undefined:
    case Kind::none:
      return false;
    case Kind::boolean:
      return value.as_boolean();
    case Kind::integer:
      return value.as_integer() != 0;
    case Kind::real:
      return value.as_real() != 0;
    case Kind::string:
      return !value.as_text().empty();
    case Kind::sequence:
      return value.as_sequence().shape == Shape::iterator || !value.as_sequence().items.empty();
    case Kind::mapping:
      return !value.as_mapping().entries().empty();
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      return true;
  }
  return false;
}

namespace {

void check_depth(int depth) {
  if (depth > kValueDepthMax) throw_error(ErrorCode::input, "a value is nested deeper than {} levels", kValueDepthMax);
}

// Exact comparison of an integer with a finite or infinite real: -1, 0, 1; 2 for NaN.
int order_integer_real(int64_t a, double b) {
  if (std::isnan(b)) return 2;
  if (b >= 9223372036854775808.0) return -1;
  if (b < -9223372036854775808.0) return 1;
  const auto whole = static_cast<int64_t>(b);
  if (a != whole) return a < whole ? -1 : 1;
  const double rest = b - static_cast<double>(whole);
  return rest > 0 ? -1 : rest < 0 ? 1 : 0;
}

int order_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral())
    return a.as_integer() < b.as_integer() ? -1 : a.as_integer() > b.as_integer() ? 1 : 0;
  if (a.is_integral()) return order_integer_real(a.as_integer(), b.as_real());
  if (b.is_integral()) {
    const int reverse = order_integer_real(b.as_integer(), a.as_real());
    return reverse == 2 ? 2 : -reverse;
  }
  if (std::isnan(a.as_real()) || std::isnan(b.as_real())) return 2;
  return a.as_real() < b.as_real() ? -1 : a.as_real() > b.as_real() ? 1 : 0;
}

bool same(const Value& a, const Value& b) {
  return a.kind() == b.kind() && a.identity() == b.identity();
}

bool equal_sequences(const Value& a, const Value& b, Heap& heap, int depth) {
  const Sequence& left = a.as_sequence();
  const Sequence& right = b.as_sequence();
  if (left.shape != right.shape || left.shape == Shape::iterator || left.items.size() != right.items.size())
    return false;
  for (size_t i = 0; i < left.items.size(); ++i)
    if (!same(left.items[i], right.items[i]) && !equal(left.items[i], right.items[i], heap, depth + 1)) return false;
  return true;
}

}  // namespace

bool equal(const Value& a, const Value& b, Heap& heap, int depth) {
  check_depth(depth);
  heap.spend(1);
  if (a.is_number() && b.is_number()) return order_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::undefined:
    case Kind::none:
      return true;
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
      return false;  // handled above
    case Kind::string:
      return a.as_text().bytes() == b.as_text().bytes();
    case Kind::sequence:
      return same(a, b) || equal_sequences(a, b, heap, depth);
    case Kind::mapping: {
      if (same(a, b)) return true;
      const Mapping& left = a.as_mapping();
      const Mapping& right = b.as_mapping();
      if (left.entries().size() != right.entries().size()) return false;
      for (const Mapping::Entry& entry : left.entries()) {
        const Value* found = right.find(entry.key, heap);
        if (!found || (!same(entry.value, *found) && !equal(entry.value, *found, heap, depth + 1))) return false;
      }
      return true;
    }
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      return a.identity() == b.identity();
  }
  return false;
}

int order(const Value& a, const Value& b, Heap& heap, int depth) {
  check_depth(depth);
  heap.spend(1);
  if (a.is(Kind::undefined)) throw_undefined(a);
  if (b.is(Kind::undefined)) throw_undefined(b);
  if (a.is_number() && b.is_number()) return order_numbers(a, b);
  if (a.is(Kind::string) && b.is(Kind::string)) {
    const int result = a.as_text().bytes().compare(b.as_text().bytes());
    return result < 0 ? -1 : result > 0 ? 1 : 0;
  }
  if (a.is(Kind::sequence) && b.is(Kind::sequence)) {
    const Sequence& left = a.as_sequence();
    const Sequence& right = b.as_sequence();
    if (left.shape == right.shape && (left.shape == Shape::list || left.shape == Shape::tuple)) {
      for (size_t i = 0; i < left.items.size() && i < right.items.size(); ++i)
        if (!same(left.items[i], right.items[i]) && !equal(left.items[i], right.items[i], heap, depth + 1))
          return order(left.items[i], right.items[i], heap, depth + 1);
      return left.items.size() < right.items.size() ? -1 : left.items.size() > right.items.size() ? 1 : 0;
    }
  }
  throw_error(ErrorCode::input, "{} and {} have no order", type_name(a), type_name(b));
}

size_t hash(const Value& value, Heap& heap, int depth) {
  check_depth(depth);
  heap.spend(1);
  switch (value.kind()) {
    case Kind::undefined:
    case Kind::none:
      return 0x9E3779B9;
    case Kind::boolean:
    case Kind::integer:
      return std::hash<int64_t>()(value.as_integer());
    case Kind::real: {
      const double real = value.as_real();
      if (real >= -9e18 && real <= 9e18 && real == std::floor(real))
        return std::hash<int64_t>()(static_cast<int64_t>(real));
      return std::hash<double>()(real);
    }
    case Kind::string:
      return std::hash<std::string_view>()(value.as_text().bytes());
    case Kind::sequence:
      if (value.as_sequence().shape == Shape::tuple) {
        size_t result = 0x345678;
        for (const Value& item : value.as_sequence().items) result = result * 1000003 ^ hash(item, heap, depth + 1);
        return result;
      }
      break;
    case Kind::mapping:
      break;
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      return std::hash<const void*>()(value.identity());
  }
  throw_error(ErrorCode::input, "unhashable type: {} cannot be a key", type_name(value));
}

bool contains(const Value& container, const Value& item, Heap& heap) {
  switch (container.kind()) {
    case Kind::undefined:
      return false;
    case Kind::string:
      if (!item.is(Kind::string))
        throw_error(ErrorCode::input, "'in <string>' needs a string on the left, found {}", type_name(item));
      return container.as_text().bytes().find(item.as_text().bytes()) != std::string::npos;
    case Kind::sequence: {
      Sequence& sequence = container.as_sequence();
      size_t at = 0;
      while (at < sequence.items.size() && !same(sequence.items[at], item) && !equal(sequence.items[at], item, heap))
        ++at;
      const bool found = at < sequence.items.size();
      if (sequence.shape == Shape::iterator)  // what was looked at is spent
        sequence.items.erase(sequence.items.begin(),
                             sequence.items.begin() + static_cast<int64_t>(at) + (found ? 1 : 0));
      return found;
    }
    case Kind::mapping:
      container.as_mapping().note_read();
      return container.as_mapping().find(item, heap) != nullptr;
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      break;
  }
  throw_error(ErrorCode::input, "'in' needs a string, a list or a mapping on the right, found {}",
              type_name(container));
}

std::vector<Value> iterate(const Value& value, Heap& heap) {
  std::vector<Value> items;
  switch (value.kind()) {
    case Kind::undefined:
      return items;
    case Kind::string: {
      const Text& text = value.as_text();
      for (size_t at = 0; at < text.size();) {
        size_t next = at;
        next_code_point(text.bytes(), next);
        items.push_back(heap.string(text.slice(at, next)));
        at = next;
      }
      return items;
    }
    case Kind::sequence: {
      Sequence& sequence = value.as_sequence();
      if (sequence.shape == Shape::iterator) {
        items.swap(sequence.items);
        return items;
      }
      heap.charge(static_cast<int64_t>(sequence.items.size() * sizeof(Value)));
      return sequence.items;
    }
    case Kind::mapping:
      for (const Mapping::Entry& entry : value.as_mapping().entries()) items.push_back(entry.key);
      return items;
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      break;
  }
  throw_error(ErrorCode::input, "cannot loop over {}", type_name(value));
}

}  // namespace offload::jinja
