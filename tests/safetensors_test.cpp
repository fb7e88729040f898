#include "core/safetensors.h"

#include <doctest/doctest.h>

namespace offload::safetensors_test {

namespace {

// The message of the Error that a header with `data_bytes` bytes behind it gives, or "" when it is accepted.
std::string refusal(std::string_view json, int64_t data_bytes) {
  try {
    parse_safetensors_header(json, 8 + static_cast<int64_t>(json.size()) + data_bytes, "f");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    return error.message();
  }
  return "";
}

std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"({{"w":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})", dtype, shape, offsets);
}

std::string length_prefix(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

std::string length_refusal(std::string_view file, int64_t file_bytes) {
  try {
    safetensors_header_bytes(file.substr(0, kFilePrefixBytes), file_bytes, "f");
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

}  // namespace

TEST_CASE("tensors_come_in_file_order_with_offsets_from_the_start_of_the_file") {
  const std::string json =
      R"({"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},"__metadata__":{"format":"pt"},)"
      R"("s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("z":{"dtype":"I64","shape":[3,0],"data_offsets":[12,12]}}   )";
  const auto tensors = parse_safetensors_header(json, 8 + std::ssize(json) + 12, "f");
  REQUIRE(tensors.size() == 3);
  const int64_t data = 8 + std::ssize(json);
  CHECK((tensors[0].name == "s" && tensors[0].shape.empty() && tensors[0].offset == data && tensors[0].bytes == 4));
  CHECK((tensors[1].name == "b" && tensors[1].dtype == DType::bf16 && tensors[1].offset == data + 4));
  CHECK(tensors[1].shape == std::vector<int64_t>{2, 2});
  CHECK((tensors[2].name == "z" && tensors[2].bytes == 0 && tensors[2].offset == data + 12));
}

TEST_CASE("every_byte_sized_type_is_read_and_sub_byte_types_are_refused_by_name") {
  for (int i = 0; i < kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const int64_t bytes = 3 * dtype_bytes(dtype);
    CHECK(refusal(one(dtype_name(dtype), "[3]", fmt::format("[0,{}]", bytes)), bytes) == "");
  }
  for (const char* name : {"F4", "F6_E2M3", "F6_E3M2"})
    CHECK(refusal(one(name, "[2]", "[0,1]"), 1).find(fmt::format("tensor w: dtype \"{}\" is not supported", name)) !=
          std::string::npos);
}

TEST_CASE("a_header_without_tensors_is_legal_when_no_data_follows") {
  CHECK(refusal("{}", 0) == "");
  CHECK(refusal(R"({"__metadata__":null})", 0) == "");
  CHECK(refusal("{}", 1) == "f: 1 trailing bytes after the last tensor: expected a file of 10 bytes, found 11");
}

TEST_CASE("keys_of_a_later_format_are_passed_over") {
  CHECK(refusal(R"({"w":{"dtype":"U8","x":null,"y":{"shape":[{}],"dtype":[1.5,-1,"a"]},"shape":[1],"z":[[]],)"
                R"("data_offsets":[0,1],"x":true}})",
                1) == "");
}

TEST_CASE("each_malformed_header_is_refused_by_tensor_and_reason") {
  const struct {
    std::string json;
    int64_t data_bytes;
    const char* message;
  } cases[] = {
      {"[]", 0, "JSON must be an object, found an array"},
      {"3", 0, "JSON must be an object, found a number"},
      {"\"a\"", 0, "JSON must be an object, found a string"},
      {"{", 0, "invalid JSON near its byte"},
      {"{}x", 0, "invalid JSON near its byte"},
      {"{} {}", 0, "invalid JSON near its byte"},
      {"{/**/}", 0, "invalid JSON near its byte"},
      {std::string("{}\0{", 4), 0, "invalid JSON near its byte 2: a NUL"},
      {"{\"\xff\":1}", 0, "invalid JSON near its byte"},
      {R"({"w":1})", 0, "tensor w must be an object, found a number"},
      {R"({"w":null})", 0, "tensor w must be an object, found null"},
      {R"({"w":[]})", 0, "tensor w must be an object, found an array"},
      {R"({"w":{}})", 0, "tensor w: dtype is missing"},
      {R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1, "tensor w: shape is missing"},
      {R"({"w":{"dtype":"U8","shape":[1]}})", 1, "tensor w: data_offsets is missing"},
      {R"({"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "tensor w: duplicate key dtype"},
      {R"({"w":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "tensor w: dtype must be a string, found a number"},
      {R"({"w":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})", 1, "dtype must be a string, found an array"},
      {one("U8", "1", "[0,1]"), 1, "tensor w: shape must be a list of sizes, found a number"},
      {one("U8", "[[1]]", "[0,1]"), 1, "tensor w: shape must be a list of sizes, found an array"},
      {one("U8", "[-1]", "[0,1]"), 1, "tensor w: shape must be a list of sizes, found a negative number"},
      {one("U8", "[1.0]", "[0,1]"), 1, "tensor w: shape must be a list of sizes, found a number that is no integer"},
      {one("U8", "[1e999]", "[0,1]"), 1, "invalid JSON"},
      {one("U8", "[9223372036854775808]", "[0,1]"), 1, "shape must be a list of sizes, found a number above 2^63 - 1"},
      {one("U8", "[18446744073709551616]", "[0,1]"), 1, "found a number that is no integer"},
      {one("U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,1]"), 1,
       "tensor w: shape must be a list of sizes, found more"},
      {one("U8", "[4294967296,4294967296]", "[0,0]"), 0,
       "tensor w: shape [4294967296, 4294967296] is larger than 2^63"},
      {one("F64", "[9223372036854775807]", "[0,8]"), 8, "tensor w: shape [9223372036854775807] is larger than 2^63"},
      {one("F64", "[2305843009213693952,2,4]", "[0,0]"), 0, "is larger than 2^63"},
      {one("F32", "[2]", "[0,4]"), 4, "tensor w: F32 [2] needs 8 bytes, but data_offsets [0, 4] hold 4"},
      {one("F32", "[0]", "[0,4]"), 4, "tensor w: F32 [0] needs 0 bytes, but data_offsets [0, 4] hold 4"},
      {one("U8", "[1]", "{}"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found an object"},
      {one("U8", "[1]", "[]"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found 0 numbers"},
      {one("U8", "[1]", "[1]"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found 1 numbers"},
      {one("U8", "[1]", "[0,1,1]"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found more than two"},
      {one("U8", "[1]", "[0,true]"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found a boolean"},
      {one("U8", "[1]", "[1,0]"), 1, "tensor w: data_offsets [1, 0] end before they begin"},
      {one("U8", "[1]", "[-1,0]"), 1, "tensor w: data_offsets must be [begin, end] in bytes, found a negative number"},
      {one("U8", "[1]", "[9223372036854775806,9223372036854775807]"), 1,
       "a gap of 9223372036854775806 bytes before tensor w"},
      {one("U8", "[9223372036854775807]", "[0,9223372036854775807]"), 1,
       "truncated: tensor w ends at byte 9223372036854"},
      {one("U8", "[2]", "[0,2]"), 1, "f: truncated: tensor w ends at byte 2 of the data section"},
      {one("U8", "[1]", "[0,1]"), 3, "2 trailing bytes after the last tensor"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__ must be an object of strings, found a number"},
      {R"({"__metadata__":{"a":{}}})", 0, "__metadata__ must be an object of strings, found an object"},
      {R"({"__metadata__":{"a":["b"]}})", 0, "__metadata__ must be an object of strings, found an array"},
      {R"({"__metadata__":{"a":null}})", 0, "__metadata__ must be an object of strings, found null"},
      {R"({"__metadata__":"a"})", 0, "__metadata__ must be an object of strings, found a string"},
      {R"({"__metadata__":[]})", 0, "__metadata__ must be an object of strings, found an array"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "duplicate __metadata__"},
      {R"({"__metadata__":{"a":"b","c":"d","a":"e"}})", 0, "duplicate key \"a\" in __metadata__"},
  };
  for (const auto& test : cases) {
    const std::string message = refusal(test.json, test.data_bytes);
    CAPTURE(test.json);
    CAPTURE(message);
    CHECK(message.starts_with("f: "));
    CHECK(message.find(test.message) != std::string::npos);
  }
}

TEST_CASE("overlap_gap_and_duplicates_name_the_tensors") {
  const auto two = [](std::string_view name, std::string_view offsets, int bytes) {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},)"
                       R"("{}":{{"dtype":"U8","shape":[{}],"data_offsets":{}}}}})",
                       name, bytes, offsets);
  };
  CHECK(refusal(two("b", "[4,8]", 4), 8) == "");
  CHECK(refusal(two("b", "[3,7]", 4), 7) == "f: tensors a and b overlap at byte 3 of the data section");
  CHECK(refusal(two("b", "[0,4]", 4), 4) == "f: tensors a and b overlap at byte 0 of the data section");
  CHECK(refusal(two("b", "[2,2]", 0), 4) == "f: tensors a and b overlap at byte 2 of the data section");
  CHECK(refusal(two("b", "[5,9]", 4), 9) == "f: a gap of 1 bytes before tensor b, whose data_offsets are [5, 9]");
  CHECK(refusal(two("a", "[4,8]", 4), 8) == "f: duplicate tensor a in the header");
  CHECK(refusal(two("\\u0061", "[4,8]", 4), 8) == "f: duplicate tensor a in the header");
}

TEST_CASE("a_name_cannot_break_the_line_of_its_message") {
  CHECK(refusal(R"({"a\n\u001b[2J":{}})", 0).find("tensor a\\x0a\\x1b[2J: dtype is missing") != std::string::npos);
}

TEST_CASE("a_million_nested_containers_cost_no_stack") {
  const std::string deep(1'000'000, '[');
  CHECK(refusal(R"({"w":{"x":)" + deep, 0).find("invalid JSON") != std::string::npos);
  CHECK(refusal(R"({"w":{"x":)" + deep + std::string(deep.size(), ']') + "}}", 0).find("dtype is missing") !=
        std::string::npos);
}

TEST_CASE("the_length_is_checked_against_limit_and_file_before_use") {
  CHECK(safetensors_header_bytes(length_prefix(2) + "{}", 10, "f") == 2);
  CHECK(safetensors_header_bytes(length_prefix(100'000'000) + "{", 100'000'008, "f") == 100'000'000);
  CHECK(length_refusal(length_prefix(100'000'001) + "{", 100'000'009).find("header length 100000001 is above") !=
        std::string::npos);
  CHECK(length_refusal(length_prefix(~0ull) + "{}", 10).find("header length 18446744073709551615") !=
        std::string::npos);
  CHECK(length_refusal(length_prefix(3) + "{}", 10).find("truncated: the header has 3 bytes, but only 2 follow") !=
        std::string::npos);
  CHECK(length_refusal(length_prefix(0), 8).find("header length 0") != std::string::npos);
  CHECK(length_refusal(length_prefix(1) + "{", 9).find("header length 1") != std::string::npos);
  CHECK(length_refusal("", 0) == "f: the file is empty; fetch it again");
  for (int64_t bytes = 1; bytes < 8; ++bytes)
    CHECK(length_refusal(std::string(static_cast<size_t>(bytes), '\0'), bytes).find("truncated") != std::string::npos);
}

TEST_CASE("text_in_place_of_weights_is_named_with_its_remedy") {
  const auto said = [](std::string_view text) { return length_refusal(text, std::ssize(text)); };
  CHECK(said("version https://git-lfs.github.com/spec/v1\noid sha256:00\n").find("a Git LFS pointer") !=
        std::string::npos);
  CHECK(said("\n\n  <!doctype html><html></html>").find("a web page") != std::string::npos);
  CHECK(said("Access denied").find("text, not weights") != std::string::npos);
  CHECK(said("{\"error\":\"not found\"}").find("text, not weights") != std::string::npos);
  CHECK(said("PK\x03\x04\x14\x08\x08\x08 not text").find("header length") != std::string::npos);
}

}  // namespace offload::safetensors_test
