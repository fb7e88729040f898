#include "core/json.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <vector>

namespace offload {
namespace {

// Forwards events to the library's own DOM builder and refuses what it would accept: deep nesting and repeated keys.
template <typename AnyJson>
class StrictBuilder final : public nlohmann::json_sax<AnyJson> {
  using Base = nlohmann::json_sax<AnyJson>;
  using string_t = typename Base::string_t;

 public:
  StrictBuilder(AnyJson& root, std::string_view origin) : dom_(root, false), origin_(origin) {}

  bool null() override { return dom_.null(); }
  bool boolean(bool value) override { return dom_.boolean(value); }
  bool number_integer(typename Base::number_integer_t value) override { return dom_.number_integer(value); }
  bool number_unsigned(typename Base::number_unsigned_t value) override { return dom_.number_unsigned(value); }
  bool number_float(typename Base::number_float_t value, const string_t& text) override {
    if (!std::isfinite(value)) throw_error(ErrorCode::input, "{}: JSON number {} is out of range", origin_, text);
    return dom_.number_float(value, text);
  }
  bool string(string_t& value) override { return dom_.string(value); }
  bool binary(typename Base::binary_t& value) override { return dom_.binary(value); }

  bool start_object(size_t) override {
    enter();
    keys_.emplace_back();
    return dom_.start_object(static_cast<size_t>(-1));
  }
  bool key(string_t& value) override {
    if (!keys_.back().insert(value).second)
      throw_error(ErrorCode::input, "{}: duplicate JSON key \"{}\"", origin_, printable(value));
    return dom_.key(value);
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return dom_.end_object();
  }
  bool start_array(size_t) override {
    enter();
    return dom_.start_array(static_cast<size_t>(-1));
  }
  bool end_array() override {
    --depth_;
    return dom_.end_array();
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    throw_error(ErrorCode::input, "{}: invalid JSON near byte {}: {}", origin_, position,
                printable(json_error_text(error.what())));
  }

 private:
  void enter() {
    if (++depth_ > kJsonDepthMax)
      throw_error(ErrorCode::input, "{}: JSON nested deeper than {} levels", origin_, kJsonDepthMax);
  }

  nlohmann::detail::json_sax_dom_parser<AnyJson> dom_;
  std::string_view origin_;
  std::vector<std::set<string_t>> keys_;
  int depth_ = 0;
};

template <typename AnyJson>
AnyJson parse_strict(std::string_view text, std::string_view origin) {
  // The library's lexer takes a NUL for the end of the text and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw_error(ErrorCode::input, "{}: invalid JSON near byte {}: a NUL byte", origin, nul);
  AnyJson root;
  StrictBuilder<AnyJson> builder(root, origin);
  AnyJson::sax_parse(text.begin(), text.end(), &builder);
  return root;
}

}  // namespace

std::string json_error_text(std::string_view message) {
  if (!message.starts_with("[json.exception.")) return std::string(message);
  message.remove_prefix(std::min(message.find("] "), message.size() - 2) + 2);
  const size_t colon = message.starts_with("parse error") ? message.find(": ") : std::string_view::npos;
  return std::string(colon == std::string_view::npos ? message : message.substr(colon + 2));
}

Json parse_json(std::string_view text, std::string_view origin) {
  return parse_strict<Json>(text, origin);
}

OrderedJson parse_ordered_json(std::string_view text, std::string_view origin) {
  return parse_strict<OrderedJson>(text, origin);
}

bool is_listed(const std::string& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

std::string read_text_file(const std::string& path, int64_t bytes_max) {
  // Opened without blocking and checked, so that a named pipe in a model folder cannot hang the load.
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status {};
  if (descriptor < 0 || fstat(descriptor, &status) != 0)
    throw_error(ErrorCode::input, "{}: {}", printable(path, 4096), std::strerror(errno));
  std::unique_ptr<std::FILE, Close> file(fdopen(descriptor, "rb"));
  if (!S_ISREG(status.st_mode)) throw_error(ErrorCode::input, "{}: not a regular file", printable(path, 4096));
  std::string text;
  char buffer[1 << 16];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
    text.append(buffer, count);
    if (static_cast<int64_t>(text.size()) > bytes_max)
      throw_error(ErrorCode::input, "{}: larger than the {} bytes allowed here", printable(path, 4096), bytes_max);
  }
  if (std::ferror(file.get())) throw_error(ErrorCode::input, "{}: {}", printable(path, 4096), std::strerror(errno));
  return text;
}

namespace {

template <typename T>
bool holds(const Json& value) {
  if constexpr (std::is_same_v<T, bool>) return value.is_boolean();
  if constexpr (std::is_same_v<T, std::string>) return value.is_string();
  if constexpr (std::is_same_v<T, double>) return value.is_number();
  if constexpr (std::is_same_v<T, int64_t>)
    return value.is_number_integer() &&
           (!value.is_number_unsigned() ||
            value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
}

template <typename T>
const char* type_name() {
  if constexpr (std::is_same_v<T, bool>) return "a boolean";
  if constexpr (std::is_same_v<T, std::string>) return "a string";
  if constexpr (std::is_same_v<T, double>) return "a number";
  if constexpr (std::is_same_v<T, int64_t>) return "an integer";
}

}  // namespace

template <typename T>
T json_get(const Json& json, const char* key, T fallback, std::string_view origin) {
  const auto found = json.find(key);
  if (found == json.end() || found->is_null()) return fallback;
  if (!holds<T>(*found))
    throw_error(ErrorCode::input, "{}: {} must be {}, found {}", origin, key, type_name<T>(),
                printable(found->dump(-1, ' ', false, Json::error_handler_t::replace)));
  return found->template get<T>();
}

template bool json_get(const Json&, const char*, bool, std::string_view);
template std::string json_get(const Json&, const char*, std::string, std::string_view);
template double json_get(const Json&, const char*, double, std::string_view);
template int64_t json_get(const Json&, const char*, int64_t, std::string_view);

}  // namespace offload
