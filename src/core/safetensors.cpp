#include "core/safetensors.h"

#include <fmt/format.h>
#include <algorithm>
#include <limits>
#include <tuple>

#include "core/json.h"

namespace offload {
namespace {

// What the header's JSON says of one tensor, before it is checked against the file.
struct Declared {
  TensorEntry entry;
  int64_t begin = 0, end = 0;  // bytes from the start of the data section
};

// Reads the header as events, so that no JSON tree of 100,000 objects is built. States name the innermost open
// container.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(std::string_view origin) : origin_(origin) {}

  std::vector<Declared> take_tensors() { return std::move(tensors_); }

  bool null() override {
    // The reference library reads a null __metadata__ as an absent one.
    if (state_ == State::header && metadata_) return true;
    return scalar("null");
  }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_integer(int64_t) override { return scalar("a negative number"); }
  bool number_float(double, const std::string&) override { return scalar("a number that is no integer"); }
  bool binary(Json::binary_t&) override { return scalar("binary"); }
  bool number_unsigned(uint64_t value) override {
    if (state_ != State::shape && state_ != State::offsets) return scalar("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) wrong("a number above 2^63 - 1");
    const auto number = static_cast<int64_t>(value);
    if (state_ == State::offsets) {
      if (offset_count_ == 2) wrong("more than two numbers");
      offsets_[offset_count_++] = number;
      return true;
    }
    auto& shape = tensors_.back().entry.shape;
    if (shape.size() == kTensorRankMax) wrong(fmt::format("more than {} dimensions", kTensorRankMax));
    shape.push_back(number);
    return true;
  }
  bool string(std::string& value) override {
    if (state_ == State::metadata) return true;
    if (state_ != State::tensor || field_ != Field::dtype) return scalar("a string");
    const std::optional<DType> dtype = parse_dtype(value);
    if (!dtype)
      throw_error(ErrorCode::input,
                  "{}: tensor {}: dtype \"{}\" is not supported; expected a byte-sized safetensors type", origin_,
                  name(), printable(value));
    tensors_.back().entry.dtype = *dtype;
    return true;
  }

  bool start_object(size_t) override {
    if (skip_container()) return true;
    if (state_ == State::outside) {
      state_ = State::header;
    } else if (state_ == State::header) {
      state_ = metadata_ ? State::metadata : State::tensor;
      fields_seen_ = 0;
    } else {
      wrong("an object");
    }
    return true;
  }
  bool start_array(size_t) override {
    if (skip_container()) return true;
    if (state_ == State::tensor && field_ == Field::shape) {
      state_ = State::shape;
    } else if (state_ == State::tensor && field_ == Field::data_offsets) {
      state_ = State::offsets;
      offset_count_ = 0;
    } else {
      wrong("an array");
    }
    return true;
  }
  bool end_array() override {
    if (leave_skipped()) return true;
    if (state_ == State::offsets) {
      if (offset_count_ != 2) wrong(fmt::format("{} numbers", offset_count_));
      if (offsets_[0] > offsets_[1])
        throw_error(ErrorCode::input, "{}: tensor {}: data_offsets [{}, {}] end before they begin", origin_, name(),
                    offsets_[0], offsets_[1]);
      std::tie(tensors_.back().begin, tensors_.back().end) = std::tie(offsets_[0], offsets_[1]);
    }
    state_ = State::tensor;
    return true;
  }
  bool end_object() override {
    if (leave_skipped()) return true;
    if (state_ == State::tensor) require_fields();
    if (state_ == State::metadata) refuse_repeated_metadata();
    state_ = state_ == State::header ? State::outside : State::header;
    return true;
  }

  bool key(std::string& value) override {
    if (skipped_ > 0) return true;
    if (state_ == State::metadata) {
      metadata_keys_.push_back(value);
    } else if (state_ == State::header) {
      metadata_ = value == "__metadata__";
      if (metadata_ && std::exchange(metadata_seen_, true))
        throw_error(ErrorCode::input, "{}: duplicate __metadata__ in the header", origin_);
      if (!metadata_) tensors_.emplace_back().entry.name = value;
    } else {
      field_ = value == "dtype"          ? Field::dtype
               : value == "shape"        ? Field::shape
               : value == "data_offsets" ? Field::data_offsets
                                         : Field::unknown;
      const unsigned bit = 1u << static_cast<unsigned>(field_);
      if (field_ != Field::unknown && (fields_seen_ & bit))
        throw_error(ErrorCode::input, "{}: tensor {}: duplicate key {}", origin_, name(), value);
      fields_seen_ |= bit;
    }
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    throw_error(ErrorCode::input, "{}: the header is invalid JSON near its byte {}: {}", origin_, position,
                printable(json_error_text(error.what())));
  }

 private:
  enum class State { outside, header, metadata, tensor, shape, offsets };
  enum class Field : unsigned { dtype, shape, data_offsets, unknown };

  std::string name() const { return printable(tensors_.back().entry.name); }

  // A value that is neither a container nor one of the expected scalars.
  bool scalar(const char* kind) {
    if (skipped_ > 0 || (state_ == State::tensor && field_ == Field::unknown)) return true;
    wrong(kind);
  }

  // Values of keys that the format may gain later are passed over, as the reference library does.
  bool skip_container() {
    if (skipped_ == 0 && !(state_ == State::tensor && field_ == Field::unknown)) return false;
    ++skipped_;
    return true;
  }
  bool leave_skipped() {
    if (skipped_ == 0) return false;
    --skipped_;
    return true;
  }

  [[noreturn]] void wrong(std::string_view found) const {
    if (state_ == State::outside)
      throw_error(ErrorCode::input, "{}: the header's JSON must be an object, found {}", origin_, found);
    if (metadata_)
      throw_error(ErrorCode::input, "{}: __metadata__ must be an object of strings, found {}", origin_, found);
    if (state_ == State::header)
      throw_error(ErrorCode::input, "{}: tensor {} must be an object, found {}", origin_, name(), found);
    const bool shape = state_ == State::shape || (state_ == State::tensor && field_ == Field::shape);
    if (state_ == State::tensor && field_ == Field::dtype)
      throw_error(ErrorCode::input, "{}: tensor {}: dtype must be a string, found {}", origin_, name(), found);
    throw_error(ErrorCode::input, "{}: tensor {}: {}, found {}", origin_, name(),
                shape ? "shape must be a list of sizes" : "data_offsets must be [begin, end] in bytes", found);
  }

  void require_fields() const {
    for (const auto& [field, text] : {std::pair(Field::dtype, "dtype"), std::pair(Field::shape, "shape"),
                                      std::pair(Field::data_offsets, "data_offsets")})
      if (!(fields_seen_ & (1u << static_cast<unsigned>(field))))
        throw_error(ErrorCode::input, "{}: tensor {}: {} is missing from the header", origin_, name(), text);
  }

  void refuse_repeated_metadata() {
    std::sort(metadata_keys_.begin(), metadata_keys_.end());
    const auto repeated = std::adjacent_find(metadata_keys_.begin(), metadata_keys_.end());
    if (repeated != metadata_keys_.end())
      throw_error(ErrorCode::input, "{}: duplicate key \"{}\" in __metadata__", origin_, printable(*repeated));
    metadata_keys_ = {};
  }

  std::string_view origin_;
  std::vector<Declared> tensors_;
  std::vector<std::string> metadata_keys_;
  State state_ = State::outside;
  Field field_ = Field::unknown;
  bool metadata_ = false;  // the current value of the header object is __metadata__
  bool metadata_seen_ = false;
  unsigned fields_seen_ = 0;
  int64_t offsets_[2] = {};
  int offset_count_ = 0;
  int skipped_ = 0;  // open containers inside the value of an unknown key
};

void refuse_repeated_names(const std::vector<Declared>& tensors, std::string_view origin) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const Declared& tensor : tensors) names.push_back(tensor.entry.name);
  std::sort(names.begin(), names.end());
  const auto repeated = std::adjacent_find(names.begin(), names.end());
  if (repeated != names.end())
    throw_error(ErrorCode::input, "{}: duplicate tensor {} in the header", origin, printable(*repeated));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// product(shape) * bytes of the type; must equal end - begin.
int64_t checked_bytes(const Declared& tensor, std::string_view origin) {
  const TensorEntry& entry = tensor.entry;
  int64_t bytes = dtype_bytes(entry.dtype);
  for (const int64_t size : entry.shape)
    if (__builtin_mul_overflow(bytes, size, &bytes))
      throw_error(ErrorCode::input, "{}: tensor {}: shape {} is larger than 2^63 bytes", origin, printable(entry.name),
                  shape_text(entry.shape));
  if (bytes != tensor.end - tensor.begin)
    throw_error(ErrorCode::input, "{}: tensor {}: {} {} needs {} bytes, but data_offsets [{}, {}] hold {}", origin,
                printable(entry.name), dtype_name(entry.dtype), shape_text(entry.shape), bytes, tensor.begin,
                tensor.end, tensor.end - tensor.begin);
  return bytes;
}

// `tensors` in file order must follow each other without overlap or gap from byte 0 to byte `data_bytes`.
void check_coverage(const std::vector<Declared>& tensors, int64_t data_begin, int64_t file_bytes,
                    std::string_view origin) {
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t covered = 0;
  const Declared* previous = nullptr;
  for (const Declared& tensor : tensors) {
    if (tensor.begin < covered)
      throw_error(ErrorCode::input, "{}: tensors {} and {} overlap at byte {} of the data section", origin,
                  printable(previous->entry.name), printable(tensor.entry.name), tensor.begin);
    if (tensor.begin > covered)
      throw_error(ErrorCode::input, "{}: a gap of {} bytes before tensor {}, whose data_offsets are [{}, {}]", origin,
                  tensor.begin - covered, printable(tensor.entry.name), tensor.begin, tensor.end);
    if (tensor.end > data_bytes)
      throw_error(
          ErrorCode::input,
          "{}: truncated: tensor {} ends at byte {} of the data section, but the file's {} bytes hold only {} of "
          "it; fetch the file again",
          origin, printable(tensor.entry.name), tensor.end, file_bytes, data_bytes);
    covered = tensor.end;
    previous = &tensor;
  }
  if (covered != data_bytes)
    throw_error(ErrorCode::input, "{}: {} trailing bytes after the last tensor: expected a file of {} bytes, found {}",
                origin, data_bytes - covered, data_begin + covered, file_bytes);
}

}  // namespace

std::optional<std::string> text_instead_of_weights(std::string_view prefix) {
  if (prefix.starts_with("version https://git-lfs"))
    return "a Git LFS pointer, not weights; fetch the real file with `git lfs pull` or download it again";
  const auto is_text = [](char c) { return (c >= 0x20 && c < 0x7f) || c == '\n' || c == '\r' || c == '\t'; };
  if (prefix.size() < 8 || !std::all_of(prefix.begin(), prefix.begin() + 8, is_text)) return std::nullopt;
  const size_t start = prefix.find_first_not_of(" \t\r\n");
  if (start != std::string_view::npos && prefix[start] == '<')
    return "a web page, not weights; the download returned an error page, fetch the file again";
  return "text, not weights; fetch the file again";
}

int64_t safetensors_header_bytes(std::string_view prefix, int64_t file_bytes, std::string_view origin) {
  if (file_bytes == 0) throw_error(ErrorCode::input, "{}: the file is empty; fetch it again", origin);
  if (file_bytes < 8 || prefix.size() < 8)
    throw_error(ErrorCode::input,
                "{}: truncated: {} bytes, but the header's length alone takes 8; fetch the file again", origin,
                file_bytes);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(prefix[static_cast<size_t>(i)]);
  const auto room = static_cast<uint64_t>(file_bytes - 8);
  // Eight bytes of text read as a length are far above both limits, so the check for text comes only here.
  if (length > static_cast<uint64_t>(kSafetensorsHeaderBytesMax) || length > room) {
    if (const auto text = text_instead_of_weights(prefix)) throw_error(ErrorCode::input, "{}: {}", origin, *text);
    if (length > static_cast<uint64_t>(kSafetensorsHeaderBytesMax))
      throw_error(ErrorCode::input, "{}: not a safetensors file: header length {} is above the limit of {} bytes",
                  origin, length, kSafetensorsHeaderBytesMax);
    throw_error(ErrorCode::input,
                "{}: truncated: the header has {} bytes, but only {} follow its length; fetch it again", origin, length,
                room);
  }
  if (length < 2)
    throw_error(ErrorCode::input, "{}: not a safetensors file: header length {}, expected at least 2", origin, length);
  if (prefix.size() > 8 && prefix[8] != '{')
    throw_error(ErrorCode::input,
                "{}: not a safetensors file: the header must be a JSON object that starts with {{, found "
                "\"{}\"",
                origin, printable(prefix.substr(8, 1)));
  return static_cast<int64_t>(length);
}

std::vector<TensorEntry> parse_safetensors_header(std::string_view json, int64_t file_bytes, std::string_view origin) {
  // The JSON library would take a NUL as the end of the text and never look behind it.
  if (const size_t nul = json.find('\0'); nul != std::string_view::npos)
    throw_error(ErrorCode::input, "{}: the header is invalid JSON near its byte {}: a NUL", origin, nul);
  HeaderReader reader(origin);
  Json::sax_parse(json.begin(), json.end(), &reader);
  std::vector<Declared> tensors = reader.take_tensors();
  refuse_repeated_names(tensors, origin);
  const auto data_begin = static_cast<int64_t>(json.size()) + 8;
  for (Declared& tensor : tensors) tensor.entry.bytes = checked_bytes(tensor, origin);
  std::sort(tensors.begin(), tensors.end(), [](const Declared& a, const Declared& b) {
    return std::tie(a.begin, a.end, a.entry.name) < std::tie(b.begin, b.end, b.entry.name);
  });
  check_coverage(tensors, data_begin, file_bytes, origin);
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (Declared& tensor : tensors) {
    tensor.entry.offset = data_begin + tensor.begin;
    entries.push_back(std::move(tensor.entry));
  }
  return entries;
}

}  // namespace offload
