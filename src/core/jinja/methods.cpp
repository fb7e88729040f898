// The methods of strings, mappings, lists and loops (builtins.h).
//
// Names that Python has and this engine refuses are methods too: looking one up succeeds, as in the reference (so a
// mapping's missing key of that name behaves alike), and only calling it is an error.
#include <algorithm>

#include "core/jinja/builtins.h"
#include "core/jinja/format.h"

namespace offload::jinja {
namespace {

constexpr std::string_view kStringMethods[] = {
    "capitalize",   "casefold",   "center",    "count",       "encode",    "endswith",     "expandtabs",   "find",
    "format",       "format_map", "index",     "isalnum",     "isalpha",   "isascii",      "isdecimal",    "isdigit",
    "isidentifier", "islower",    "isnumeric", "isprintable", "isspace",   "istitle",      "isupper",      "join",
    "ljust",        "lower",      "lstrip",    "maketrans",   "partition", "removeprefix", "removesuffix", "replace",
    "rfind",        "rindex",     "rjust",     "rpartition",  "rsplit",    "rstrip",       "split",        "splitlines",
    "startswith",   "strip",      "swapcase",  "title",       "translate", "upper",        "zfill"};
constexpr std::string_view kMappingMethods[] = {"clear", "copy",    "fromkeys",   "get",    "items", "keys",
                                                "pop",   "popitem", "setdefault", "update", "values"};
constexpr std::string_view kListMethods[] = {"append", "clear", "copy",   "count",   "extend", "index",
                                             "insert", "pop",   "remove", "reverse", "sort"};
constexpr std::string_view kTupleMethods[] = {"count", "index"};
constexpr std::string_view kLoopMethods[] = {"cycle", "changed"};

template <size_t N>
bool among(std::string_view name, const std::string_view (&names)[N]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

[[noreturn]] void refuse(const Value& self, std::string_view name) {
  throw_error(ErrorCode::input, "the method {} of {} is not supported in chat templates here", name, type_name(self));
}

// --- strings ---------------------------------------------------------------------------------------------------------

std::vector<Value> split_at_space(const Text& text, int64_t splits_max, Heap& heap) {
  std::vector<Value> pieces;
  const std::string& bytes = text.bytes();
  size_t at = 0;
  const auto skip = [&](bool space) {
    while (at < bytes.size()) {
      size_t next = at;
      if (is_space(next_code_point(bytes, next)) != space) break;
      at = next;
    }
  };
  for (skip(true); at < bytes.size(); skip(true)) {
    if (splits_max >= 0 && static_cast<int64_t>(pieces.size()) >= splits_max) {
      pieces.push_back(heap.string(strip(text.slice(at, bytes.size()), nullptr, Ends::right)));
      break;
    }
    const size_t begin = at;
    skip(false);
    pieces.push_back(heap.string(text.slice(begin, at)));
  }
  return pieces;
}

Value split(const Text& text, const Arguments& arguments, Heap& heap) {
  const Bound bound("split", arguments, {"sep", "maxsplit"});
  const Text* separator = bound.text(0);
  const int64_t splits_max = bound.integer(1, -1);
  if (!separator) return heap.list(split_at_space(text, splits_max, heap));
  if (separator->empty()) throw_error(ErrorCode::input, "split: the separator is empty");
  std::vector<Value> pieces;
  size_t at = 0;
  while (splits_max < 0 || static_cast<int64_t>(pieces.size()) < splits_max) {
    const size_t found = text.bytes().find(separator->bytes(), at);
    if (found == std::string::npos) break;
    pieces.push_back(heap.string(text.slice(at, found)));
    at = found + separator->size();
  }
  pieces.push_back(heap.string(text.slice(at, text.size())));
  return heap.list(std::move(pieces));
}

Value rsplit(const Text& text, const Arguments& arguments, Heap& heap) {
  const Bound bound("rsplit", arguments, {"sep", "maxsplit"});
  const Text* separator = bound.text(0);
  const int64_t splits_max = bound.integer(1, -1);
  if (!separator) {
    if (splits_max >= 0) throw_error(ErrorCode::input, "rsplit at white space with a maximum is not supported");
    return heap.list(split_at_space(text, -1, heap));
  }
  if (separator->empty()) throw_error(ErrorCode::input, "rsplit: the separator is empty");
  std::vector<Value> pieces;
  size_t end = text.size();
  while ((splits_max < 0 || static_cast<int64_t>(pieces.size()) < splits_max) && end >= separator->size()) {
    const size_t found = text.bytes().rfind(separator->bytes(), end - separator->size());
    if (found == std::string::npos) break;
    pieces.push_back(heap.string(text.slice(found + separator->size(), end)));
    end = found;
  }
  pieces.push_back(heap.string(text.slice(0, end)));
  std::reverse(pieces.begin(), pieces.end());
  return heap.list(std::move(pieces));
}

Value splitlines(const Text& text, const Arguments& arguments, Heap& heap) {
  const Bound bound("splitlines", arguments, {"keepends"});
  const bool keep_ends = bound.flag(0, false);
  std::vector<Value> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const char32_t c = next_code_point(text.bytes(), at);
    const bool newline =
        (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!newline) continue;
    if (c == '\r' && at < text.size() && text.bytes()[at] == '\n') ++at;
    lines.push_back(heap.string(text.slice(begin, keep_ends ? at : end)));
    begin = at;
  }
  if (begin < text.size()) lines.push_back(heap.string(text.slice(begin, text.size())));
  return heap.list(std::move(lines));
}

Value strip_method(const Text& text, std::string_view name, const Arguments& arguments, Heap& heap) {
  const Bound bound(name, arguments, {"chars"});
  const Text* characters = bound.text(0);
  const Ends ends = name == "strip" ? Ends::both : name == "lstrip" ? Ends::left : Ends::right;
  return heap.string(strip(text, characters ? &characters->bytes() : nullptr, ends));
}

const Text& required_text(const Bound& bound, size_t i) {
  bound.need(i);
  const Text* text = bound.text(i);
  if (!text) throw_error(ErrorCode::input, "a string method needs a string, found NoneType");
  return *text;
}

// Bytes [begin, end) that the optional start and end arguments (code points, as in slices) leave; begin > end when
// none.
Span window(const Text& text, const Bound& bound) {
  if (!bound[1] && !bound[2]) return {0, text.size()};
  const auto count = static_cast<int64_t>(code_points(text.bytes()));
  const auto clip = [&](int64_t at) { return at < 0 ? std::max<int64_t>(at + count, 0) : at; };
  const int64_t begin = clip(bound.integer(1, 0));
  const int64_t end = std::min(clip(bound.integer(2, count)), count);
  if (begin > end) return {1, 0};
  return {byte_of_code_point(text.bytes(), static_cast<size_t>(begin)),
          byte_of_code_point(text.bytes(), static_cast<size_t>(end))};
}

bool has_affix(std::string_view text, const Value& affix, bool at_start, std::string_view name) {
  if (affix.is(Kind::sequence) && affix.as_sequence().shape == Shape::tuple) {
    for (const Value& each : affix.as_sequence().items)
      if (has_affix(text, each, at_start, name)) return true;
    return false;
  }
  if (affix.is(Kind::undefined)) throw_undefined(affix);
  if (!affix.is(Kind::string))
    throw_error(ErrorCode::input, "{} needs a string or a tuple of strings, found {}", name, type_name(affix));
  const std::string& wanted = affix.as_text().bytes();
  return at_start ? text.starts_with(wanted) : text.ends_with(wanted);
}

Value find_method(const Text& text, std::string_view name, const Arguments& arguments) {
  const Bound bound(name, arguments, {"sub", "start", "end"});
  const Text& wanted = required_text(bound, 0);
  const Span span = window(text, bound);
  const bool from_right = name[0] == 'r';
  size_t found = std::string::npos;
  if (span.begin <= span.end) {
    const std::string_view view = std::string_view(text.bytes()).substr(span.begin, span.end - span.begin);
    found = from_right ? view.rfind(wanted.bytes()) : view.find(wanted.bytes());
  }
  if (found != std::string::npos)
    return Value::integer(
        static_cast<int64_t>(code_points(std::string_view(text.bytes()).substr(0, span.begin + found))));
  if (name.find("index") != std::string_view::npos) throw_error(ErrorCode::input, "{}: substring not found", name);
  return Value::integer(-1);
}

Value count_method(const Text& text, const Arguments& arguments) {
  const Bound bound("count", arguments, {"sub", "start", "end"});
  const Text& wanted = required_text(bound, 0);
  const Span span = window(text, bound);
  if (span.begin > span.end) return Value::integer(0);
  const std::string_view view = std::string_view(text.bytes()).substr(span.begin, span.end - span.begin);
  if (wanted.empty()) return Value::integer(static_cast<int64_t>(code_points(view)) + 1);
  int64_t count = 0;
  for (size_t at = view.find(wanted.bytes()); at != std::string_view::npos;
       at = view.find(wanted.bytes(), at + wanted.size()))
    ++count;
  return Value::integer(count);
}

Value join_method(const Text& separator, const Arguments& arguments, Heap& heap) {
  const Bound bound("join", arguments, {"iterable"});
  const std::vector<Value> items = iterate(bound.need(0), heap);
  for (const Value& item : items)
    if (!item.is(Kind::string)) throw_error(ErrorCode::input, "join needs strings, found {}", type_name(item));
  return heap.string(joined(items, separator, heap));
}

Value partition(const Text& text, std::string_view name, const Arguments& arguments, Heap& heap) {
  const Bound bound(name, arguments, {"sep"});
  const Text& separator = required_text(bound, 0);
  if (separator.empty()) throw_error(ErrorCode::input, "{}: the separator is empty", name);
  const bool from_right = name[0] == 'r';
  const size_t at = from_right ? text.bytes().rfind(separator.bytes()) : text.bytes().find(separator.bytes());
  const Value nothing = heap.string(Text());
  if (at == std::string::npos)
    return from_right ? heap.tuple({nothing, nothing, heap.string(text)})
                      : heap.tuple({heap.string(text), nothing, nothing});
  const size_t behind = at + separator.size();
  return heap.tuple({heap.string(text.slice(0, at)), heap.string(text.slice(at, behind)),
                     heap.string(text.slice(behind, text.size()))});
}

Value remove_affix(const Text& text, std::string_view name, const Arguments& arguments, Heap& heap) {
  const Bound bound(name, arguments, {"affix"});
  const Text& affix = required_text(bound, 0);
  if (name == "removeprefix")
    return heap.string(text.bytes().starts_with(affix.bytes()) ? text.slice(affix.size(), text.size()) : text);
  const bool ends = !affix.empty() && text.bytes().ends_with(affix.bytes());
  return heap.string(ends ? text.slice(0, text.size() - affix.size()) : text);
}

Value all_characters(const Text& text, std::string_view name, const Arguments& arguments) {
  const Bound bound(name, arguments, {});
  bool all = !text.empty();
  for (size_t at = 0; at < text.size() && all;) {
    const char32_t c = next_code_point(text.bytes(), at);
    all = name == "isspace" ? is_space(c) : c >= '0' && c <= '9';
  }
  return Value::boolean(all);
}

Value call_string_method(const Value& self, std::string_view name, const Arguments& arguments, Heap& heap) {
  const Text& text = self.as_text();
  if (name == "split") return split(text, arguments, heap);
  if (name == "strip" || name == "lstrip" || name == "rstrip") return strip_method(text, name, arguments, heap);
  if (name == "startswith" || name == "endswith") {
    const Bound bound(name, arguments, {"affix", "start", "end"});
    const Span span = window(text, bound);
    if (span.begin > span.end) return Value::boolean(false);
    return Value::boolean(has_affix(std::string_view(text.bytes()).substr(span.begin, span.end - span.begin),
                                    bound.need(0), name == "startswith", name));
  }
  if (name == "replace") {
    const Bound bound(name, arguments, {"old", "new", "count"});
    return heap.string(
        replace_all(text, required_text(bound, 0), required_text(bound, 1), bound.integer(2, -1), kOutputBytesMax));
  }
  if (name == "lower" || name == "upper" || name == "title" || name == "capitalize") {
    const Bound bound(name, arguments, {});
    return heap.string(change_case(text, name == "lower"   ? Case::lower
                                         : name == "upper" ? Case::upper
                                         : name == "title" ? Case::title
                                                           : Case::capitalize));
  }
  if (name == "join") return join_method(text, arguments, heap);
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex")
    return find_method(text, name, arguments);
  if (name == "count") return count_method(text, arguments);
  if (name == "splitlines") return splitlines(text, arguments, heap);
  if (name == "rsplit") return rsplit(text, arguments, heap);
  if (name == "partition" || name == "rpartition") return partition(text, name, arguments, heap);
  if (name == "removeprefix" || name == "removesuffix") return remove_affix(text, name, arguments, heap);
  if (name == "isspace" || name == "isdigit") return all_characters(text, name, arguments);
  refuse(self, name);
}

// --- mappings, lists, loops ------------------------------------------------------------------------------------------

Value call_mapping_method(const Value& self, std::string_view name, const Arguments& arguments, Heap& heap) {
  const Mapping& mapping = self.as_mapping();
  mapping.note_read();
  if (name == "get") {
    const Bound bound(name, arguments, {"key", "default"});
    if (const Value* found = mapping.find(bound.need(0), heap)) return *found;
    return bound[1] ? *bound[1] : Value::none();
  }
  const Bound bound(name, arguments, {});
  if (name == "items") return items_view(mapping, Shape::items, heap);
  if (name == "keys") return items_view(mapping, Shape::keys, heap);
  if (name == "values") return items_view(mapping, Shape::values, heap);
  if (name == "copy") {
    Mapping* made = heap.mapping();
    for (const Mapping::Entry& entry : mapping.entries()) made->set(entry.key, entry.value, heap);
    return Value::mapping(made);
  }
  refuse(self, name);
}

Value call_sequence_method(const Value& self, std::string_view name, const Arguments& arguments, Heap& heap) {
  Sequence& sequence = self.as_sequence();
  if (name == "append") {
    const Bound bound(name, arguments, {"object"});
    if (static_cast<int64_t>(sequence.items.size()) >= kSequenceItemsMax)
      throw_error(ErrorCode::input, "the template makes a list above {} items", kSequenceItemsMax);
    heap.charge(2 * sizeof(Value));
    sequence.items.push_back(bound.need(0));
    return Value::none();
  }
  if (name == "pop") {
    const Bound bound(name, arguments, {"index"});
    const auto length = static_cast<int64_t>(sequence.items.size());
    int64_t at = bound.integer(0, -1);
    if (at < 0) at += length;
    if (at < 0 || at >= length) throw_error(ErrorCode::input, "pop: the index is out of range");
    const Value gone = sequence.items[static_cast<size_t>(at)];
    sequence.items.erase(sequence.items.begin() + at);
    return gone;
  }
  if (name == "count" || name == "index") {
    const Bound bound(name, arguments, {"value"});
    const Value& wanted = bound.need(0);
    int64_t count = 0;
    for (size_t i = 0; i < sequence.items.size(); ++i) {
      if (!equal(sequence.items[i], wanted, heap)) continue;
      if (name == "index") return Value::integer(static_cast<int64_t>(i));
      ++count;
    }
    if (name == "index") throw_error(ErrorCode::input, "index: the value is not in the list");
    return Value::integer(count);
  }
  if (name == "copy") return heap.list(sequence.items);
  refuse(self, name);
}

Value call_loop_method(const Value& self, std::string_view name, const Arguments& arguments) {
  if (name != "cycle") refuse(self, name);
  if (arguments.positional.empty()) throw_error(ErrorCode::input, "loop.cycle needs an argument");
  return arguments.positional[static_cast<size_t>(self.as_loop().index0) % arguments.positional.size()];
}

}  // namespace

bool is_method(const Value& value, std::string_view name) {
  switch (value.kind()) {
    case Kind::string:
      return among(name, kStringMethods);
    case Kind::mapping:
      return among(name, kMappingMethods);
    case Kind::sequence:
      if (value.as_sequence().shape == Shape::list) return among(name, kListMethods);
      return value.as_sequence().indexable() && among(name, kTupleMethods);
    case Kind::loop:
      return among(name, kLoopMethods);
    case Kind::undefined:
    case Kind::none:
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
    case Kind::name_space:
    case Kind::callable:
      return false;
  }
  return false;
}

Value call_method(const Value& self, std::string_view name, const Arguments& arguments, Heap& heap) {
  OFL_ASSERT(is_method(self, name));
  if (self.is(Kind::string)) return call_string_method(self, name, arguments, heap);
  if (self.is(Kind::mapping)) return call_mapping_method(self, name, arguments, heap);
  if (self.is(Kind::sequence)) return call_sequence_method(self, name, arguments, heap);
  return call_loop_method(self, name, arguments);
}

}  // namespace offload::jinja
