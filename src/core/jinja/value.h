// The values a template computes with, and the heap they live on while one prompt is rendered.
//
// A Value is a small copyable handle; strings, sequences, mappings and callables belong to a Heap and die with it,
// cycles included. The heap also counts bytes and work, and refuses what exceeds the limits below, so that no template
// or request can run away. Equality, order, hashing and truth are Python's. Integers are 64-bit: overflow is an error,
// never a wrapped number. Thread rule: a Heap and its values stay on one thread.
#ifndef OFFLOAD_CORE_JINJA_VALUE_H_
#define OFFLOAD_CORE_JINJA_VALUE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base.h"
#include "core/jinja/text.h"
#include "core/json.h"

namespace offload::jinja {

// Limits of one rendering. A prompt of 262,144 tokens is about 1 MiB of text and some 10^5 evaluations; these leave two
// orders of magnitude and still end within about two seconds.
inline constexpr int64_t kHeapBytesMax = int64_t{512} << 20;
inline constexpr int64_t kWorkMax = 30'000'000;              // evaluated expressions + loop rounds + compared elements
inline constexpr size_t kOutputBytesMax = size_t{64} << 20;  // of the prompt, or of any one string
inline constexpr int64_t kSequenceItemsMax = 4'000'000;
inline constexpr int64_t kRangeItemsMax = 100'000;  // the reference sandbox's MAX_RANGE
inline constexpr int kValueDepthMax = 256;          // nesting of printed, compared or converted values

struct Scope;
struct MacroNode;
class Mapping;
struct Sequence;
struct Callable;
struct LoopState;

enum class Kind : uint8_t {
  undefined,
  none,
  boolean,
  integer,
  real,
  string,
  sequence,
  mapping,
  name_space,
  callable,
  loop
};

class Value {
 public:
  Value() : kind_(Kind::undefined) { as_.hint = nullptr; }
  // `hint` says what was undefined ("'x'"); must outlive the rendering.
  static Value undefined(const Text* hint);
  static Value none() { return Value(Kind::none); }
  // The null content of a message: a none whose printing is noticed (see chat_template.h).
  static Value null_content();
  static Value boolean(bool value);
  static Value integer(int64_t value);
  static Value real(double value);
  static Value string(const Text* text);
  static Value sequence(Sequence* sequence);
  static Value mapping(Mapping* mapping);
  static Value name_space(Mapping* mapping);
  static Value callable(const Callable* callable);
  static Value loop(LoopState* loop);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_null_content() const { return kind_ == Kind::none && as_.boolean; }
  // Python counts booleans as integers; these do too.
  bool is_integral() const { return kind_ == Kind::integer || kind_ == Kind::boolean; }
  bool is_number() const { return is_integral() || kind_ == Kind::real; }

  bool as_boolean() const { return get(Kind::boolean, as_.boolean); }
  int64_t as_integer() const { return kind_ == Kind::boolean ? as_.boolean : get(Kind::integer, as_.integer); }
  double as_real() const { return kind_ == Kind::real ? as_.real : static_cast<double>(as_integer()); }
  const Text& as_text() const { return *get(Kind::string, as_.text); }
  Sequence& as_sequence() const { return *get(Kind::sequence, as_.sequence); }
  Mapping& as_mapping() const {
    OFL_ASSERT(kind_ == Kind::mapping || kind_ == Kind::name_space);
    return *as_.mapping;
  }
  const Callable& as_callable() const { return *get(Kind::callable, as_.callable); }
  LoopState& as_loop() const { return *get(Kind::loop, as_.loop); }
  const Text* undefined_hint() const { return get(Kind::undefined, as_.hint); }
  const void* identity() const { return as_.sequence; }

 private:
  explicit Value(Kind kind) : kind_(kind) { as_.integer = 0; }
  template <typename T>
  T get(Kind kind, T value) const {
    OFL_ASSERT(kind_ == kind);
    return value;
  }

  Kind kind_;
  union {
    bool boolean;
    int64_t integer;
    double real;
    const Text* text;
    Sequence* sequence;
    Mapping* mapping;
    const Callable* callable;
    LoopState* loop;
    const Text* hint;
  } as_;
};

// What Python type a sequence stands for: decides printing, indexing, length and truth. An `iterator` gives its items
// once; the views and iterators cannot be indexed.
enum class Shape : uint8_t { list, tuple, range, keys, values, items, iterator };

struct Sequence {
  Shape shape = Shape::list;
  std::vector<Value> items;
  int64_t range_start = 0;
  int64_t range_stop = 0;
  int64_t range_step = 1;

  bool indexable() const { return shape == Shape::list || shape == Shape::tuple || shape == Shape::range; }
  bool sized() const { return shape != Shape::iterator; }
};

class Heap;

// Insertion-ordered, keys compared as Python does (1 == 1.0 == true).
class Mapping {
 public:
  struct Entry {
    Value key;
    Value value;
  };

  const std::vector<Entry>& entries() const { return entries_; }
  const Value* find(const Value& key, Heap& heap) const;
  const Value* find(std::string_view key) const;
  // Inserts or replaces; a replaced key keeps its place. Throws Error{input} when the key is unhashable.
  void set(const Value& key, const Value& value, Heap& heap);

  // The JSON text this mapping was parsed from (tool-call arguments), or null.
  const Text* source = nullptr;
  // Set when the template looks into this mapping (a part of a message's content) or writes it as JSON; null: nobody
  // asks. Outlives the rendering.
  bool* is_read = nullptr;
  void note_read() const {
    if (is_read != nullptr) *is_read = true;
  }

 private:
  // Place of `key` among the entries, or -1.
  int64_t index_of(const Value& key, Heap& heap) const;

  static constexpr size_t kLinearMax = 16;
  std::vector<Entry> entries_;
  std::unordered_multimap<size_t, size_t> index_;  // hash -> entry, used above kLinearMax entries
};

// A macro, a global function, or a method bound to a value.
struct Callable {
  enum class Sort : uint8_t { function, method, macro };
  Sort sort;
  std::string_view name;
  Value self;
  const MacroNode* macro = nullptr;
  Scope* closure = nullptr;
};

// The variable `loop`; owns what the loop walks, since a template may keep it beyond the loop.
struct LoopState {
  std::vector<Value> items;
  int64_t index0 = 0;
  int64_t depth0 = 0;
};

class Heap {
 public:
  Heap() = default;
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  const Text* text(Text text);
  Value string(Text text) { return Value::string(this->text(std::move(text))); }
  Value string(std::string_view bytes) { return string(Text(bytes, Trust::trusted)); }
  Sequence* sequence(Shape shape, std::vector<Value> items = {});
  Value list(std::vector<Value> items) { return Value::sequence(sequence(Shape::list, std::move(items))); }
  Value tuple(std::vector<Value> items) { return Value::sequence(sequence(Shape::tuple, std::move(items))); }
  Value iterator(std::vector<Value> items) { return Value::sequence(sequence(Shape::iterator, std::move(items))); }
  Mapping* mapping();
  LoopState* loop(std::vector<Value> items);
  Value callable(Callable callable);
  Value undefined(std::string hint);

  // Converts a JSON tree; its strings get the mark `trust`. Throws Error{input} on an integer beyond 64-bit, invalid
  // UTF-8, or nesting beyond kValueDepthMax.
  Value from_json(const OrderedJson& json, Trust trust, int depth = 0);

  // Counts work or bytes; throws Error{input} when a limit is reached.
  void spend(int64_t work) {
    if ((work_left_ -= work) < 0) out_of_work();
  }
  void charge(int64_t bytes) {
    if ((bytes_left_ -= bytes) < 0) out_of_bytes();
  }

  // Set when the null content of a message was printed.
  bool null_content_printed = false;
  // Set when the template called raise_exception.
  bool raised = false;

 private:
  [[noreturn]] static void out_of_work();
  [[noreturn]] static void out_of_bytes();

  std::deque<Text> texts_;
  std::deque<Sequence> sequences_;
  std::deque<Mapping> mappings_;
  std::deque<Callable> callables_;
  std::deque<LoopState> loops_;
  int64_t work_left_ = kWorkMax;
  int64_t bytes_left_ = kHeapBytesMax;
};

// Python's name of the type, for messages: "str", "dict", "NoneType".
std::string_view type_name(const Value& value);

bool truth(const Value& value);
bool equal(const Value& a, const Value& b, Heap& heap, int depth = 0);
// -1, 0, 1. Throws Error{input} when the types have no order.
int order(const Value& a, const Value& b, Heap& heap, int depth = 0);
// Throws Error{input} for lists and dicts, as Python.
size_t hash(const Value& value, Heap& heap, int depth = 0);
bool contains(const Value& container, const Value& item, Heap& heap);
// What a for loop walks: items, keys of a mapping, characters of a string, nothing for undefined. An iterator is spent.
std::vector<Value> iterate(const Value& value, Heap& heap);

[[noreturn]] void throw_undefined(const Value& value);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_VALUE_H_
