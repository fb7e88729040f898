// JSON from disk, the network or the user, read as hostile input.
//
// Json sorts keys; OrderedJson keeps the order of the text (chat templates need it) but looks keys up linearly, so it
// is not for objects with thousands of keys. Thread-safe: no state.
#ifndef OFFLOAD_CORE_JSON_H_
#define OFFLOAD_CORE_JSON_H_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/base.h"

namespace offload {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Nesting above this is refused: no checkpoint, request or template variable needs it.
inline constexpr int kJsonDepthMax = 200;

// Parses one JSON document. `origin` (a file name, "request body") opens every message. Throws Error{input} on a syntax
// error, a depth above kJsonDepthMax, invalid UTF-8 or a key that an object holds twice.
Json parse_json(std::string_view text, std::string_view origin);
OrderedJson parse_ordered_json(std::string_view text, std::string_view origin);

// What a message of the JSON library says, without its own names and position: "[json.exception.parse_error.101] parse
// error at line 1, column 2: syntax error ..." is "syntax error ...". Other text is left as it is.
std::string json_error_text(std::string_view message);

// Whole content of a small text file. Throws Error{input} naming the path and the system's reason, or the size when the
// file is larger than `bytes_max`.
std::string read_text_file(const std::string& path, int64_t bytes_max);
// Whether the name stands in its folder: a link that leads nowhere counts, which read_text_file() then refuses in
// words.
bool is_listed(const std::string& path);

// json[key] as T, or `fallback` when the key is absent or null. Throws Error{input} naming origin, key, the expected
// and the found type when the value is of another type.
template <typename T>
T json_get(const Json& json, const char* key, T fallback, std::string_view origin);

}  // namespace offload

#endif  // OFFLOAD_CORE_JSON_H_
