// The filters of builtins.h, in the order of their table.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "core/jinja/builtins.h"
#include "core/jinja/format.h"

namespace offload::jinja {

Text joined(const std::vector<Value>& items, const Text& separator, Heap& heap) {
  Text out;
  for (size_t i = 0; i < items.size(); ++i) {
    heap.spend(1);
    if (i > 0) out.append(separator);
    out.append(to_text(items[i], heap));
    if (out.size() > kOutputBytesMax)
      throw_error(ErrorCode::input, "the template makes a string above {} bytes", kOutputBytesMax);
  }
  return out;
}

Value items_view(const Mapping& mapping, Shape shape, Heap& heap) {
  std::vector<Value> items;
  items.reserve(mapping.entries().size());
  for (const Mapping::Entry& entry : mapping.entries())
    items.push_back(shape == Shape::keys     ? entry.key
                    : shape == Shape::values ? entry.value
                                             : heap.tuple({entry.key, entry.value}));
  return Value::sequence(heap.sequence(shape, std::move(items)));
}

namespace {

Text text_argument(const Value& value, Heap& heap) { return to_text(value, heap); }

// "a.b.0" as the path of getitem that the attribute arguments of filters mean.
std::vector<Value> attribute_path(const Value& attribute, Heap& heap) {
  std::vector<Value> path;
  if (attribute.is(Kind::none)) return path;
  if (attribute.is(Kind::integer)) return {attribute};
  if (!attribute.is(Kind::string))
    throw_error(ErrorCode::input, "an attribute must be a string or an integer, found {}", type_name(attribute));
  const std::string& text = attribute.as_text().bytes();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('.', begin), text.size());
    int64_t index = 0;
    const auto result = std::from_chars(text.data() + begin, text.data() + end, index);
    if (end > begin && text[begin] != '-' && result.ec == std::errc() && result.ptr == text.data() + end)
      path.push_back(Value::integer(index));
    else
      path.push_back(heap.string(attribute.as_text().slice(begin, end)));
    begin = end + 1;
  }
  return path;
}

Value follow(Value item, const std::vector<Value>& path, Heap& heap, const Value* fallback = nullptr) {
  for (const Value& part : path) {
    item = get_item(item, part, heap);
    if (item.is(Kind::undefined) && fallback != nullptr && !fallback->is(Kind::none)) item = *fallback;
  }
  return item;
}

Value folded(const Value& value, bool case_sensitive, Heap& heap) {
  return case_sensitive || !value.is(Kind::string) ? value : heap.string(change_case(value.as_text(), Case::lower));
}

// --- text ------------------------------------------------------------------------------------------------------------

Value filter_tojson(const Value& input, const Arguments& arguments, Heap& heap) {
  constexpr int64_t kIndentMax = 64;
  const Bound bound("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  if (bound[1] && bound[1]->is(Kind::string)) {
    style.indent = bound[1]->as_text().bytes();
  } else if (bound[1] && !bound[1]->is(Kind::none)) {
    style.indent = std::string(static_cast<size_t>(std::clamp<int64_t>(bound.integer(1, 0), 0, kIndentMax)), ' ');
  }
  if (style.indent) style.item_separator.assign(1, ',');
  style.ascii_only = bound.flag(0, false);
  style.sort_keys = bound.flag(3, false);
  if (bound[2] && !bound[2]->is(Kind::none)) {
    const std::vector<Value> pair = iterate(*bound[2], heap);
    if (pair.size() != 2 || !pair[0].is(Kind::string) || !pair[1].is(Kind::string))
      throw_error(ErrorCode::input, "tojson needs two strings as 'separators'");
    style.item_separator = pair[0].as_text().bytes();
    style.key_separator = pair[1].as_text().bytes();
  }
  return heap.string(to_json(input, style, heap));
}

Value filter_from_json(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("from_json", arguments, {});
  if (!input.is(Kind::string)) throw_error(ErrorCode::input, "from_json needs a string, found {}", type_name(input));
  const Text& text = input.as_text();
  return heap.from_json(parse_ordered_json(text.bytes(), "from_json"),
                        text.untrusted().empty() ? Trust::trusted : Trust::untrusted);
}

Value filter_trim(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("trim", arguments, {"chars"});
  const Text* characters = bound.text(0);
  return heap.string(strip(to_text(input, heap), characters ? &characters->bytes() : nullptr, Ends::both));
}

Value filter_replace(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("replace", arguments, {"old", "new", "count"});
  return heap.string(replace_all(to_text(input, heap), text_argument(bound.need(0), heap),
                                 text_argument(bound.need(1), heap), bound.integer(2, -1), kOutputBytesMax));
}

// Words begin after white space and any of - ( { [ <, unlike in the method title.
Value filter_title(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("title", arguments, {});
  const Text text = to_text(input, heap);
  Text out;
  bool inside_word = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_code_point(text.bytes(), at);
    const bool separator = is_space(c) || (c < 0x80 && std::string_view("-({[<").find(static_cast<char>(c)) !=
                                                           std::string_view::npos);
    out.append(change_case(text.slice(begin, at), separator || inside_word ? Case::lower : Case::upper));
    inside_word = !separator;
  }
  return heap.string(std::move(out));
}

Value filter_case(std::string_view name, const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound(name, arguments, {});
  const Case to = name == "lower" ? Case::lower : name == "upper" ? Case::upper : Case::capitalize;
  return heap.string(change_case(to_text(input, heap), to));
}

Value filter_join(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("join", arguments, {"d", "attribute"});
  std::vector<Value> items = iterate(input, heap);
  if (bound[1] && !bound[1]->is(Kind::none)) {
    const std::vector<Value> path = attribute_path(*bound[1], heap);
    for (Value& item : items) item = follow(item, path, heap);
  }
  return heap.string(joined(items, bound[0] ? text_argument(*bound[0], heap) : Text(), heap));
}

// --- sequences -------------------------------------------------------------------------------------------------------

Value filter_items(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("items", arguments, {});
  if (input.is(Kind::undefined)) return heap.iterator({});
  if (!input.is(Kind::mapping)) throw_error(ErrorCode::input, "items needs a mapping, found {}", type_name(input));
  Value view = items_view(input.as_mapping(), Shape::items, heap);
  view.as_sequence().shape = Shape::iterator;
  return view;
}

Value filter_first(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("first", arguments, {});
  if (input.is(Kind::sequence) && input.as_sequence().shape == Shape::iterator) {
    std::vector<Value>& items = input.as_sequence().items;
    if (items.empty()) return {};
    const Value first = items.front();
    items.erase(items.begin());
    return first;
  }
  if (input.is(Kind::string)) return get_item(input, Value::integer(0), heap);
  const std::vector<Value> items = iterate(input, heap);
  return items.empty() ? Value() : items.front();
}

Value filter_last(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("last", arguments, {});
  if (input.is(Kind::undefined)) return {};
  if (input.is(Kind::sequence) && input.as_sequence().shape == Shape::iterator)
    throw_error(ErrorCode::input, "last needs a list; use | list first");
  if (input.is(Kind::string)) return get_item(input, Value::integer(-1), heap);
  const std::vector<Value> items = iterate(input, heap);
  return items.empty() ? Value() : items.back();
}

Value filter_reverse(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("reverse", arguments, {});
  if (input.is(Kind::string)) return heap.string(reversed(input.as_text()));
  const bool spent = input.is(Kind::sequence) && input.as_sequence().shape == Shape::iterator;
  std::vector<Value> items = iterate(input, heap);
  std::reverse(items.begin(), items.end());
  return spent ? heap.list(std::move(items)) : heap.iterator(std::move(items));
}

Value filter_map(const Value& input, const Arguments& arguments, Heap& heap) {
  std::vector<Value> items = truth(input) ? iterate(input, heap) : std::vector<Value>();
  if (arguments.positional.empty()) {
    const Bound bound("map", arguments, {"attribute", "default"});
    const std::vector<Value> path = attribute_path(bound.need(0), heap);
    for (Value& item : items) item = follow(item, path, heap, bound[1]);
    return heap.iterator(std::move(items));
  }
  const Value name = arguments.positional[0];
  if (!name.is(Kind::string)) throw_error(ErrorCode::input, "map needs the name of a filter, found {}", type_name(name));
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin());
  for (Value& item : items) {
    heap.spend(1);
    item = apply_filter(name.as_text().bytes(), item, rest, heap);
  }
  return heap.iterator(std::move(items));
}

// select, reject, selectattr, rejectattr.
Value filter_select(std::string_view name, const Value& input, const Arguments& arguments, Heap& heap) {
  const bool by_attribute = name.size() > 6;
  const bool keep = name[0] == 's';
  Arguments rest = arguments;
  std::vector<Value> path;
  const auto shift = [&] {
    const Value first = rest.positional.front();
    rest.positional.erase(rest.positional.begin());
    return first;
  };
  if (by_attribute) {
    if (rest.positional.empty()) throw_error(ErrorCode::input, "{} needs the name of an attribute", name);
    path = attribute_path(shift(), heap);
  }
  const Value test = rest.positional.empty() ? Value::none() : shift();
  if (!test.is(Kind::none) && !test.is(Kind::string))
    throw_error(ErrorCode::input, "{} needs the name of a test, found {}", name, type_name(test));
  std::vector<Value> kept;
  for (const Value& item : truth(input) ? iterate(input, heap) : std::vector<Value>()) {
    heap.spend(1);
    const Value subject = follow(item, path, heap);
    const bool holds = test.is(Kind::none) ? truth(subject) : apply_test(test.as_text().bytes(), subject, rest, heap);
    if (holds == keep) kept.push_back(item);
  }
  return heap.iterator(std::move(kept));
}

Value filter_unique(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("unique", arguments, {"case_sensitive", "attribute"});
  const std::vector<Value> path = bound[1] ? attribute_path(*bound[1], heap) : std::vector<Value>();
  Mapping* seen = heap.mapping();
  std::vector<Value> kept;
  for (const Value& item : iterate(input, heap)) {
    const Value key = folded(follow(item, path, heap), bound.flag(0, false), heap);
    if (seen->find(key, heap)) continue;
    seen->set(key, Value::none(), heap);
    kept.push_back(item);
  }
  return heap.iterator(std::move(kept));
}

struct Keyed {
  Value key;
  Value item;
};

Value sorted(std::vector<Keyed> keyed, bool descending, Heap& heap) {
  std::stable_sort(keyed.begin(), keyed.end(), [&](const Keyed& a, const Keyed& b) {
    return (descending ? order(b.key, a.key, heap) : order(a.key, b.key, heap)) == -1;
  });
  std::vector<Value> items;
  items.reserve(keyed.size());
  for (const Keyed& each : keyed) items.push_back(each.item);
  return heap.list(std::move(items));
}

Value filter_sort(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  const std::vector<Value> path = bound[2] ? attribute_path(*bound[2], heap) : std::vector<Value>();
  if (bound[2] && bound[2]->is(Kind::string) && bound[2]->as_text().bytes().find(',') != std::string::npos)
    throw_error(ErrorCode::input, "sort by several attributes is not supported");
  std::vector<Keyed> keyed;
  for (const Value& item : iterate(input, heap))
    keyed.push_back({folded(follow(item, path, heap), bound.flag(1, false), heap), item});
  return sorted(std::move(keyed), bound.flag(0, false), heap);
}

Value filter_dictsort(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const Text* by = bound.text(1);
  if (by && by->bytes() != "key" && by->bytes() != "value")
    throw_error(ErrorCode::input, "dictsort sorts by \"key\" or \"value\"");
  if (!input.is(Kind::mapping)) throw_error(ErrorCode::input, "dictsort needs a mapping, found {}", type_name(input));
  std::vector<Keyed> keyed;
  for (const Mapping::Entry& entry : input.as_mapping().entries())
    keyed.push_back({folded(by && by->bytes() == "value" ? entry.value : entry.key, bound.flag(0, false), heap),
                     heap.tuple({entry.key, entry.value})});
  return sorted(std::move(keyed), bound.flag(2, false), heap);
}

// --- numbers ---------------------------------------------------------------------------------------------------------

// What int() and float() read: no white space around, no underscores left.
std::string number_text(const Text& text) {
  std::string plain = strip(text, nullptr, Ends::both).bytes();
  for (size_t i = 1; i + 1 < plain.size(); ++i)
    if (plain[i] == '_' && plain[i - 1] != '_' && plain[i + 1] != '_') plain.erase(i--, 1);
  if (plain.size() > 1 && plain[0] == '+' && plain[1] != '-') plain.erase(0, 1);
  return plain;
}

bool parse_real(const Text& text, double& value) {
  const std::string plain = number_text(text);
  const bool hexadecimal = plain.find_first_of("xXpP") != std::string::npos;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (result.ec == std::errc::result_out_of_range && result.ptr == plain.data() + plain.size()) {
    const bool tiny = plain.find("e-") != std::string::npos || plain.find("E-") != std::string::npos;
    value = tiny ? 0.0 : plain[0] == '-' ? -HUGE_VAL : HUGE_VAL;
    return true;
  }
  return !hexadecimal && plain.find('(') == std::string::npos && result.ec == std::errc() &&
         result.ptr == plain.data() + plain.size();
}

Value truncated(double value) {
  if (std::isnan(value)) throw_error(ErrorCode::input, "int cannot convert NaN");
  if (value >= 9223372036854775808.0 || value < -9223372036854775808.0)
    throw_error(ErrorCode::input, "int: {} is beyond 64-bit signed", real_text(value));
  return Value::integer(static_cast<int64_t>(value));
}

Value filter_int(const Value& input, const Arguments& arguments, Heap&) {
  const Bound bound("int", arguments, {"default", "base"});
  const Value fallback = bound[0] ? *bound[0] : Value::integer(0);
  if (input.is(Kind::undefined)) throw_undefined(input);
  if (input.is_integral()) return Value::integer(input.as_integer());
  if (input.is(Kind::real)) return std::isnan(input.as_real()) ? fallback : truncated(input.as_real());
  if (!input.is(Kind::string)) return fallback;
  const int64_t base = bound.integer(1, 10);
  if (base < 2 || base > 36) throw_error(ErrorCode::input, "int: the base is 2 to 36, found {}", base);
  const std::string plain = number_text(input.as_text());
  int64_t value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value, static_cast<int>(base));
  if (result.ptr == plain.data() + plain.size() && !plain.empty()) {
    if (result.ec == std::errc()) return Value::integer(value);
    if (result.ec == std::errc::result_out_of_range)
      throw_error(ErrorCode::input, "int: {} is beyond 64-bit signed", printable(plain, 40));
  }
  double real = 0;
  return parse_real(input.as_text(), real) && !std::isnan(real) ? truncated(real) : fallback;
}

Value filter_float(const Value& input, const Arguments& arguments, Heap&) {
  const Bound bound("float", arguments, {"default"});
  if (input.is(Kind::undefined)) throw_undefined(input);
  if (input.is_number()) return Value::real(input.as_real());
  double value = 0;
  if (input.is(Kind::string) && parse_real(input.as_text(), value)) return Value::real(value);
  return bound[0] ? *bound[0] : Value::real(0);
}

Value filter_abs(const Value& input, const Arguments& arguments, Heap&) {
  const Bound bound("abs", arguments, {});
  if (input.is(Kind::real)) return Value::real(std::fabs(input.as_real()));
  if (!input.is_integral()) throw_error(ErrorCode::input, "abs needs a number, found {}", type_name(input));
  if (input.as_integer() == INT64_MIN) throw_error(ErrorCode::input, "abs: the result is beyond 64-bit signed");
  return Value::integer(std::abs(input.as_integer()));
}

Value filter_default(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("default", arguments, {"default_value", "boolean"});
  if (!input.is(Kind::undefined) && !(bound.flag(1, false) && !truth(input))) return input;
  return bound[0] ? *bound[0] : heap.string(Text());
}

Value filter_attr(const Value& input, const Arguments& arguments, Heap& heap) {
  const Bound bound("attr", arguments, {"name"});
  bound.need(0);
  const Text* name = bound.text(0);
  if (!name || !is_method(input, name->bytes())) return {};
  return get_attribute(input, *name, heap);
}

}  // namespace

Value apply_filter(std::string_view name, const Value& input, const Arguments& arguments, Heap& heap) {
  const auto alone = [&](auto&& make) {
    const Bound bound(name, arguments, {});
    return make();
  };
  if (name == "tojson") return filter_tojson(input, arguments, heap);
  if (name == "length" || name == "count") return alone([&] { return Value::integer(length(input)); });
  if (name == "trim") return filter_trim(input, arguments, heap);
  if (name == "string" || name == "safe") return alone([&] { return heap.string(to_text(input, heap)); });
  if (name == "items") return filter_items(input, arguments, heap);
  if (name == "default" || name == "d") return filter_default(input, arguments, heap);
  if (name == "join") return filter_join(input, arguments, heap);
  if (name == "lower" || name == "upper" || name == "capitalize") return filter_case(name, input, arguments, heap);
  if (name == "title") return filter_title(input, arguments, heap);
  if (name == "replace") return filter_replace(input, arguments, heap);
  if (name == "first") return filter_first(input, arguments, heap);
  if (name == "last") return filter_last(input, arguments, heap);
  if (name == "list") return alone([&] { return heap.list(iterate(input, heap)); });
  if (name == "map") return filter_map(input, arguments, heap);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return filter_select(name, input, arguments, heap);
  if (name == "unique") return filter_unique(input, arguments, heap);
  if (name == "reverse") return filter_reverse(input, arguments, heap);
  if (name == "int") return filter_int(input, arguments, heap);
  if (name == "float") return filter_float(input, arguments, heap);
  if (name == "abs") return filter_abs(input, arguments, heap);
  if (name == "sort") return filter_sort(input, arguments, heap);
  if (name == "dictsort") return filter_dictsort(input, arguments, heap);
  if (name == "from_json") return filter_from_json(input, arguments, heap);
  if (name == "attr") return filter_attr(input, arguments, heap);
  throw_error(ErrorCode::input, "there is no filter named '{}'", printable(name, 60));
}

}  // namespace offload::jinja
