#include "core/tokenizer_file.h"

#include <cmath>
#include <set>
#include <utility>

namespace offload {
namespace {

// "left right" or ["left", "right"] of model.merges, before ids are known.
struct MergeText {
  uint32_t left_offset, left_size, right_size;
};

// Sends model.vocab and model.merges into flat tables and the other events to the library's DOM builder.
class TokenizerReader final : public nlohmann::json_sax<Json> {
 public:
  TokenizerReader(TokenizerFile& file, std::string_view origin)
      : file_(file), origin_(origin), dom_(file.rest, false) {}

  bool null() override { return scalar("null") && dom_.null(); }
  bool boolean(bool value) override { return scalar("a boolean") && dom_.boolean(value); }
  bool number_integer(number_integer_t value) override {
    if (in_ == Table::vocab) bad_id(fmt::to_string(value));
    return scalar("a number") && dom_.number_integer(value);
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (in_ != Table::vocab) return scalar("a number") && dom_.number_unsigned(value);
    if (value >= static_cast<uint64_t>(kTokenIdEnd)) bad_id(fmt::to_string(value));
    switch (file_.vocab.insert(token_, static_cast<int32_t>(value))) {
      case TokenTable::Inserted::yes:
        return true;
      case TokenTable::Inserted::text_exists:
        throw_error(ErrorCode::input, "{}: model.vocab has the token \"{}\" twice", origin_, printable(token_));
      case TokenTable::Inserted::id_exists:
        throw_error(ErrorCode::input, "{}: model.vocab has the id {} twice: \"{}\" and \"{}\"", origin_, value,
                    printable(*file_.vocab.text(static_cast<int32_t>(value))), printable(token_));
    }
    return true;
  }
  bool number_float(number_float_t value, const string_t& text) override {
    if (in_ == Table::vocab) bad_id(text);
    if (!std::isfinite(value)) throw_error(ErrorCode::input, "{}: JSON number {} is out of range", origin_, text);
    return scalar("a number") && dom_.number_float(value, text);
  }
  bool string(string_t& value) override {
    if (in_ == Table::none) return dom_.string(value);
    if (in_ == Table::vocab) bad_id("a string");
    if (depth_ == merges_depth_) {
      add_spaced_merge(value);
    } else {
      if (++pair_parts_ > 2) bad_merge("a list of more than two");
      (pair_parts_ == 1 ? left_ : right_).swap(value);
    }
    return true;
  }
  bool binary(binary_t& value) override { return dom_.binary(value); }

  bool start_object(size_t) override {
    const bool table = depth_ == 2 && in_model_ && key_ == "vocab";
    if (in_ != Table::none) scalar("an object");
    enter();
    keys_.emplace_back();
    if (!table) return dom_.start_object(static_cast<size_t>(-1));
    in_ = Table::vocab;
    has_vocab_ = true;
    return dom_.null();
  }
  bool key(string_t& value) override {
    if (in_ == Table::vocab) {
      token_.swap(value);
      return true;
    }
    if (!keys_.back().insert(value).second)
      throw_error(ErrorCode::input, "{}: duplicate JSON key \"{}\"", origin_, printable(value));
    if (depth_ == 1) in_model_ = value == "model";
    key_ = value;
    return dom_.key(value);
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    if (in_ == Table::none) return dom_.end_object();
    in_ = Table::none;
    return true;
  }
  bool start_array(size_t) override {
    const bool table = in_ == Table::none && depth_ == 2 && in_model_ && key_ == "merges";
    if (in_ == Table::vocab) bad_id("a list");
    if (in_ == Table::merges && depth_ != merges_depth_) bad_merge("a nested list");
    enter();
    if (in_ == Table::merges) {
      pair_parts_ = 0;
      return true;
    }
    if (!table) return dom_.start_array(static_cast<size_t>(-1));
    in_ = Table::merges;
    merges_depth_ = depth_;
    has_merges_ = true;
    return dom_.null();
  }
  bool end_array() override {
    --depth_;
    if (in_ == Table::none) return dom_.end_array();
    if (depth_ < merges_depth_) {
      in_ = Table::none;
      return true;
    }
    if (pair_parts_ != 2) bad_merge("a list of fewer than two");
    add_merge(left_, right_, true);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    throw_error(ErrorCode::input, "{}: invalid JSON near byte {}: {}", origin_, position,
                printable(json_error_text(error.what())));
  }

  bool has_vocab() const { return has_vocab_; }
  bool has_merges() const { return has_merges_; }

  // Turns the merges' texts into ids.
  void resolve_merges() {
    file_.merges.reserve(merge_texts_.size());
    for (const MergeText& text : merge_texts_) {
      const std::string_view both(merge_bytes_.data() + text.left_offset, text.left_size + text.right_size);
      file_.merges.push_back(
          {id_in_vocab(both.substr(0, text.left_size)), id_in_vocab(both.substr(text.left_size)), id_in_vocab(both)});
    }
  }

 private:
  enum class Table { none, vocab, merges };

  void enter() {
    if (++depth_ > kJsonDepthMax)
      throw_error(ErrorCode::input, "{}: JSON nested deeper than {} levels", origin_, kJsonDepthMax);
  }
  [[noreturn]] void bad_id(std::string_view found) {
    throw_error(ErrorCode::input, "{}: id of token \"{}\" must be an integer below {}, found {}", origin_,
                printable(token_), kTokenIdEnd, printable(found));
  }
  [[noreturn]] void bad_merge(std::string_view found) {
    throw_error(ErrorCode::input, "{}: model.merges[{}] must be \"left right\" or [\"left\", \"right\"], found {}",
                origin_, merge_texts_.size(), printable(found));
  }
  // A scalar that is no string: fine outside the tables.
  bool scalar(std::string_view found) {
    if (in_ == Table::vocab) bad_id(found);
    if (in_ == Table::merges) bad_merge(found);
    return true;
  }
  void add_spaced_merge(std::string_view line) {
    if (line.substr(0, 8) == "#version") return;  // a comment of the older spelling
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) bad_merge(line);
    add_merge(line.substr(0, space), line.substr(space + 1), false);
  }
  void add_merge(std::string_view left, std::string_view right, bool as_pair) {
    if (merge_texts_.empty()) pairs_ = as_pair;
    if (pairs_ != as_pair) bad_merge("both spellings in one file");
    merge_texts_.push_back({static_cast<uint32_t>(merge_bytes_.size()), static_cast<uint32_t>(left.size()),
                            static_cast<uint32_t>(right.size())});
    merge_bytes_.append(left).append(right);
  }
  int32_t id_in_vocab(std::string_view token) const {
    const auto id = file_.vocab.find(token);
    if (!id)
      throw_error(ErrorCode::input, "{}: model.merges[{}] needs the token \"{}\", which model.vocab lacks", origin_,
                  file_.merges.size(), printable(token));
    return *id;
  }

  TokenizerFile& file_;
  std::string_view origin_;
  nlohmann::detail::json_sax_dom_parser<Json> dom_;
  std::vector<std::set<string_t>> keys_;
  int depth_ = 0;
  Table in_ = Table::none;
  bool in_model_ = false;
  bool has_vocab_ = false, has_merges_ = false;
  std::string key_, token_, left_, right_;
  int merges_depth_ = 0;
  int pair_parts_ = 0;
  bool pairs_ = false;  // the file spells merges as lists
  std::string merge_bytes_;
  std::vector<MergeText> merge_texts_;
};

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view text, std::string_view origin) {
  if (static_cast<int64_t>(text.size()) > kTokenizerFileBytesMax)
    throw_error(ErrorCode::input, "{}: {} bytes; at most {} are allowed", origin, text.size(), kTokenizerFileBytesMax);
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw_error(ErrorCode::input, "{}: byte {} is NUL, which no JSON has", origin, nul);
  TokenizerFile file;
  TokenizerReader reader(file, origin);
  Json::sax_parse(text.begin(), text.end(), &reader);
  const auto model = file.rest.find("model");
  if (model == file.rest.end() || !model->is_object())
    throw_error(ErrorCode::input, "{}: no object \"model\"; is this a tokenizer.json?", origin);
  const std::string type = json_get<std::string>(*model, "type", "BPE", origin);
  if (type != "BPE")
    throw_error(ErrorCode::input, "{}: model type \"{}\" is unsupported; only BPE is supported", origin,
                printable(type));
  if (!reader.has_vocab() || file.vocab.size() == 0)
    throw_error(ErrorCode::input, "{}: model.vocab is missing or empty; export the tokenizer again", origin);
  if (!reader.has_merges())
    throw_error(ErrorCode::input, "{}: model.merges is missing; export the tokenizer again with its merges", origin);
  reader.resolve_merges();
  return file;
}

AddedToken read_added_token(const Json& json, int64_t id, std::string_view origin) {
  AddedToken token;
  token.content = json_get<std::string>(json, "content", "", origin);
  if (id < 0 || id >= kTokenIdEnd)
    throw_error(ErrorCode::input, "{}: added token \"{}\" has id {}; expected 0 to {}", origin,
                printable(token.content), id, kTokenIdEnd - 1);
  if (token.content.empty() || token.content.size() > kAddedTokenBytesMax)
    throw_error(ErrorCode::input, "{}: added token {} has a content of {} bytes; expected 1 to {}", origin, id,
                token.content.size(), kAddedTokenBytesMax);
  token.id = static_cast<int32_t>(id);
  token.single_word = json_get<bool>(json, "single_word", false, origin);
  token.lstrip = json_get<bool>(json, "lstrip", false, origin);
  token.rstrip = json_get<bool>(json, "rstrip", false, origin);
  token.special = json_get<bool>(json, "special", false, origin);
  token.normalized = json_get<bool>(json, "normalized", !token.special, origin);
  return token;
}

}  // namespace offload
