#include "core/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <utility>

#include "core/base.h"
#include "core/chat_template.h"
#include "core/detokenizer.h"
#include "core/unicode.h"

namespace offload {
namespace {

constexpr int64_t kConfigBytesMax = 64 << 20;
constexpr int kPostProcessorDepthMax = 8;

// rest["model"] as the options of BPE. REQUIRES: it is an object.
BpeOptions read_bpe_options(const Json& model, const TokenTable& vocab, bool byte_level, std::string_view origin) {
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!json_get<std::string>(model, affix, "", origin).empty())
      throw_error(ErrorCode::input, "{}: model.{} is set, which is unsupported", origin, affix);
  if (json_get<double>(model, "dropout", 0, origin) != 0)
    throw_error(ErrorCode::input, "{}: model.dropout is set, which is unsupported", origin);
  BpeOptions options;
  options.byte_level = byte_level;
  options.ignore_merges = json_get<bool>(model, "ignore_merges", false, origin);
  options.byte_fallback = json_get<bool>(model, "byte_fallback", false, origin);
  options.fuse_unk = json_get<bool>(model, "fuse_unk", false, origin);
  const auto unk = json_get<std::string>(model, "unk_token", "", origin);
  if (!unk.empty()) {
    options.unk_id = vocab.find(unk);
    if (!options.unk_id)
      throw_error(ErrorCode::input, "{}: model.unk_token \"{}\" is not in model.vocab", origin, printable(unk));
  }
  return options;
}

const Json& value_or_null(const Json& json, const char* key) {
  static const Json kNull;
  const auto found = json.find(key);
  return found == json.end() ? kNull : *found;
}

// A special token of tokenizer_config.json: a string, or an object with its "content". Empty when it is not set.
std::string named_token(const Json& config, const char* key, std::string_view origin) {
  const Json& value = value_or_null(config, key);
  if (value.is_object()) return json_get<std::string>(value, "content", "", origin);
  return json_get<std::string>(config, key, "", origin);
}

// The parts of `ranges` inside `place`, counted from its start.
std::vector<ByteRange> ranges_within(std::span<const ByteRange> ranges, ByteRange place) {
  std::vector<ByteRange> inside;
  for (const ByteRange& range : ranges) {
    const size_t begin = std::max(range.begin, place.begin), end = std::min(range.end, place.end);
    if (begin < end) inside.push_back({begin - place.begin, end - place.begin});
  }
  return inside;
}

}  // namespace

Tokenizer Tokenizer::load(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? fs::path(path) / "tokenizer.json" : fs::path(path);
  const fs::path config = file.parent_path() / "tokenizer_config.json";
  const std::string text = read_text_file(file.string(), kTokenizerFileBytesMax);
  const bool has_config = is_listed(config.string());
  return parse(text, has_config ? read_text_file(config.string(), kConfigBytesMax) : "",
               printable(file.string(), 4096));
}

Tokenizer Tokenizer::parse(std::string_view tokenizer_json, std::string_view config_json, std::string_view origin) {
  const std::string config_origin = fmt::format("{} (its tokenizer_config.json)", origin);
  const Json config = config_json.empty() ? Json::object() : parse_json(config_json, config_origin);
  if (!config.is_object()) throw_error(ErrorCode::input, "{}: must be a JSON object", config_origin);
  return Tokenizer(parse_tokenizer_file(tokenizer_json, origin), config, origin);
}

Tokenizer::Tokenizer(TokenizerFile file, const Json& config, std::string_view origin)
    : normalizer_(value_or_null(file.rest, "normalizer"), origin),
      pre_tokenizer_(value_or_null(file.rest, "pre_tokenizer"), origin),
      decoder_(value_or_null(file.rest, "decoder"), origin) {
  if (pre_tokenizer_.byte_level() != decoder_.byte_level())
    throw_error(ErrorCode::input, "{}: pre_tokenizer and decoder must both be ByteLevel or neither", origin);
  const BpeOptions options = read_bpe_options(file.rest["model"], file.vocab, pre_tokenizer_.byte_level(), origin);
  const bool has_merges = !file.merges.empty();
  bpe_ = BpeModel(std::move(file.vocab), std::move(file.merges), options);
  read_added_tokens(file.rest, config, origin);
  if (!has_merges) require_merges(origin);
  build_matchers();
  read_named_tokens(config, origin);
  read_post_processor(value_or_null(file.rest, "post_processor"), origin, 0);
  add_configured_frame(config, origin);
  build_pieces();
}

void Tokenizer::read_added_tokens(const Json& file, const Json& config, std::string_view origin) {
  const Json& listed = value_or_null(file, "added_tokens");
  if (!listed.is_null() && !listed.is_array()) throw_error(ErrorCode::input, "{}: added_tokens must be a list", origin);
  for (const Json& entry : listed)
    add_token(read_added_token(entry, json_get<int64_t>(entry, "id", -1, origin), origin), origin);

  const Json& decoder = value_or_null(config, "added_tokens_decoder");
  if (!decoder.is_null() && !decoder.is_object())
    throw_error(ErrorCode::input, "{}: added_tokens_decoder of tokenizer_config.json must be an object", origin);
  for (const auto& [key, entry] : decoder.items()) {
    int64_t id = -1;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), id);
    if (parsed.ec != std::errc() || parsed.ptr != key.data() + key.size())
      throw_error(ErrorCode::input,
                  "{}: added_tokens_decoder of tokenizer_config.json has the key \"{}\"; expected an id", origin,
                  printable(key));
    AddedToken token = read_added_token(entry, id, origin);
    if (!added_table_.text(token.id) && !added_table_.find(token.content)) add_token(std::move(token), origin);
  }
}

void Tokenizer::add_token(AddedToken token, std::string_view origin) {
  // A content that the vocabulary has keeps the vocabulary's id.
  if (const auto id = bpe_.vocab().find(token.content)) token.id = *id;
  const auto other = bpe_.vocab().text(token.id);
  if (other && *other != token.content)
    throw_error(ErrorCode::input, "{}: added token \"{}\" has the id {} of the token \"{}\"", origin,
                printable(token.content), token.id, printable(*other));
  if (added_table_.insert(token.content, token.id) != TokenTable::Inserted::yes)
    throw_error(ErrorCode::input, "{}: added token \"{}\" or its id {} is listed twice", origin,
                printable(token.content), token.id);
  added_.push_back(std::move(token));
}

// Without a merge only single symbols are ever made: text would fall into bytes, and no error would say so.
void Tokenizer::require_merges(std::string_view origin) const {
  for (int32_t id = 0; id < bpe_.vocab().id_end(); ++id) {
    const auto token = bpe_.vocab().text(id);
    if (!token || added_table_.text(id) || bpe_.options().unk_id == id) continue;
    if (token->empty() || static_cast<size_t>(first_code_point(*token).length) == token->size()) continue;
    if (bpe_.options().byte_fallback && decoder_.piece(*token).fallback_byte) continue;
    throw_error(
        ErrorCode::input,
        "{}: model.merges is empty, yet model.vocab holds \"{}\" (id {}), which only merges can make; export the "
        "tokenizer again with its merges",
        origin, printable(*token), id);
  }
}

void Tokenizer::require_rows(int64_t rows, std::string_view origin) const {
  for (int32_t id = bpe_.vocab().id_end(); id-- > rows;) {
    const auto token = bpe_.vocab().text(id);
    if (token && !added_table_.text(id))
      throw_error(ErrorCode::input,
                  "{}: model.vocab has \"{}\" with the id {}, the model has 0..{}; they do not belong together", origin,
                  printable(*token), id, rows - 1);
  }
}

void Tokenizer::build_matchers() {
  std::vector<AddedToken> raw, normalized;
  std::string buffer;
  for (const AddedToken& token : added_) {
    if (!token.normalized) {
      raw.push_back(token);
      continue;
    }
    AddedToken copy = token;
    copy.content = std::string(normalizer_.apply(token.content, buffer));
    if (!copy.content.empty()) normalized.push_back(std::move(copy));
  }
  raw_matcher_ = AddedTokenMatcher(std::move(raw));
  normalized_matcher_ = AddedTokenMatcher(std::move(normalized));
}

void Tokenizer::read_post_processor(const Json& json, std::string_view origin, int depth) {
  if (json.is_null()) return;
  const std::string type = json_get<std::string>(json, "type", "", origin);
  if (type == "ByteLevel") return;  // moves offsets, changes no id
  if (type == "TemplateProcessing") return read_template(json, origin);
  const Json& parts = value_or_null(json, "processors");
  if (type != "Sequence" || !parts.is_array() || depth == kPostProcessorDepthMax)
    throw_error(
        ErrorCode::input,
        "{}: post_processor type \"{}\" is unsupported; supported are ByteLevel, TemplateProcessing and Sequence",
        origin, printable(type));
  for (const Json& part : parts) read_post_processor(part, origin, depth + 1);
}

void Tokenizer::read_template(const Json& json, std::string_view origin) {
  const Json& items = value_or_null(json, "single");
  if (!items.is_array())
    throw_error(ErrorCode::input, "{}: post_processor TemplateProcessing needs a list \"single\"", origin);
  Frame inner;
  int sequences = 0;
  for (const Json& item : items) {
    const Json& special = value_or_null(item, "SpecialToken");
    if (item.contains("Sequence")) {
      ++sequences;
      continue;
    }
    const auto name = json_get<std::string>(special, "id", "", origin);
    const Json& ids = value_or_null(value_or_null(value_or_null(json, "special_tokens"), name.c_str()), "ids");
    if (!ids.is_array() || ids.empty())
      throw_error(ErrorCode::input, "{}: post_processor names the special token \"{}\" but gives it no ids", origin,
                  printable(name));
    for (const Json& id : ids) {
      const bool known = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(kTokenIdEnd) &&
                         (bpe_.vocab().text(id.get<int32_t>()) || added_table_.text(id.get<int32_t>()));
      if (!known)
        throw_error(ErrorCode::input, "{}: post_processor gives \"{}\" the id {}, which is no token", origin,
                    printable(name), printable(id.dump(-1, ' ', true)));
      (sequences == 0 ? inner.before : inner.after).push_back(id.get<int32_t>());
    }
  }
  if (sequences != 1)
    throw_error(ErrorCode::input, "{}: post_processor template \"single\" holds {} sequences; expected 1", origin,
                sequences);
  frame_.before.insert(frame_.before.begin(), inner.before.begin(), inner.before.end());
  frame_.after.insert(frame_.after.end(), inner.after.begin(), inner.after.end());
}

void Tokenizer::read_named_tokens(const Json& config, std::string_view origin) {
  for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
    std::string text = named_token(config, key, origin);
    if (!text.empty()) named_tokens_.emplace(key, std::move(text));
  }
}

void Tokenizer::add_configured_frame(const Json& config, std::string_view origin) {
  const auto add = [&](const char* flag, const char* name, std::vector<int32_t>& ids) {
    if (!json_get<bool>(config, flag, false, origin) || !ids.empty()) return;
    const auto named = named_tokens_.find(name);
    const auto id = named == named_tokens_.end() ? std::nullopt : token_to_id(named->second);
    if (!id)
      throw_error(ErrorCode::input, "{}: tokenizer_config.json sets {} but its {} is no token", origin, flag, name);
    ids.push_back(*id);
  };
  add("add_bos_token", "bos_token", frame_.before);
  add("add_eos_token", "eos_token", frame_.after);
}

void Tokenizer::build_pieces() {
  pieces_.resize(static_cast<size_t>(std::max(bpe_.vocab().id_end(), added_table_.id_end())));
  for (int32_t id = 0; id < vocab_size(); ++id) {
    PieceEntry& entry = pieces_[static_cast<size_t>(id)];
    auto text = bpe_.vocab().text(id);
    if (!text) text = added_table_.text(id);
    if (!text) continue;
    const TokenDecoder::Piece piece = decoder_.piece(*text);
    entry.offset = static_cast<uint32_t>(piece_bytes_.size());
    entry.size = static_cast<uint32_t>(piece.bytes.size());
    entry.fallback_byte = piece.fallback_byte;
    entry.is_token = true;
    piece_bytes_.append(piece.bytes);
  }
  for (const AddedToken& token : added_) pieces_[static_cast<size_t>(token.id)].is_special = token.special;
}

// Working memory of one encode call.
struct Tokenizer::EncodeScratch {
  explicit EncodeScratch(size_t text_bytes) : bpe(text_bytes) {}

  PreTokenizerScratch pre_tokenizer;
  BpeScratch bpe;
  std::vector<std::string_view> words;
};

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::string repaired;
  if (!is_valid_utf8(text)) {
    repaired = repair_utf8(text);
    text = repaired;
  }
  std::vector<int32_t> ids;
  if (options.add_special_tokens) ids = frame_.before;
  const ByteRange all{0, text.size()};
  encode_text(text, {&all, options.parse_special ? size_t{1} : size_t{0}}, ids);
  if (options.add_special_tokens) ids.insert(ids.end(), frame_.after.begin(), frame_.after.end());
  return ids;
}

std::vector<int32_t> Tokenizer::encode_segments(std::span<const PromptSegment> segments) const {
  std::string text;
  std::vector<ByteRange> trusted;
  for (const PromptSegment& segment : segments) {
    const size_t begin = text.size();
    text += is_valid_utf8(segment.text) ? segment.text : repair_utf8(segment.text);
    if (!segment.trusted || begin == text.size()) continue;
    if (!trusted.empty() && trusted.back().end == begin) {
      trusted.back().end = text.size();
    } else {
      trusted.push_back({begin, text.size()});
    }
  }
  std::vector<int32_t> ids;
  encode_text(text, trusted, ids);
  return ids;
}

// Added tokens count inside the `trusted` ranges of `text` alone. REQUIRES: valid UTF-8.
void Tokenizer::encode_text(std::string_view text, std::span<const ByteRange> trusted,
                            std::vector<int32_t>& ids) const {
  EncodeScratch scratch(text.size());
  std::vector<TextSegment> raw, normalized;
  raw_matcher_.split(text, trusted, raw);
  std::string buffer;
  size_t at = 0;  // of the segment in `text`
  for (const TextSegment& segment : raw) {
    const ByteRange place{at, at + segment.text.size()};
    at = place.end;
    if (segment.token_id >= 0) {
      ids.push_back(segment.token_id);
      continue;
    }
    const std::string_view normal = normalizer_.apply(segment.text, buffer);
    if (normalized_matcher_.empty()) {
      encode_normal(normal, scratch, ids);
      continue;
    }
    normalized.clear();
    normalized_matcher_.split(normal, normalized_ranges(segment.text, normal, ranges_within(trusted, place)),
                              normalized);
    for (const TextSegment& part : normalized) {
      if (part.token_id >= 0) {
        ids.push_back(part.token_id);
      } else {
        encode_normal(part.text, scratch, ids);
      }
    }
  }
}

// Which bytes of `normal`, the normal form of `text`, come from the `trusted` ranges of `text` alone: those that the
// text up to a range's end and the text from its start on have in common with the whole. Errs on the side of distrust.
std::vector<ByteRange> Tokenizer::normalized_ranges(std::string_view text, std::string_view normal,
                                                    std::span<const ByteRange> trusted) const {
  std::vector<ByteRange> ranges;
  std::string buffer;
  for (const ByteRange& range : trusted) {
    size_t begin = 0, end = normal.size();
    if (range.begin > 0) {
      const std::string_view tail = normalizer_.apply(text.substr(range.begin), buffer);
      const auto same = std::mismatch(tail.rbegin(), tail.rend(), normal.rbegin(), normal.rend()).first - tail.rbegin();
      begin = normal.size() - static_cast<size_t>(same);
    }
    if (range.end < text.size()) {
      const std::string_view head = normalizer_.apply(text.substr(0, range.end), buffer);
      end = static_cast<size_t>(std::mismatch(head.begin(), head.end(), normal.begin(), normal.end()).first -
                                head.begin());
    }
    if (!ranges.empty()) begin = std::max(begin, ranges.back().end);
    if (begin < end) ranges.push_back({begin, end});
  }
  return ranges;
}

void Tokenizer::encode_normal(std::string_view text, EncodeScratch& scratch, std::vector<int32_t>& ids) const {
  pre_tokenizer_.split(text, scratch.pre_tokenizer, scratch.words);
  for (const std::string_view word : scratch.words) bpe_.encode(word, scratch.bpe, ids);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, DecodeOptions options) const {
  StreamDetokenizer stream(*this, options);
  std::string text;
  for (const int32_t id : ids) text.append(stream.feed(id));
  return text.append(stream.finish());
}

bool Tokenizer::is_token(int32_t id) const {
  return id >= 0 && id < vocab_size() && pieces_[static_cast<size_t>(id)].is_token;
}

bool Tokenizer::is_special(int32_t id) const {
  return is_token(id) && pieces_[static_cast<size_t>(id)].is_special;
}

void Tokenizer::check_id(int32_t id) const {
  if (!is_token(id))
    throw_error(ErrorCode::usage, "token id {} is not in the vocabulary (ids 0 to {}, some unused)", id,
                vocab_size() - 1);
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto added = added_table_.find(token);
  return added ? added : bpe_.vocab().find(token);
}

std::string_view Tokenizer::token_text(int32_t id) const {
  check_id(id);
  const auto added = added_table_.text(id);
  return added ? *added : *bpe_.vocab().text(id);
}

Tokenizer::Piece Tokenizer::piece(int32_t id) const {
  check_id(id);
  const PieceEntry& entry = pieces_[static_cast<size_t>(id)];
  return {std::string_view(piece_bytes_).substr(entry.offset, entry.size), entry.fallback_byte};
}

}  // namespace offload
