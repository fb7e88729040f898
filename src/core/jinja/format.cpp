#include "core/jinja/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace offload::jinja {

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer, static_cast<size_t>(end - buffer));
  const size_t e = scientific.find('e');
  const bool negative = scientific.front() == '-';
  std::string digits(1, scientific[negative]);
  if (e > size_t{2} + negative) digits.append(scientific, negative + 2, e - negative - 2);
  const int exponent = std::stoi(std::string(scientific.substr(e + 1)));
  std::string out = negative ? "-" : "";
  const auto count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {  // float.__repr__ switches here
    out += digits.substr(0, 1);
    if (count > 1) out += "." + digits.substr(1);
    out += fmt::format("e{}{:02d}", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    out += "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else if (count <= exponent + 1) {
    out += digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  } else {
    out += digits.substr(0, static_cast<size_t>(exponent) + 1) + "." + digits.substr(static_cast<size_t>(exponent) + 1);
  }
  return out;
}

namespace {

// Collects text under the heap's limit.
class Writer {
 public:
  explicit Writer(Heap& heap) : heap_(heap) {}

  void put(std::string_view bytes, Trust trust = Trust::trusted) {
    out_.append(bytes, trust);
    check();
  }
  void put(const Text& text) {
    out_.append(text);
    check();
  }
  void enter(int depth) {
    heap_.spend(1);
    if (depth > kValueDepthMax)
      throw_error(ErrorCode::input, "a printed value is nested deeper than {} levels", kValueDepthMax);
  }
  Heap& heap() { return heap_; }
  Text take() { return std::move(out_); }

 private:
  void check() {
    if (out_.size() > kOutputBytesMax)
      throw_error(ErrorCode::input, "the template makes a string above {} bytes", kOutputBytesMax);
  }

  Heap& heap_;
  Text out_;
};

void write_string_repr(const Text& text, Writer& out) {
  const std::string& bytes = text.bytes();
  const bool has_single = bytes.find('\'') != std::string::npos;
  const char quote = has_single && bytes.find('"') == std::string::npos ? '"' : '\'';
  out.put({&quote, 1});
  TrustCursor trust(text);
  for (size_t at = 0; at < bytes.size();) {
    const size_t begin = at;
    const Trust mark = trust.at(at);
    const char32_t c = next_code_point(bytes, at);
    if (c == '\\' || c == static_cast<char32_t>(quote))
      out.put(fmt::format("\\{}", static_cast<char>(c)), mark);
    else if (c == '\n' || c == '\r' || c == '\t')
      out.put(c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t", mark);
    else if (is_printable(c))
      out.put(std::string_view(bytes).substr(begin, at - begin), mark);
    else if (c < 0x100)
      out.put(fmt::format("\\x{:02x}", static_cast<unsigned>(c)), mark);
    else if (c < 0x10000)
      out.put(fmt::format("\\u{:04x}", static_cast<unsigned>(c)), mark);
    else
      out.put(fmt::format("\\U{:08x}", static_cast<unsigned>(c)), mark);
  }
  out.put({&quote, 1});
}

void write_repr(const Value& value, Writer& out, int depth);

void write_items(const std::vector<Value>& items, Writer& out, int depth) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.put(", ");
    write_repr(items[i], out, depth + 1);
  }
}

void write_sequence_repr(const Sequence& sequence, Writer& out, int depth) {
  switch (sequence.shape) {
    case Shape::list:
    case Shape::iterator:  // Python prints an address here
      out.put("[");
      write_items(sequence.items, out, depth);
      return out.put("]");
    case Shape::tuple:
      out.put("(");
      write_items(sequence.items, out, depth);
      return out.put(sequence.items.size() == 1 ? ",)" : ")");
    case Shape::range:
      if (sequence.range_step == 1)
        return out.put(fmt::format("range({}, {})", sequence.range_start, sequence.range_stop));
      return out.put(fmt::format("range({}, {}, {})", sequence.range_start, sequence.range_stop, sequence.range_step));
    case Shape::keys:
    case Shape::values:
    case Shape::items:
      out.put(fmt::format("{}([", type_name(Value::sequence(const_cast<Sequence*>(&sequence)))));
      write_items(sequence.items, out, depth);
      return out.put("])");
  }
}

void write_mapping_repr(const Mapping& mapping, Writer& out, int depth) {
  out.put("{");
  bool first = true;
  for (const Mapping::Entry& entry : mapping.entries()) {
    if (!first) out.put(", ");
    first = false;
    write_repr(entry.key, out, depth + 1);
    out.put(": ");
    write_repr(entry.value, out, depth + 1);
  }
  out.put("}");
}

void write_repr(const Value& value, Writer& out, int depth) {
  out.enter(depth);
  switch (value.kind()) {
    case Kind::undefined:
      return out.put("Undefined");
    case Kind::none:
      if (value.is_null_content()) out.heap().null_content_printed = true;
      return out.put("None");
    case Kind::boolean:
      return out.put(value.as_boolean() ? "True" : "False");
    case Kind::integer:
      return out.put(fmt::format("{}", value.as_integer()));
    case Kind::real:
      return out.put(real_text(value.as_real()));
    case Kind::string:
      return write_string_repr(value.as_text(), out);
    case Kind::sequence:
      return write_sequence_repr(value.as_sequence(), out, depth);
    case Kind::mapping:
      return write_mapping_repr(value.as_mapping(), out, depth);
    case Kind::name_space:
      out.put("<Namespace ");
      write_mapping_repr(value.as_mapping(), out, depth);
      return out.put(">");
    case Kind::callable:
      return out.put(fmt::format("<function {}>", value.as_callable().name));
    case Kind::loop:
      return out.put(fmt::format("<LoopContext {}/{}>", value.as_loop().index0 + 1, value.as_loop().items.size()));
  }
}

void write_json_string(const Text& text, const JsonStyle& style, Writer& out) {
  const std::string& bytes = text.bytes();
  out.put("\"");
  TrustCursor trust(text);
  for (size_t at = 0; at < bytes.size();) {
    const size_t begin = at;
    const Trust mark = trust.at(at);
    const char32_t c = next_code_point(bytes, at);
    const auto escape = [&](unsigned unit) { out.put(fmt::format("\\u{:04x}", unit), mark); };
    switch (c) {
      case '"':
        out.put("\\\"", mark);
        break;
      case '\\':
        out.put("\\\\", mark);
        break;
      case '\n':
        out.put("\\n", mark);
        break;
      case '\r':
        out.put("\\r", mark);
        break;
      case '\t':
        out.put("\\t", mark);
        break;
      case '\f':
        out.put("\\f", mark);
        break;
      case '\b':
        out.put("\\b", mark);
        break;
      default:
        if (c < 0x20 || (style.ascii_only && c >= 0x7F && c < 0x10000)) {
          escape(static_cast<unsigned>(c));
        } else if (style.ascii_only && c >= 0x10000) {
          escape(static_cast<unsigned>(0xD800 + ((c - 0x10000) >> 10)));
          escape(static_cast<unsigned>(0xDC00 + ((c - 0x10000) & 0x3FF)));
        } else {
          out.put(std::string_view(bytes).substr(begin, at - begin), mark);
        }
    }
  }
  out.put("\"");
}

std::string json_real(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return real_text(value);
}

// The key of an object: strings as they are, the other scalars as json.dumps spells them.
void write_json_key(const Value& key, const JsonStyle& style, Writer& out) {
  switch (key.kind()) {
    case Kind::string:
      return write_json_string(key.as_text(), style, out);
    case Kind::none:
      return out.put("\"null\"");
    case Kind::boolean:
      return out.put(key.as_boolean() ? "\"true\"" : "\"false\"");
    case Kind::integer:
      return out.put(fmt::format("\"{}\"", key.as_integer()));
    case Kind::real:
      return out.put("\"" + json_real(key.as_real()) + "\"");
    case Kind::undefined:
    case Kind::sequence:
    case Kind::mapping:
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      break;
  }
  throw_error(ErrorCode::input, "tojson: a key must be a string or a number, found {}", type_name(key));
}

void write_json(const Value& value, const JsonStyle& style, Writer& out, int depth);

void new_line(const JsonStyle& style, Writer& out, int depth) {
  if (!style.indent) return;
  out.put("\n");
  for (int i = 0; i < depth; ++i) out.put(*style.indent);
}

void write_json_array(const Sequence& sequence, const JsonStyle& style, Writer& out, int depth) {
  if (sequence.items.empty()) return out.put("[]");
  out.put("[");
  for (size_t i = 0; i < sequence.items.size(); ++i) {
    if (i > 0) out.put(style.item_separator);
    new_line(style, out, depth + 1);
    write_json(sequence.items[i], style, out, depth + 1);
  }
  new_line(style, out, depth);
  out.put("]");
}

void write_json_object(const Mapping& mapping, const JsonStyle& style, Writer& out, int depth) {
  mapping.note_read();
  if (mapping.entries().empty()) return out.put("{}");
  std::vector<Mapping::Entry> entries = mapping.entries();
  if (style.sort_keys)
    std::stable_sort(entries.begin(), entries.end(), [&](const Mapping::Entry& a, const Mapping::Entry& b) {
      return order(a.key, b.key, out.heap()) == -1;
    });
  out.put("{");
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0) out.put(style.item_separator);
    new_line(style, out, depth + 1);
    write_json_key(entries[i].key, style, out);
    out.put(style.key_separator);
    write_json(entries[i].value, style, out, depth + 1);
  }
  new_line(style, out, depth);
  out.put("}");
}

void write_json(const Value& value, const JsonStyle& style, Writer& out, int depth) {
  out.enter(depth);
  switch (value.kind()) {
    case Kind::none:
      return out.put("null");
    case Kind::boolean:
      return out.put(value.as_boolean() ? "true" : "false");
    case Kind::integer:
      return out.put(fmt::format("{}", value.as_integer()));
    case Kind::real:
      return out.put(json_real(value.as_real()));
    case Kind::string:
      return write_json_string(value.as_text(), style, out);
    case Kind::sequence:
      if (value.as_sequence().shape != Shape::list && value.as_sequence().shape != Shape::tuple) break;
      return write_json_array(value.as_sequence(), style, out, depth);
    case Kind::mapping:
      return write_json_object(value.as_mapping(), style, out, depth);
    case Kind::undefined:
      throw_undefined(value);
    case Kind::name_space:
    case Kind::callable:
    case Kind::loop:
      break;
  }
  throw_error(ErrorCode::input, "tojson: {} has no JSON form", type_name(value));
}

}  // namespace

Text to_repr(const Value& value, Heap& heap) {
  Writer out(heap);
  write_repr(value, out, 0);
  return out.take();
}

Text to_text(const Value& value, Heap& heap) {
  if (value.is(Kind::string)) return value.as_text();
  if (value.is(Kind::undefined)) return {};
  return to_repr(value, heap);
}

Text to_json(const Value& value, const JsonStyle& style, Heap& heap) {
  Writer out(heap);
  write_json(value, style, out, 0);
  return out.take();
}

}  // namespace offload::jinja
