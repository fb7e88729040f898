// What tokenizer.json and tokenizer_config.json may hold: added tokens, SentencePiece-style parts, post-processors, and
// everything that must be refused.
#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <thread>

#include "core/base.h"
#include "core/detokenizer.h"
#include "core/json.h"
#include "core/tokenizer.h"
#include "core/unicode.h"

namespace offload::tokenizer_format_test {
using Ids = std::vector<int32_t>;

namespace {

const std::string kData = OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/";
constexpr DecodeOptions kAll{false};

Json tiny_json() {
  const std::string path = kData + "tiny/tokenizer.json";
  return parse_json(read_text_file(path, 1 << 24), path);
}

Tokenizer parse(const Json& json, std::string_view config = "") {
  return Tokenizer::parse(json.dump(), config, "tokenizer.json");
}

// The tiny tokenizer with these added tokens instead of its own; ids count up from 272.
Tokenizer with_added(const std::vector<Json>& tokens) {
  Json json = tiny_json();
  json["added_tokens"] = Json::array();
  for (size_t i = 0; i < tokens.size(); ++i) {
    json["added_tokens"].push_back(tokens[i]);
    json["added_tokens"].back()["id"] = 272 + i;
  }
  return parse(json);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.message().find("tokenizer.json") != std::string::npos);
    CHECK(error.message().find('\n') == std::string::npos);
    return error.message();
  }
  return "no error";
}

// A file like Mixtral's and Llama-2's: "▁" for spaces, byte fallback, `<s>` first. Words are spelt by merges from left
// to right; the intermediate tokens have ids from 30000 on.
Json sentence_piece_json(const std::vector<std::pair<std::string, int>>& words) {
  Json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  Json merges = Json::array();
  int next = 30000;
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = 3 + byte;
  for (const auto& [word, id] : words) {
    vocab[word] = id;
  }
  for (const auto& [word, id] : words) {
    std::string prefix;
    for (std::string_view rest = word; !rest.empty();) {
      const auto length = static_cast<size_t>(first_code_point(rest).length);
      const std::string symbol(rest.substr(0, length));
      rest.remove_prefix(length);
      if (!vocab.contains(symbol)) vocab[symbol] = next++;
      if (!prefix.empty()) merges.push_back({prefix, symbol});
      prefix += symbol;
      if (!vocab.contains(prefix)) vocab[prefix] = next++;
    }
  }
  const auto added = [](const char* content, int id) -> Json {
    return {{"id", id}, {"content", content}, {"normalized", false}, {"special", true}};
  };
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
  const Json undo = {{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  return {{"added_tokens", {added("<unk>", 0), added("<s>", 1), added("</s>", 2)}},
          {"normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Prepend"}, {"prepend", "▁"}}, replace}}}},
          {"pre_tokenizer", nullptr},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
            {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}}}}}}},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {undo,
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"vocab", vocab},
            {"merges", merges}}}};
}

Json llama2_like() {
  return sentence_piece_json({{"▁This", 910},
                              {"▁is", 338},
                              {"▁", 29871},
                              {".", 29889},
                              {"cpp", 8223},
                              {"▁The", 450},
                              {"▁train", 7945},
                              {"▁moving", 8401},
                              {"▁very", 1407},
                              {"▁fast", 5172},
                              {"!", 29991}});
}

}  // namespace

TEST_CASE("the_longest_added_token_wins_at_the_earliest_start") {
  const Tokenizer tokenizer = with_added({{{"content", "<a>"}}, {{"content", "<a>b"}}});
  CHECK(tokenizer.encode("<a>bc") == Ids{273, 'c'});
  CHECK(tokenizer.encode("<a>c") == Ids{272, 'c'});
  CHECK(tokenizer.encode("<<a>") == Ids{'<', 272});
  CHECK(tokenizer.encode("<a") == Ids{'<', 'a'});
}

TEST_CASE("raw_added_tokens_match_before_normalization_and_normalized_ones_after") {
  const std::string decomposed = "<e\u0301>", composed = "<\u00E9>";
  const Tokenizer raw = with_added({{{"content", decomposed}, {"normalized", false}}});
  CHECK(raw.encode("x" + decomposed) == Ids{'x', 272});
  CHECK(raw.encode(composed) == Ids{'<', 0xC3, 0xA9, '>'});
  const Tokenizer normalized = with_added({{{"content", decomposed}, {"normalized", true}}});
  CHECK(normalized.encode(decomposed) == Ids{272});
  CHECK(normalized.encode(composed) == Ids{272});
  CHECK(normalized.encode(composed, {false, false}) == Ids{'<', 0xC3, 0xA9, '>'});
}

TEST_CASE("added_tokens_can_take_white_space_and_demand_to_stand_alone") {
  const Tokenizer left = with_added({{{"content", "<m>"}, {"lstrip", true}}});
  CHECK(left.encode("a \u3000<m> b") == Ids{'a', 272, ' ', 'b'});
  CHECK(left.encode("<m> <m>") == Ids{272, 272});
  const Tokenizer right = with_added({{{"content", "<m>"}, {"rstrip", true}}});
  CHECK(right.encode("a <m> \n b<m>") == Ids{'a', ' ', 272, 'b', 272});
  const Tokenizer alone = with_added({{{"content", "ab"}, {"single_word", true}}});
  CHECK(alone.encode("ab cab") == Ids{272, ' ', 'c', 'a', 'b'});
  CHECK(alone.encode("(ab)") == Ids{'(', 272, ')'});
  CHECK(alone.encode("éab") == Ids{0xC3, 0xA9, 'a', 'b'});
  CHECK(alone.encode("ab_") == Ids{'a', 'b', '_'});
}

TEST_CASE("an_added_token_of_the_vocabulary_keeps_its_id") {
  Json json = tiny_json();
  json["added_tokens"] = {{{"id", 999}, {"content", "hello"}, {"special", true}}};
  const Tokenizer tokenizer = parse(json);
  CHECK(tokenizer.encode("xhello") == Ids{'x', 259});
  CHECK(tokenizer.is_special(259));
  CHECK(tokenizer.vocab_size() == 272);
}

TEST_CASE("skip_special_leaves_out_special_tokens_only") {
  const Tokenizer tiny = Tokenizer::load(kData + "tiny");
  const Ids ids = tiny.encode("<|im_start|><think>hello</think><|im_end|>");
  CHECK(tiny.decode(ids) == "<think>hello</think>");
  CHECK(tiny.decode(ids, kAll) == "<|im_start|><think>hello</think><|im_end|>");
}

TEST_CASE("tokenizer_config_adds_what_tokenizer_json_lacks") {
  const std::string config = R"({"added_tokens_decoder": {
    "274": {"content": "<other>", "special": false}, "280": {"content": "<new>", "special": true, "normalized": false}},
    "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": null,
    "add_bos_token": true, "add_eos_token": true})";
  const Tokenizer tokenizer = parse(tiny_json(), config);
  CHECK(tokenizer.vocab_size() == 281);
  CHECK(tokenizer.encode("<new>a") == Ids{280, 'a'});
  CHECK(tokenizer.token_text(274) == "<|im_end|>");
  CHECK_FALSE(tokenizer.token_to_id("<other>"));
  CHECK(tokenizer.named_tokens().at("bos_token") == "<|im_start|>");
  CHECK(tokenizer.named_tokens().count("pad_token") == 0);
  CHECK(tokenizer.encode("a", {true, true}) == Ids{273, 'a', 274});
  CHECK(tokenizer.encode("", {true, true}) == Ids{273, 274});
  CHECK(tokenizer.encode("").empty());
  CHECK(refusal([] { parse(tiny_json(), R"({"add_bos_token": true})"); }).find("bos_token is no token") !=
        std::string::npos);
  CHECK(refusal([] { parse(tiny_json(), R"({"added_tokens_decoder": {"x": {}}})"); }).find("expected an id") !=
        std::string::npos);
}

TEST_CASE("holes_and_ids_outside_the_vocabulary_are_errors") {
  Json json = tiny_json();
  json["added_tokens"].push_back({{"id", 290}, {"content", "<far>"}});
  const Tokenizer tokenizer = parse(json);
  CHECK(tokenizer.vocab_size() == 291);
  CHECK(tokenizer.decode(Ids{290}) == "<far>");
  for (const int32_t id : {280, 291, -1, INT32_MAX, INT32_MIN}) {
    CHECK_FALSE(tokenizer.is_token(id));
    CHECK_FALSE(tokenizer.is_special(id));
    CHECK_THROWS_WITH_AS(tokenizer.decode(Ids{id}), doctest::Contains(fmt::format("token id {} is not", id).c_str()),
                         Error);
    CHECK_THROWS_AS(tokenizer.token_text(id), Error);
  }
}

TEST_CASE("text_that_is_no_utf8_is_repaired_first") {
  const Tokenizer tiny = Tokenizer::load(kData + "tiny");
  CHECK(tiny.encode("a\xFF\xF0\x9F"
                    "b") == tiny.encode("a\uFFFD\uFFFDb"));
  CHECK(tiny.encode("\xE6\x9C") == tiny.encode("\uFFFD"));
}

TEST_CASE("sentence_piece_style_files_give_the_reported_ids") {
  const Tokenizer tokenizer = parse(llama2_like());
  int rows = 0;
  const std::string path = kData + "known_ids.json";
  for (const Json& item : parse_json(read_text_file(path, 1 << 20), path)) {
    if (item["tokenizer"].get<std::string>().find("Llama-2") != 0) continue;
    const Ids ids = item["ids"];
    CHECK(tokenizer.encode(item["text"].get<std::string>(), {true, true}) == ids);
    CHECK(tokenizer.decode(ids) == item["text"].get<std::string>());
    ++rows;
  }
  CHECK(rows == 2);
  CHECK(tokenizer.encode("") == Ids{});
  CHECK(tokenizer.encode("</s>This") == Ids{2, 910});
}

TEST_CASE("byte_tokens_decode_as_a_run_and_only_the_first_space_goes") {
  const Tokenizer tokenizer = parse(llama2_like());
  const auto byte = [](int value) { return 3 + value; };
  CHECK(tokenizer.decode(Ids{338, 338}) == "is is");
  CHECK(tokenizer.decode(Ids{byte(0xE6), byte(0x9C), byte(0xBA)}) == "机");
  CHECK(tokenizer.decode(Ids{byte(0xE6), byte(0x9C), byte(0xBA), byte(0xFF)}) == "\uFFFD\uFFFD\uFFFD\uFFFD");
  CHECK(tokenizer.decode(Ids{byte(0xE6), 338, byte(0x41)}) == "\uFFFD isA");
  CHECK(tokenizer.decode(Ids{1, 29871, 29871}) == " ");
  CHECK(tokenizer.decode(Ids{1, 338}, kAll) == "<s> is");
}

TEST_CASE("unknown_characters_fall_back_to_bytes_then_to_the_unknown_token_then_to_nothing") {
  Json json = llama2_like();
  json["model"]["byte_fallback"] = false;
  CHECK(parse(json).encode("好好is") ==
        Ids{29871, 0, parse(json).token_to_id("i").value(), parse(json).token_to_id("s").value()});
  json["model"]["fuse_unk"] = false;
  CHECK(parse(json).encode("好好") == Ids{29871, 0, 0});
  json["model"]["unk_token"] = nullptr;
  CHECK(parse(json).encode("好好") == Ids{29871});
}

TEST_CASE("streamed_text_equals_decoded_text_for_random_ids") {
  const Tokenizer tokenizers[] = {Tokenizer::load(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp"),
                                  Tokenizer::load(kData + "tiny"), parse(llama2_like())};
  std::mt19937 random(1);
  for (const Tokenizer& tokenizer : tokenizers) {
    std::vector<int32_t> known;
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
      if (tokenizer.is_token(id)) known.push_back(id);
    for (int round = 0; round < 10000; ++round) {
      Ids ids;
      for (size_t i = random() % 12; i > 0; --i) {
        // Half of them from the low ids, where the single bytes are, so that sequences break and join.
        ids.push_back(known[random() % (random() % 2 ? known.size() : 260)]);
      }
      const DecodeOptions options{random() % 2 == 0};
      StreamDetokenizer stream(tokenizer, options);
      std::string joined;
      for (const int32_t id : ids) {
        const std::string delta = stream.feed(id);
        REQUIRE(is_valid_utf8(delta));
        joined += delta;
      }
      joined += stream.finish();
      REQUIRE(joined == tokenizer.decode(ids, options));
      if (!tokenizer.decoder().byte_level()) continue;
      std::string bytes, expected;  // oracle: all bytes first, repaired at once
      for (const int32_t id : ids)
        if (!options.skip_special || !tokenizer.is_special(id)) bytes += tokenizer.piece(id).bytes;
      Utf8Stream repair;
      repair.append(bytes, expected);
      repair.finish(expected);
      REQUIRE(joined == expected);
    }
  }
}

TEST_CASE("one_tokenizer_serves_many_threads") {
  const Tokenizer tokenizer = Tokenizer::load(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  const std::string text = "Hello, 世界! <|im_start|>user\n12345 don't\n\n  stop<|im_end|>";
  const Ids expected = tokenizer.encode(text);
  std::vector<int> wrong(4, 0);
  {
    std::vector<std::thread> threads;
    for (int& count : wrong)
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) count += tokenizer.encode(text) != expected;
      });
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(wrong == std::vector<int>(4, 0));
}

TEST_CASE("a_file_without_merges_or_vocabulary_says_so") {
  CHECK(refusal([] { Tokenizer::load(kData + "bad_no_merges"); }).find("model.merges is missing") != std::string::npos);
  Json json = tiny_json();
  json["model"].erase("vocab");
  CHECK(refusal([&] { parse(json); }).find("model.vocab is missing") != std::string::npos);
  CHECK_THROWS_WITH_AS(Tokenizer::load(kData + "absent"), doctest::Contains("absent"), Error);
}

TEST_CASE("what_follows_a_nul_byte_is_not_overlooked") {
  const std::string text = tiny_json().dump();
  for (const std::string_view more : {std::string_view("\0", 1), std::string_view("\0{{garbage", 10)})
    CHECK(refusal([&] { Tokenizer::parse(text + std::string(more), "", "tokenizer.json"); }).find("is NUL") !=
          std::string::npos);
}

TEST_CASE("unsupported_components_are_refused_by_name") {
  struct Case {
    const char *pointer, *value, *named;
  };
  const Case cases[] = {
      {"/model/type", R"("Unigram")", "Unigram"},
      {"/model/type", R"("WordPiece")", "WordPiece"},
      {"/model/dropout", "0.1", "dropout"},
      {"/model/continuing_subword_prefix", R"("##")", "continuing_subword_prefix"},
      {"/model/end_of_word_suffix", R"("</w>")", "end_of_word_suffix"},
      {"/model/unk_token", R"("<nope>")", "<nope>"},
      {"/model/ignore_merges", "1", "ignore_merges"},
      {"/normalizer", R"({"type":"Lowercase"})", "Lowercase"},
      {"/normalizer", R"({"type":"Sequence","normalizers":[{"type":"Strip"}]})", "Strip"},
      {"/normalizer", R"({"type":"Replace","pattern":{"Regex":" +"},"content":"x"})", "Replace"},
      {"/normalizer", R"("NFC")", "normalizer"},
      {"/pre_tokenizer", R"({"type":"Metaspace"})", "Metaspace"},
      {"/pre_tokenizer", R"({"type":"Sequence"})", "pretokenizers"},
      {"/pre_tokenizer", R"({"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]})", "Digits"},
      {"/pre_tokenizer", R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Removed"})", "Removed"},
      {"/pre_tokenizer", R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Isolated","invert":true})", "invert"},
      {"/pre_tokenizer", R"({"type":"Split","behavior":"Isolated"})", "pattern"},
      {"/pre_tokenizer", "null", "ByteLevel"},
      {"/post_processor", R"({"type":"RobertaProcessing"})", "RobertaProcessing"},
      {"/post_processor", R"({"type":"TemplateProcessing","single":[]})", "0 sequences"},
      {"/post_processor", R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{}}]})",
       "<s>"},
      {"/post_processor",
       R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"q"}}],"special_tokens":{"q":{"ids":[9999]}}})",
       "9999"},
      {"/post_processor", R"({"type":"TemplateProcessing","single":[3]})", "post_processor"},
      {"/decoder", "null", "null"},
      {"/decoder", R"({"type":"WordPiece"})", "WordPiece"},
      {"/decoder", R"({"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"ByteFallback"}]})", "ByteFallback"},
      {"/decoder", R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"a"},"content":""}]})",
       "Fuse"},
      {"/added_tokens", R"({"a":1})", "added_tokens"},
      {"/added_tokens", R"([{"id":272,"content":""}])", "272"},
      {"/added_tokens", R"([{"id":-1,"content":"x"}])", "-1"},
      {"/added_tokens", R"([{"id":99999999,"content":"xyz"}])", "99999999"},
      {"/added_tokens", R"([{"id":5,"content":"xyz"}])", "id 5"},
      {"/added_tokens", R"([{"id":272,"content":"xy"},{"id":272,"content":"yz"}])", "twice"},
      {"/added_tokens", R"([{"id":"272","content":"xy"}])", "integer"},
      {"/added_tokens", "[7]", "added token"},
      {"/model/vocab/he", "1.5", "\"he\""},
      {"/model/vocab/he", "-1", "\"he\""},
      {"/model/vocab/he", "4194304", "4194304"},
      {"/model/vocab/he", "18446744073709551615", "18446744073709551615"},
      {"/model/vocab/he", R"("a")", "\"he\""},
      {"/model/vocab/he", "[1]", "\"he\""},
      {"/model/vocab/he", "{}", "\"he\""},
      {"/model/vocab/he", "null", "\"he\""},
      {"/model/vocab/he", "7", "id 7 twice"},
      {"/model/merges", R"(["h  e"])", "merges[0]"},
      {"/model/merges", R"(["he"])", "merges[0]"},
      {"/model/merges", R"(["h e",["l","l"]])", "merges[1]"},
      {"/model/merges", R"([["h"]])", "merges[0]"},
      {"/model/merges", R"([["h","e","l"]])", "merges[0]"},
      {"/model/merges", R"([[["h"],"e"]])", "merges[0]"},
      {"/model/merges", R"([[1,2]])", "merges[0]"},
      {"/model/merges", "[{}]", "merges[0]"},
      {"/model/merges", "[null]", "merges[0]"},
      {"/model/merges", R"(["h q"])", "\"hq\""},
      {"/model/merges", "{}", "merges is missing"},
      {"/model", "[]", "model"},
  };
  for (const Case& item : cases) {
    CAPTURE(item.pointer);
    CAPTURE(item.value);
    Json json = tiny_json();
    json[Json::json_pointer(item.pointer)] = Json::parse(item.value);
    const std::string message = refusal([&] { parse(json); });
    CAPTURE(message);
    CHECK(message.find(item.named) != std::string::npos);
  }
}

TEST_CASE("damaged_files_are_refused") {
  const std::string whole = tiny_json().dump();
  const auto load = [](const std::string& text) { return [text] { Tokenizer::parse(text, "", "tokenizer.json"); }; };
  for (size_t size = 0; size < whole.size(); size += 97) CHECK(refusal(load(whole.substr(0, size))) != "no error");
  for (const char* text : {"", "[]", "null", "3", "{}", R"({"model":null})", "{\"model\":\"\xFF\"}"})
    CHECK(refusal(load(text)) != "no error");
  CHECK(refusal(load(std::string(100000, '['))).find("nested deeper") != std::string::npos);
  CHECK(refusal(load(R"({"model":{"vocab":{"a":0,"a":1},"merges":[]}})")).find("\"a\" twice") != std::string::npos);
  CHECK(refusal(load(R"({"model":{"vocab":{"a":0}},"model":{}})")).find("duplicate") != std::string::npos);
}

TEST_CASE("merges_that_are_missing_from_the_list_are_noticed_where_tokens_need_them") {
  Json json = tiny_json();
  json["model"]["merges"] = Json::array();
  CHECK(refusal([&] { parse(json); }).find("model.merges is empty, yet model.vocab holds") != std::string::npos);
  json["model"]["merges"] = {"#version: 0.2"};
  CHECK(refusal([&] { parse(json); }).find("model.merges is empty") != std::string::npos);
  // Single symbols and added tokens need none.
  Json& vocab = json["model"]["vocab"];
  for (auto it = vocab.begin(); it != vocab.end();) {
    std::vector<int32_t> points;
    for (const char c : it.key()) points.push_back((c & 0xC0) != 0x80);
    it = std::count(points.begin(), points.end(), 1) > 1 ? vocab.erase(it) : std::next(it);
  }
  json["model"]["merges"] = Json::array();
  CHECK(parse(json).encode("he").size() == 2);
}

TEST_CASE("tokens_beyond_the_rows_of_a_model_are_refused_unless_added") {
  Json json = tiny_json();
  const Tokenizer tokenizer = parse(json);
  int32_t end = 0;
  for (const auto& [text, id] : json["model"]["vocab"].items()) end = std::max(end, id.get<int32_t>() + 1);
  tokenizer.require_rows(end, "tokenizer.json");
  tokenizer.require_rows(end + 100, "tokenizer.json");
  const std::string message = refusal([&] { tokenizer.require_rows(end - 1, "tokenizer.json"); });
  CHECK(message.find(fmt::format("the id {}", end - 1)) != std::string::npos);
  CHECK(message.find(fmt::format("0..{}", end - 2)) != std::string::npos);
  json["added_tokens"].push_back({{"id", end + 5000}, {"content", "<far>"}, {"special", true}});
  parse(json).require_rows(end, "tokenizer.json");
}

}  // namespace offload::tokenizer_format_test
