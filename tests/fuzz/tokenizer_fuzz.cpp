// Input: a tokenizer.json, a byte 0xFF (which no UTF-8 holds), and a text; or, without that byte, a text alone.
//
// A tokenizer.json either loads or throws Error; one that loads encodes and decodes without a sanitizer's complaint.
// The text goes through the tiny tokenizer too, whose decode(encode(x)) must be the NFC of the repaired x.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base.h"
#include "core/detokenizer.h"
#include "core/tokenizer.h"
#include "core/unicode.h"

using namespace offload;

namespace {

constexpr DecodeOptions kAll{false};

void encode_and_decode(const Tokenizer& tokenizer, std::string_view text) {
  for (const bool parse_special : {true, false}) {
    const auto ids = tokenizer.encode(text, {true, parse_special});
    const std::string decoded = tokenizer.decode(ids, kAll);
    OFL_ASSERT(!tokenizer.decoder().byte_level() || is_valid_utf8(decoded));
    StreamDetokenizer stream(tokenizer, kAll);
    std::string joined;
    for (const int32_t id : ids) {
      const std::string delta = stream.feed(id);
      OFL_ASSERT(is_valid_utf8(delta));
      joined += delta;
    }
    OFL_ASSERT(joined + stream.finish() == decoded);
  }
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text) {
  std::string repaired, buffer;
  Utf8Stream stream;
  stream.append(text, repaired);
  stream.finish(repaired);
  OFL_ASSERT(tokenizer.decode(tokenizer.encode(text, {false, false}), kAll) == nfc(repaired, buffer));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Tokenizer tiny = Tokenizer::load(OFFLOAD_SOURCE_DIR "/tests/data/tokenizer/tiny");
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t cut = input.find('\xFF');
  const std::string_view text = cut == std::string_view::npos ? input : input.substr(cut + 1);
  check_round_trip(tiny, text);
  encode_and_decode(tiny, text);
  if (cut == std::string_view::npos) return 0;
  try {
    encode_and_decode(Tokenizer::parse(input.substr(0, cut), "", "fuzz"), text);
  } catch (const Error&) {
    // Refusing is a right answer; crashing, hanging or an assertion is not.
  }
  return 0;
}
