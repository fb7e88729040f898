// A rendered prompt as token ids: control tokens count where the template wrote them, and nowhere else.
#include <doctest/doctest.h>

#include <algorithm>

#include "core/chat_template.h"
#include "core/tokenizer.h"

namespace offload::prompt_encoding_test {

namespace {

using Ids = std::vector<int32_t>;
using Segments = std::vector<PromptSegment>;

const std::string kData = OFFLOAD_SOURCE_DIR "/tests/data/";

// A tokenizer over "▁", letters and some pairs, whose added tokens are looked for after normalization.
constexpr std::string_view kNormalized = R"({
  "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
  "pre_tokenizer": null,
  "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "},
    {"type": "ByteFallback"}, {"type": "Fuse"}]},
  "model": {"type": "BPE", "vocab": {"_": 0, "a": 1, "b": 2, "<": 3, ">": 4, "ab": 5}, "merges": ["a b"]},
  "added_tokens": [{"id": 6, "content": "<a>", "special": true, "normalized": true, "single_word": false,
                    "lstrip": false, "rstrip": false}]})";

}  // namespace

// The reported case's ids have a newline after each turn and at the end, which its template writes only without the
// "-" of its endfor and with one newline more at its end (Jinja drops the last one).
TEST_CASE("a_user_cannot_forge_a_turn_and_an_edge_is_no_word_edge") {
  const Json item = parse_json(read_text_file(kData + "cli/control_text_in_user_message.json", 1 << 16), "case");
  const Tokenizer tiny = Tokenizer::load(kData + "tokenizer/tiny");
  std::string source = item["template"].get<std::string>() + "\n";
  source.replace(source.find("\n{%- endfor %}"), std::string("\n{%- endfor %}").size(), "{{ '\\n' }}{%- endfor %}");
  const RenderedPrompt prompt =
      ChatTemplate(source, "case")
          .render(parse_ordered_json(item["input"]["messages"].dump(), "messages"), RenderOptions());
  const Ids ids = tiny.encode_segments(prompt.segments);
  CHECK(ids == item["one_right_answer"].get<Ids>());
  for (const auto& [id, count] : item["control_ids_allowed"].items())
    CHECK(std::count(ids.begin(), ids.end(), std::stoi(id)) == count.get<int64_t>());
}

TEST_CASE("segments_without_control_text_encode_as_their_joined_text_wherever_they_are_cut") {
  const Tokenizer demo = Tokenizer::load(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  const std::string text = "<|im_start|>user\nWhat's the capital of Japan? 東京 12345  e\u0301\n\n<|im_end|>\n";
  const size_t user_begin = text.find('W'), user_end = text.find("<|im_end|>");
  const Ids expected = demo.encode(text);
  for (size_t cut = user_begin; cut <= user_end; ++cut) {
    if (cut < text.size() && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) continue;
    CAPTURE(cut);
    CHECK(demo.encode_segments(Segments{
              {text.substr(0, cut), true}, {text.substr(cut, user_end - cut), false}, {text.substr(user_end), true}}) ==
          expected);
  }
  CHECK(demo.encode_segments(Segments{{text, true}}) == expected);
  CHECK(demo.encode_segments(Segments{{text, false}}) == demo.encode(text, {.parse_special = false}));
  CHECK(demo.encode_segments(Segments{}).empty());
}

TEST_CASE("a_control_token_counts_only_when_one_trusted_segment_holds_all_of_it") {
  const Tokenizer demo = Tokenizer::load(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  const int32_t end = *demo.token_to_id("<|im_end|>");
  const auto holds = [&](const Segments& segments) {
    const Ids ids = demo.encode_segments(segments);
    return std::count(ids.begin(), ids.end(), end);
  };
  CHECK(holds({{"a<|im_end|>", true}}) == 1);
  CHECK(holds({{"a<|im_end|>", false}}) == 0);
  CHECK(holds({{"<|im_", true}, {"end|>", false}}) == 0);
  CHECK(holds({{"<|im_end|", false}, {">", true}}) == 0);
  CHECK(holds({{"<|im_", true}, {"end|>", true}}) == 1);  // neighbours of the same origin are one text
  CHECK(holds({{"x<|im_end|>", false}, {"<|im_end|>", true}, {"<|im_end|>y", false}}) == 1);
  // An overlapping look-alike before it hides nothing.
  CHECK(holds({{"<|im_", false}, {"<|im_end|>", true}}) == 1);
}

TEST_CASE("invalid_utf8_in_a_segment_is_repaired_and_moves_no_trust") {
  const Tokenizer demo = Tokenizer::load(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  const Segments broken = {{"<|im_start|>", true}, {"\xFF\xFE<|im_end|>\xE6\x9D", false}, {"<|im_end|>", true}};
  const Segments repaired = {{"<|im_start|>", true}, {"��<|im_end|>�", false}, {"<|im_end|>", true}};
  const Ids ids = demo.encode_segments(broken);
  CHECK(ids == demo.encode_segments(repaired));
  CHECK(std::count(ids.begin(), ids.end(), *demo.token_to_id("<|im_end|>")) == 1);
}

TEST_CASE("tokens_that_are_looked_for_after_normalization_keep_to_trusted_text_too") {
  const Tokenizer tokenizer = Tokenizer::parse(kNormalized, "", "normalized");
  // The normalized token is "_<a>": Prepend applies to its content as well.
  CHECK(tokenizer.encode(" <a> b") == Ids{0, 6, 0, 2});
  CHECK(tokenizer.encode_segments(Segments{{" <a> b", true}}) == Ids{0, 6, 0, 2});
  CHECK(tokenizer.encode_segments(Segments{{" <a> b", false}}) == Ids{0, 0, 3, 1, 4, 0, 2});
  CHECK(tokenizer.encode_segments(Segments{{"b", false}, {" <a>", true}, {" <a>b", false}}) ==
        Ids{0, 2, 6, 0, 3, 1, 4, 2});
  CHECK(tokenizer.encode_segments(Segments{{"a", true}, {"b <a", false}, {">", true}}) == Ids{0, 5, 0, 3, 1, 4});
}

}  // namespace offload::prompt_encoding_test
