// The template language, against texts made by the reference engine
// (tests/data/chat_template/make_chat_template_data.py).
#include <doctest/doctest.h>

#include <ctime>
#include <functional>
#include <string>

#include "core/jinja/format.h"
#include "core/jinja/interpreter.h"
#include "core/jinja/parser.h"
#include "core/json.h"

namespace offload::jinja_test {

namespace {

std::tm fixed_time() {
  std::tm time{};
  time.tm_year = 125;
  time.tm_mon = 0;
  time.tm_mday = 2;
  time.tm_hour = 3;
  time.tm_min = 4;
  time.tm_sec = 5;
  return time;
}

jinja::Text render_text(const std::string& source, const OrderedJson& context = OrderedJson::object(),
                        jinja::Trust trust = jinja::Trust::untrusted) {
  const jinja::Program program = jinja::parse_template(source, "t.jinja");
  jinja::Heap heap;
  jinja::Variables variables;
  for (const auto& [name, value] : context.items()) variables.emplace_back(name, heap.from_json(value, trust));
  return jinja::render(program, variables, heap, fixed_time);
}

std::string render(const std::string& source, const OrderedJson& context = OrderedJson::object()) {
  return render_text(source, context).bytes();
}

// The text with what the request wrote in «».
std::string marked(const std::string& source, const OrderedJson& context) {
  const jinja::Text text = render_text(source, context);
  std::string out;
  size_t at = 0;
  for (const jinja::Span& span : text.untrusted()) {
    out +=
        text.bytes().substr(at, span.begin - at) + "«" + text.bytes().substr(span.begin, span.end - span.begin) + "»";
    at = span.end;
  }
  return out + text.bytes().substr(at);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.message().find('\n') == std::string::npos);
    return error.message();
  }
  return "no error";
}

std::string error_of(const std::string& source, const OrderedJson& context = OrderedJson::object()) {
  return message_of([&] { render(source, context); });
}

std::string repeat(const std::string& piece, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += piece;
  return out;
}

}  // namespace

TEST_CASE("every_vector_renders_as_the_reference_engine_does") {
  const std::string path = OFFLOAD_SOURCE_DIR "/tests/data/chat_template/vectors.json";
  const OrderedJson rows = parse_ordered_json(read_text_file(path, 1 << 20), path);
  CHECK(rows.size() >= 60);
  for (const OrderedJson& row : rows) {
    const auto source = row["template"].get<std::string>();
    CAPTURE(source);
    if (row.contains("error"))
      CHECK(error_of(source, row["context"]).find("t.jinja") != std::string::npos);
    else
      CHECK(render(source, row["context"]) == row["expected"].get<std::string>());
  }
}

TEST_CASE("floats_print_as_python_prints_them") {
  CHECK(jinja::real_text(1) == "1.0");
  CHECK(jinja::real_text(-0.0) == "-0.0");
  CHECK(jinja::real_text(1e16) == "1e+16");
  CHECK(jinja::real_text(9999999999999998.0) == "9999999999999998.0");
  CHECK(jinja::real_text(1.5e300) == "1.5e+300");
  CHECK(jinja::real_text(0.0001) == "0.0001");
  CHECK(jinja::real_text(0.00001234) == "1.234e-05");
  CHECK(jinja::real_text(5e-324) == "5e-324");
  CHECK(jinja::real_text(123.456) == "123.456");
}

TEST_CASE("text_of_the_request_keeps_its_mark_through_string_operations") {
  const OrderedJson context = {{"m", "  ab<|x|>c "}, {"d", {{"k", "v\"w"}}}};
  CHECK(marked("a{{ m }}b", context) == "a«  ab<|x|>c »b");
  CHECK(marked("{{ '<' + m + '>' }}{{ '[' ~ m ~ 1 ~ ']' }}", context) == "<«  ab<|x|>c »>[«  ab<|x|>c »1]");
  CHECK(marked("{{ ('p' ~ m)|trim }}|{{ ('p' ~ m).strip()[1:4] }}", context) == "p«  ab<|x|>c»|«  a»");
  CHECK(marked("{{ m.split('<|x|>')|join('<|x|>') }}", context) == "«  ab»<|x|>«c »");
  CHECK(marked("{{ m.replace('<|x|>', '-') }}{{ ('x' ~ m).upper() }}", context) == "«  ab»-«c »X«  AB<|X|>C »");
  CHECK(marked("{{ ('p' ~ m)[::-1] }}", context) == "« c>|x|<ba  »p");
  CHECK(marked("{{ d|tojson }}{{ d }}", context) == "{\"«k»\": \"«v\\\"w»\"}{'«k»': '«v\"w»'}");
  CHECK(marked("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m) }}", context) == "<«  ab<|x|>c »>");
  CHECK(marked("{% set q %}<{{ m }}>{% endset %}{{ q|length }}{{ q }}", context) == "13<«  ab<|x|>c »>");
  CHECK(marked("{% for c in 'a' ~ m[2:4] %}{{ c }},{% endfor %}{{ m|first }}", context) == "a,«a»,«b»,« »");
  CHECK(marked("{{ m is string }}{{ m|length }}{{ 'lit' }}", context) == "True11lit");
}

TEST_CASE("integers_beyond_64_bits_are_errors_never_wrapped") {
  for (const char* source : {"{{ 9223372036854775807 + 1 }}", "{{ 2 ** 63 }}", "{{ 3037000500 * 3037000500 }}",
                             "{{ -(-9223372036854775807 - 1) }}", "{{ 9223372036854775808 }}", "{{ 1e300|int }}",
                             "{{ '99999999999999999999'|int }}", "{{ (-9223372036854775807 - 1) // -1 }}"})
    CHECK(error_of(source).find("64-bit") != std::string::npos);
  CHECK(render("{{ 2 ** 62 }} {{ (-9223372036854775807 - 1) % -1 }}") == "4611686018427387904 0");
}

TEST_CASE("what_is_refused_is_named_with_its_line") {
  for (const char* tag : {"call", "include", "import", "from", "extends", "block", "filter", "autoescape", "do"})
    CHECK(error_of(fmt::format("\n\n{{% {} x %}}", tag)) ==
          fmt::format("t.jinja: line 3: the tag '{}' is not supported in chat templates here", tag));
  CHECK(error_of("{% for i in x recursive %}{% endfor %}") == "t.jinja: line 1: recursive loops are not supported");
  CHECK(error_of("a\n{% frob %}") == "t.jinja: line 2: unknown tag 'frob'");
  CHECK(error_of("a\n{{ 1\n| frob }}") == "t.jinja: line 3: there is no filter named 'frob'");
  CHECK(error_of("{{ 1 is frob }}") == "t.jinja: line 1: there is no test named 'frob'");
  CHECK(error_of("{{ 'a'.zfill(3) }}") ==
        "t.jinja: line 1: the method zfill of str is not supported in chat templates here");
  CHECK(error_of("{{ '%s' % 1 }}").find("formatting a string with %") != std::string::npos);
  CHECK(render("{% if false %}{{ 1|frob }}{{ 'a'.zfill(3) }}{% endif %}ok") == "ok");
  CHECK(render("{% generation %}a{% endgeneration %}") == "a");
}

TEST_CASE("syntax_errors_say_what_was_expected_and_where") {
  CHECK(error_of("a\n{{ 1 +") == "t.jinja: line 2: the tag {{ is not closed");
  CHECK(error_of("{{ (1 }}") == "t.jinja: line 1: unexpected '}', expected ')'");
  CHECK(error_of("\n{# x") == "t.jinja: line 2: a comment {# is not closed");
  CHECK(error_of("{{ 'x }}") == "t.jinja: line 1: a string is not closed");
  CHECK(error_of("{{ 'x\\") == "t.jinja: line 1: a string is not closed");
  CHECK(error_of("{% if 1 %}\nx") == "t.jinja: line 1: the block that starts here has no {% endif %}");
  CHECK(error_of("{% raw %}x").find("{% endraw %}") != std::string::npos);
  CHECK(error_of("{% endif %}").find("unknown tag 'endif'") != std::string::npos);
  CHECK(error_of("{% break %}").find("outside a loop") != std::string::npos);
  CHECK(error_of("{{ }}").find("expected an expression, found '}}'") != std::string::npos);
  CHECK(error_of("{{ 1 2 }}").find("expected '}}', found a number") != std::string::npos);
  CHECK(error_of("{{ 'a\\ud800' }}").find("no Unicode character") != std::string::npos);
  CHECK(error_of("{{ a ? b }}").find("unexpected character '?'") != std::string::npos);
  CHECK(error_of("\xff").find("not valid UTF-8 at byte 0") != std::string::npos);
  for (const char* source :
       {"{", "{{", "{%", "{#", "{{-", "{%-", "{{ '\\x", "{{ '\\", "{%raw", "{% raw %}{% endraw", "{{ 0x }}"})
    CHECK_MESSAGE(error_of(source) != "", source);
}

TEST_CASE("hostile_templates_end_in_errors_not_in_crashes") {
  CHECK(error_of("{{ " + repeat("(", 100000) + repeat(")", 100000) + " }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ " + repeat("[", 100000)).find("is not closed") != std::string::npos);
  CHECK(error_of("{{ " + repeat("not ", 100000) + "1 }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ " + repeat("-", 100000) + "1 }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ x" + repeat(".a", 100000) + " }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ 1" + repeat("|abs", 100000) + " }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ 1" + repeat("+1", 100000) + " }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{{ 1" + repeat(" if 1 else 1", 50000) + " }}").find("nested deeper") != std::string::npos);
  CHECK(error_of(repeat("{% if 1 %}", 50000)).find("nested deeper") != std::string::npos);
  CHECK(error_of("{% for " + repeat("(", 50000) + "a" + repeat(")", 50000) + " in x %}{% endfor %}")
            .find("nested deeper") != std::string::npos);
  CHECK(render("{% if 0 %}a" + repeat("{% elif 0 %}b", 5000) + "{% endif %}") == "");
  CHECK(error_of(std::string(2 << 20, 'x')).find("larger than") != std::string::npos);
  CHECK(error_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").find("recurses deeper") != std::string::npos);
}

TEST_CASE("work_memory_and_output_are_bounded") {
  const std::string loop = "{% for a in range(99999) %}";
  CHECK(error_of(loop + loop + loop + "{% endfor %}{% endfor %}{% endfor %}").find("the template needs more than") !=
        std::string::npos);
  CHECK(error_of("{{ 'x' * 9000000000 }}").find("string above") != std::string::npos);
  CHECK(error_of("{{ [1] * 9000000000 }}").find("list above") != std::string::npos);
  CHECK(error_of("{{ range(9000000000) }}").find("range gives more") != std::string::npos);
  CHECK(
      error_of("{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}")
          .find("t.jinja: line 1: the template makes a string above") == 0);
  CHECK(
      error_of("{% set a = 'x' * 60000000 %}{% for i in range(9) %}{{ a }}{% endfor %}").find("the prompt is longer") !=
      std::string::npos);
  CHECK(error_of("{% set a = 'a' * 60000000 %}{{ a.replace('', a) }}").find("replace makes") != std::string::npos);
  CHECK(error_of("{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = ns.a + [i] %}{% endfor %}") !=
        "no error");
  // Shared and cyclic values: exponential to print or compare, and endless.
  const std::string bomb =
      "{% set ns = namespace(a=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}";
  CHECK(error_of(bomb + "{{ ns.a }}") != "no error");
  CHECK(error_of(bomb + "{% set m = namespace(a=[]) %}{% for i in range(60) %}{% set m.a = [m.a, m.a] %}{% endfor %}{{ "
                        "ns.a == m.a }}") != "no error");
  CHECK(error_of("{% set a = [] %}{{ a.append(a) }}{{ a }}").find("nested deeper") != std::string::npos);
  CHECK(error_of("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}").find("nested deeper") != std::string::npos);
  CHECK(render("{% set ns = namespace() %}{% for i in [1, 2] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.index }}") ==
        "2");
}

TEST_CASE("strftime_now_uses_the_clock_it_is_given_and_survives_any_format") {
  CHECK(render("{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%d %b %Y') }}|{{ strftime_now('') }}") ==
        "2025-01-02|02 Jan 2025|");
  CHECK(error_of("{{ strftime_now('x' * 300) }}").find("at most 256 bytes") != std::string::npos);
  CHECK(error_of("{{ strftime_now() }}").find("needs its argument") != std::string::npos);
}

TEST_CASE("a_template_that_refuses_carries_its_own_sentence") {
  CHECK(error_of("\n{{ raise_exception('no ' ~ 1) }}") == "no 1 (t.jinja, line 2)");
  CHECK(error_of("{{ raise_exception('a\nb') }}") == "a\\x0ab (t.jinja, line 1)");
  CHECK(error_of("\n{{ x.y.z }}", {{"x", OrderedJson::object()}}) == "t.jinja: line 2: y is undefined");
  CHECK(error_of("{{ nope() }}") == "t.jinja: line 1: 'nope' is undefined");
}

TEST_CASE("mappings_with_many_keys_keep_order_and_find_all") {
  OrderedJson object = OrderedJson::object();
  for (int i = 0; i < 300; ++i) object[fmt::format("k{}", i)] = i;
  CHECK(render("{{ x.k299 }}{{ x['k17'] }}{{ x.nope is defined }}{{ x|length }}{{ x|first }}{{ x|list|last }}",
               {{"x", object}}) == "29917False300k0k299");
}

}  // namespace offload::jinja_test
