// StreamDetokenizer, StopMatcher and the UTF-8 repair below them.
#include <doctest/doctest.h>

#include <random>

#include "core/base.h"
#include "core/detokenizer.h"
#include "core/json.h"
#include "core/stop_matcher.h"
#include "core/tokenizer.h"
#include "core/unicode.h"

namespace offload::text_stream_test {

namespace {

const std::string kData = OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/";

Json read_cases(const std::string& name) {
  return parse_json(read_text_file(kData + name, 1 << 24), name);
}

// Naive oracle of lossy decoding: tries every length at every place, and takes the longest prefix that some
// continuation makes valid as one U+FFFD.
std::string lossy(std::string_view bytes) {
  const auto completable = [](const std::string& prefix) {
    for (int missing = 1; missing <= 3; ++missing)
      for (const char second : {'\x80', '\x90', '\xA0', '\xBF', '\x8F', '\x9F'}) {
        std::string whole = prefix;
        for (int i = 0; i < missing; ++i) whole.push_back(whole.size() == 1 ? second : '\x80');
        if (Utf8Step step = utf8_step(whole);
            step.state == Utf8State::valid && step.length == static_cast<int>(whole.size()))
          return true;
      }
    return false;
  };
  std::string out;
  while (!bytes.empty()) {
    size_t length = 0;
    for (size_t n = 1; n <= 4 && n <= bytes.size(); ++n) {
      const Utf8Step step = utf8_step(bytes.substr(0, n));
      if (step.state == Utf8State::valid && step.length == static_cast<int>(n)) length = n;
      if (length) break;
    }
    if (length) {
      out += bytes.substr(0, length);
    } else {
      length = 1;
      while (length < 3 && length < bytes.size() && completable(std::string(bytes.substr(0, length + 1)))) ++length;
      out += kReplacementCharacter;
    }
    bytes.remove_prefix(length);
  }
  return out;
}

}  // namespace

TEST_CASE("utf8_step_agrees_with_the_encoder_on_every_code_point") {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, text);
    const Utf8Step step = utf8_step(text);
    const CodePoint first = first_code_point(text), last = last_code_point("a" + text);
    const bool right = step.state == Utf8State::valid && step.length == static_cast<int>(text.size()) &&
                       first.value == c && last.value == c && first.length == step.length;
    if (!right) FAIL("code point " << c);
  }
}

TEST_CASE("utf8_step_refuses_overlong_forms_surrogates_and_what_lies_past_the_end") {
  for (const char* bad : {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xED\xBF\xBF",
                          "\xF0\x80\x80\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\x80", "\xFF", "\xFE"}) {
    CHECK(utf8_step(bad).state == Utf8State::invalid);
    CHECK(utf8_step(bad).length == 1);
    CHECK_FALSE(is_valid_utf8(bad));
  }
}

TEST_CASE("repair_gives_one_replacement_per_maximal_invalid_subpart_however_it_is_cut") {
  std::mt19937 random(7);
  const std::string bytes = "a\x80\xBF\xC2\xE0\xA0\xED\x9F\xF0\x90\xF4\x8F\xFFz\xE6\x9C\xBA";
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (size_t i = random() % 12; i > 0; --i) text.push_back(bytes[random() % bytes.size()]);
    Utf8Stream stream;
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t count = 1 + random() % 4;
      stream.append(std::string_view(text).substr(at, count), out);
      REQUIRE(is_valid_utf8(out));
      at += count;
    }
    stream.finish(out);
    REQUIRE(out == lossy(text));
  }
}

TEST_CASE("detokenizer_emits_whole_characters_as_soon_as_they_are_certain") {
  const Tokenizer tiny = Tokenizer::load(kData + "tiny");
  for (const Json& item : read_cases("detok_streams.json")) {
    StreamDetokenizer stream(tiny);
    const auto ids = item["ids"].get<std::vector<int32_t>>();
    for (size_t i = 0; i < ids.size(); ++i) CHECK(stream.feed(ids[i]) == item["emit_after_each"][i].get<std::string>());
    CHECK(stream.finish() == item["emit_at_end"].get<std::string>());
    CHECK(tiny.decode(ids) == item["whole"].get<std::string>());
  }
}

TEST_CASE("detokenizer_refuses_an_unknown_id_and_goes_on") {
  const Tokenizer tiny = Tokenizer::load(kData + "tiny");
  StreamDetokenizer stream(tiny);
  CHECK(stream.feed(268).empty());
  CHECK_THROWS_AS(stream.feed(277), Error);
  CHECK(stream.feed(186) == "机");
}

TEST_CASE("stop_cases_end_where_they_must") {
  const Json cases = read_cases("stop_cases.json");
  for (const Json& item : cases["cases"]) {
    StopMatcher matcher(item["stop"].get<std::vector<std::string>>());
    const std::string text = item["text"];
    std::string shown;
    int used = 0;
    for (const Json& piece : item["pieces"]) {
      shown += matcher.feed(piece.get<std::string>());
      CHECK(text.compare(0, shown.size(), shown) == 0);
      ++used;
      if (matcher.stopped()) break;
    }
    shown += matcher.finish();
    CHECK(shown == text);
    CHECK(used == item["pieces_used"].get<int>());
  }
}

TEST_CASE("stop_matching_does_not_depend_on_how_the_text_is_cut") {
  // Oracle: the shortest prefix that ends with a stop string, and of those strings the longest.
  std::mt19937 random(11);
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (size_t i = random() % 16; i > 0; --i) text.push_back("ab"[random() % 2]);
    std::vector<std::string> stops(1 + random() % 3);
    for (std::string& stop : stops)
      for (size_t i = 1 + random() % 4; i > 0; --i) stop.push_back("abc"[random() % 3]);
    std::string expected = text;
    bool stops_at_all = false;
    for (size_t end = 1; end <= text.size() && !stops_at_all; ++end)
      for (const std::string& stop : stops)
        if (end >= stop.size() && text.compare(end - stop.size(), stop.size(), stop) == 0) {
          stops_at_all = true;
          if (end - stop.size() < expected.size()) expected = text.substr(0, end - stop.size());
        }
    StopMatcher matcher(stops);
    std::string shown;
    for (size_t at = 0; at < text.size() && !matcher.stopped();) {
      const size_t count = 1 + random() % 5;
      shown += matcher.feed(std::string_view(text).substr(at, count));
      REQUIRE(expected.compare(0, shown.size(), shown) == 0);
      at += count;
    }
    REQUIRE(matcher.stopped() == stops_at_all);
    shown += matcher.finish();
    REQUIRE(shown == expected);
  }
}

TEST_CASE("stop_matcher_holds_back_no_more_than_a_possible_start") {
  StopMatcher matcher({"###"});
  CHECK(matcher.feed("x##") == "x");
  CHECK(matcher.feed("y#") == "##y");
  CHECK(matcher.feed("").empty());
  CHECK(matcher.feed("##z").empty());
  CHECK(matcher.stopped());
  CHECK(matcher.feed("more").empty());
  CHECK(matcher.finish().empty());
  StopMatcher none({});
  CHECK(none.feed("all") == "all");
}

TEST_CASE("an_empty_stop_string_is_refused") {
  CHECK_THROWS_WITH_AS(StopMatcher({"a", ""}), doctest::Contains("empty"), Error);
}

}  // namespace offload::text_stream_test
