#include "core/base.h"

#include <doctest/doctest.h>

#include "core/json.h"

namespace offload::base_test {

TEST_CASE("printable_escapes_controls_and_invalid_utf8_and_keeps_the_rest") {
  CHECK(printable("a\x1b[1m\xff模") == "a\\x1b[1m\\xff模");
  CHECK(printable(std::string(300, 'x'), 4) == "xxxx...");
}

TEST_CASE("errors_carry_their_exit_code_and_context") {
  CHECK(exit_code(ErrorCode::usage) == 2);
  CHECK(exit_code(ErrorCode::input) == 1);
  CHECK(exit_code(ErrorCode::interrupted) == 130);
  CHECK(Error(ErrorCode::input, "short").with_context("a.bin").message() == "a.bin: short");
}

TEST_CASE("json_refuses_repeated_keys_deep_nesting_and_wrong_types_by_name") {
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  };
  CHECK(parse_json(R"({"a":[1,2.5,"x"]})", "f")["a"][1] == 2.5);
  CHECK(message([] { parse_json(R"({"a":1,"a":2})", "f"); }) == "f: duplicate JSON key \"a\"");
  CHECK(message([] { parse_json(std::string(100000, '['), "f"); }).find("nested deeper") != std::string::npos);
  CHECK(message([] { parse_json("{\"a\":", "f"); }).find("f: invalid JSON near byte") == 0);
  CHECK(message([] { parse_json("{\"a\":\"\xff\"}", "f"); }).find("invalid JSON") != std::string::npos);
  CHECK(message([] { parse_json(std::string_view("{}\0x", 4), "f"); }).find("NUL") != std::string::npos);
  CHECK(message([] { read_text_file("/dev/null", 10); }) == "/dev/null: not a regular file");
  const Json json = parse_json(R"({"n":3,"s":"t","z":null})", "f");
  CHECK(json_get<int64_t>(json, "n", 0, "f") == 3);
  CHECK(json_get<int64_t>(json, "z", 7, "f") == 7);
  CHECK(message([&] { json_get<int64_t>(json, "s", 0, "config.json"); }) ==
        "config.json: s must be an integer, found \"t\"");
}

}  // namespace offload::base_test
