#include "core/checkpoint.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <thread>

#include "core/json.h"
#include "counted_heap.h"

namespace offload::checkpoint_test {

namespace fs = std::filesystem;

namespace {

const std::string kData = OFFLOAD_SOURCE_DIR "/tests/data/safetensors/";

// A folder that is gone at the end of the test.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "offload_checkpoint_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }

  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    fs::create_directories(fs::path(*this / name).parent_path());
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }
  // weight_map of (tensor, file) pairs.
  void write_index(const std::vector<std::pair<std::string, std::string>>& places) const {
    Json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", Json::object()}};
    for (const auto& [tensor, file] : places) index["weight_map"][tensor] = file;
    write("model.safetensors.index.json", index.dump());
  }

  std::string path;
};

std::string file_of(const std::string& json, const std::string& data) {
  std::string bytes(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + data;
}

template <typename Element>
std::string bytes_of(const std::vector<Element>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Element)};
}

// A file with one 1-D tensor.
template <typename Element>
std::string single(const std::string& name, const char* dtype, const std::vector<Element>& values) {
  return file_of(fmt::format(R"({{"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[0,{}]}}}})", name, dtype,
                             values.size(), values.size() * sizeof(Element)),
                 bytes_of(values));
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.message().find('\n') == std::string::npos);
    return error.message();
  }
  return "";
}

std::string open_message(const std::string& path) {
  return message_of([&] { Checkpoint::open(path); });
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

std::vector<float> flat(const Json& values) {
  std::vector<float> result;
  if (!values.is_array()) return {values.get<float>()};
  for (const Json& value : values)
    for (const float number : flat(value)) result.push_back(number);
  return result;
}

std::vector<double> read_any(const Checkpoint& checkpoint, const TensorEntry& tensor) {
  if (tensor.dtype == DType::i64) {
    const auto values = checkpoint.read_i64(tensor);
    return {values.begin(), values.end()};
  }
  if (tensor.dtype == DType::u8 || tensor.dtype == DType::i8) {
    std::vector<uint8_t> values(static_cast<size_t>(tensor.bytes));
    checkpoint.read(tensor, 0, std::as_writable_bytes(std::span(values)));
    return {values.begin(), values.end()};
  }
  const auto values = checkpoint.read_as_f32(tensor);
  return {values.begin(), values.end()};
}

// Opens `path` and compares with its row of expected.json; counts time and memory.
void check_row(const std::string& path, const std::string& file_name, const Json& row) {
  CAPTURE(path);
  const int64_t before = heap_bytes();
  restart_heap_peak();
  const auto start = std::chrono::steady_clock::now();
  std::string message;
  std::vector<std::pair<std::string, std::vector<double>>> found;
  int64_t tensors = 0;
  try {
    const Checkpoint checkpoint = Checkpoint::open(path);
    tensors = std::ssize(checkpoint.tensors());
    for (const TensorEntry& tensor : checkpoint.tensors())
      found.emplace_back(tensor.name, read_any(checkpoint, tensor));
  } catch (const Error& error) {
    message = error.message();
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
  CHECK(heap_bytes_most() - before < 64 << 20);
  CAPTURE(message);
  if (row["outcome"] == "reject") {
    CHECK(contains(message, file_name));
    for (const auto& word : row.value("message_names", Json::array())) {
      const auto text = word.get<std::string>();
      // A tensor's name of one letter is in every sentence: ask for it as such.
      CHECK(contains(message, text.size() > 1 ? text : "tensor " + text));
    }
    return;
  }
  CHECK(message == "");
  if (row.contains("tensors")) CHECK(tensors == row["tensors"]);
  if (!row.contains("values")) return;
  CHECK(tensors == std::ssize(row["values"]));
  for (const auto& [found_name, values] : found) {
    const auto& name = found_name;
    CAPTURE(name);
    const auto expected = flat(row["values"][name]);
    CHECK(values == std::vector<double>(expected.begin(), expected.end()));
  }
}

Json expected_rows() {
  return parse_json(read_text_file(kData + "expected.json", 1 << 20), "expected.json");
}

}  // namespace

TEST_CASE("every_case_file_gives_what_its_row_says_within_a_second_and_64_mib") {
  int rows = 0;
  for (const Json& row : expected_rows()) {
    const auto path = row["path"].get<std::string>();
    check_row(kData + path, path.starts_with("index/") ? path.substr(6) : path, row);
    ++rows;
  }
  CHECK(rows == 35);
}

TEST_CASE("every_case_file_gives_the_same_verdict_as_the_only_shard_of_an_index") {
  for (const Json& row : expected_rows()) {
    const auto name = row["path"].get<std::string>();
    if (name.starts_with("index/")) continue;
    const Folder folder;
    fs::create_symlink(kData + name, folder / name);
    std::vector<std::pair<std::string, std::string>> places = {{"w", name}};
    if (row["outcome"] == "accept") {
      places.clear();
      const Checkpoint checkpoint = Checkpoint::open(kData + name);
      for (const TensorEntry& tensor : checkpoint.tensors()) places.emplace_back(tensor.name, name);
    }
    folder.write_index(places);
    check_row(folder.path, name, row);
  }
}

TEST_CASE("git_lfs_pointers_and_error_pages_say_what_they_are_and_what_to_do") {
  CHECK(contains(open_message(kData + "bad_git_lfs_pointer.safetensors"),
                 "a Git LFS pointer, not weights; fetch the real"));
  CHECK(contains(open_message(kData + "bad_html_error_page.safetensors"), "a web page, not weights"));
  const Folder folder;
  folder.write("model.safetensors.index.json", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n");
  CHECK(contains(open_message(folder.path), "model.safetensors.index.json: a Git LFS pointer"));
}

TEST_CASE("headers_that_end_around_any_buffer_edge_parse") {
  // 64 bytes are the prefix that is looked at first; the others are common page and read sizes.
  for (const int64_t edge : {64, 72, 512, 4096, 8192, 65536, 100000, 131072}) {
    for (int64_t length = edge - 17; length <= edge + 9; ++length) {  // so that 8 + length passes the edge, too
      for (const bool padded : {true, false}) {
        CAPTURE(length);
        const auto json = [](std::string_view name) {
          return fmt::format(R"({{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}})", name);
        };
        const int64_t rest = length - std::ssize(json(""));
        if (rest < 0) continue;
        const std::string fill(static_cast<size_t>(rest), padded ? ' ' : 'n');
        const Folder folder;
        const std::string path =
            folder.write("a.safetensors", file_of(padded ? json("") + fill : json(fill), bytes_of<float>({2.5f})));
        const Checkpoint checkpoint = Checkpoint::open(path);
        REQUIRE(checkpoint.tensors().size() == 1);
        CHECK(checkpoint.read_as_f32(checkpoint.at(padded ? "" : fill)) == std::vector<float>{2.5f});
      }
    }
  }
}

TEST_CASE("paths_that_hold_no_checkpoint_say_why") {
  const Folder folder;
  CHECK(open_message(folder / "none") == (folder / "none") + ": No such file or directory");
  CHECK(contains(open_message(""), "No such file"));
  CHECK(contains(open_message(folder.path), "not a model folder: no config.json"));
  folder.write("config.json", "{}");
  CHECK(contains(open_message(folder.path), "no weights: found config.json, but neither model.safetensors.index.json"));
  folder.write("a.gguf", "GGUF");
  CHECK(contains(open_message(folder.path), "holds a.gguf, but GGUF is not supported"));
  folder.write("model-00001-of-00002.safetensors", "");
  CHECK(contains(open_message(folder.path), "holds model-00001-of-00002.safetensors but neither"));
  CHECK(contains(open_message(folder / "config.json"), "config.json: truncated: 2 bytes"));
  CHECK(contains(open_message("/dev/null"), "is a pipe, socket or device"));
}

TEST_CASE("a_gguf_path_says_whether_it_is_one") {
  CHECK(contains(open_message(kData + "bad_magic.gguf"), "bad_magic.gguf: not a GGUF file: it does not start with"));
  const Folder folder;
  for (const char* name : {"a.gguf", "a.bin"})
    CHECK(contains(open_message(folder.write(name, "GGUF\3\0\0\0")), "GGUF is not supported by this build yet"));
  CHECK(contains(open_message(folder.write("e.gguf", "")), "not a GGUF file: it is empty"));
  CHECK(contains(open_message(folder.write("p.gguf", "version https://git-lfs.github.com/spec/v1\n")),
                 "Git LFS pointer"));
}

TEST_CASE("the_systems_refusal_is_passed_on") {
  const Folder folder;
  const std::string path = folder.write("a.safetensors", single<float>("w", "F32", {1}));
  fs::create_directory(folder / "closed");
  fs::permissions(folder.path, fs::perms::all);
  fs::permissions(path, fs::perms::none);
  fs::permissions(folder / "closed", fs::perms::none);
  const bool root = geteuid() == 0;
  if (root && seteuid(65534) != 0) {
    MESSAGE("skipped: root, and the user id cannot be given up");
    return;
  }
  const std::string file_message = open_message(path), folder_message = open_message(folder / "closed");
  if (root) REQUIRE(seteuid(0) == 0);
  fs::permissions(folder / "closed", fs::perms::all);
  CHECK(file_message == path + ": Permission denied");
  CHECK(contains(folder_message, "Permission denied"));
}

TEST_CASE("running_out_of_descriptors_is_a_resource_error") {
  rlimit limit;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  ErrorCode code = ErrorCode::internal;
  try {
    Checkpoint::open(kData + "ok_two_tensors.safetensors");
  } catch (const Error& error) {
    code = error.code();
  }
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK(code == ErrorCode::resource);
}

TEST_CASE("a_folder_with_a_single_file_a_trailing_slash_or_odd_characters_opens") {
  const Folder folder;
  folder.write("mo del \xe6\xa8\xa1/model.safetensors", single<float>("w", "F32", {1, 2}));
  const std::string path = folder / "mo del \xe6\xa8\xa1";
  for (const std::string& spelled : {path, path + "/"}) {
    const Checkpoint checkpoint = Checkpoint::open(spelled);
    CHECK(checkpoint.path() == spelled);
    CHECK(checkpoint.file_path(0) == path + "/model.safetensors");
    CHECK(checkpoint.read_as_f32(checkpoint.at("w")) == std::vector<float>{1, 2});
  }
}

TEST_CASE("all_missing_and_empty_shards_are_named_at_once") {
  const Folder folder;
  folder.write("b.safetensors", single<float>("b", "F32", {1}));
  folder.write("c.safetensors", "");
  folder.write("e.safetensors", "");
  fs::create_symlink(folder / "gone", folder / "f.safetensors");
  folder.write_index({{"a", "a.safetensors"},
                      {"b", "b.safetensors"},
                      {"c", "c.safetensors"},
                      {"d", "sub/d.safetensors"},
                      {"e", "e.safetensors"},
                      {"f", "f.safetensors"}});
  CHECK(contains(open_message(folder.path),
                 "5 of the 6 files it names cannot be used; missing: a.safetensors, f.safetensors, sub/d.safetensors; "
                 "empty: c.safetensors, e.safetensors; fetch them again"));
}

TEST_CASE("tensors_that_the_index_promises_must_be_in_their_shard") {
  const Folder folder;
  folder.write("a.safetensors", single<float>("b", "F32", {1}));
  folder.write_index({{"a", "a.safetensors"}, {"b", "a.safetensors"}, {"c", "a.safetensors"}});
  CHECK(contains(open_message(folder.path),
                 "a.safetensors: lacks 2 tensors that model.safetensors.index.json places in it: a, c"));
}

TEST_CASE("only_tensors_of_the_index_are_visible_and_the_map_decides_between_two_files") {
  const Folder folder;
  folder.write("a.safetensors", single<float>("x", "F32", {1}));
  folder.write("b.safetensors", file_of(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                        R"("extra":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},)"
                                        R"("y":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
                                        bytes_of<float>({2, 3, 4})));
  folder.write("unused.safetensors", "junk");
  folder.write_index({{"x", "a.safetensors"}, {"y", "./b.safetensors"}});
  const Checkpoint checkpoint = Checkpoint::open(folder.path);
  CHECK(checkpoint.files() == 2);
  CHECK(checkpoint.tensors().size() == 2);
  CHECK(checkpoint.read_as_f32(checkpoint.at("x")) == std::vector<float>{1});
  CHECK(checkpoint.read_as_f32(checkpoint.at("y")) == std::vector<float>{4});
  CHECK(checkpoint.find("extra") == nullptr);
  REQUIRE(checkpoint.warnings().size() == 1);
  CHECK(contains(checkpoint.warnings()[0], "b.safetensors: 2 tensors are not in"));
  CHECK(contains(checkpoint.warnings()[0], "left out: extra, x"));
}

TEST_CASE("an_index_cannot_lead_out_of_its_folder_or_hang_the_reader") {
  const Folder folder;
  folder.write("a.safetensors", single<float>("a", "F32", {1}));
  fs::create_directory(folder / "model");
  for (const std::string& place : {std::string("../a.safetensors"), std::string("/etc/passwd"),
                                   std::string("b/../../a"), std::string(".."), std::string("a\0b", 3)}) {
    CAPTURE(place);
    folder.write("model/model.safetensors.index.json", Json{{"weight_map", {{"a", place}}}}.dump());
    CHECK(contains(open_message(folder / "model"), "weight_map places tensor a in"));
  }
  for (const char* index :
       {"[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":"a"})",
        R"({"weight_map":{"a":1}})", R"({"weight_map":{"a":""}})", R"({"weight_map":{"a":null}})"}) {
    CAPTURE(index);
    folder.write("model/model.safetensors.index.json", index);
    CHECK(contains(open_message(folder / "model"), "model.safetensors.index.json: weight_map must"));
  }
  folder.write("model/model.safetensors.index.json", R"({"weight_map":{"a":"x","a":"y"}})");
  CHECK(contains(open_message(folder / "model"), "duplicate JSON key \"a\""));
  folder.write("model/model.safetensors.index.json", "");
  CHECK(contains(open_message(folder / "model"), "model.safetensors.index.json: invalid JSON"));
  folder.write("model/model.safetensors.index.json", R"({"weight_map":{"a":"pipe"}})");
  REQUIRE(mkfifo((folder / "model/pipe").c_str(), 0600) == 0);
  CHECK(contains(open_message(folder / "model"), "pipe: is a pipe, socket or device, expected a regular file"));
  folder.write("model/model.safetensors.index.json", R"({"weight_map":{"a":"."}})");
  CHECK(contains(open_message(folder / "model"), "is a folder"));
}

TEST_CASE("symbolic_links_into_a_hub_cache_work") {
  const Folder folder;
  folder.write("blobs/0123", single<float>("a", "F32", {7}));
  fs::create_directories(folder / "snapshots/main");
  fs::create_symlink("../../blobs/0123", folder / "snapshots/main/model-00001-of-00001.safetensors");
  folder.write("blobs/4567", R"({"weight_map":{"a":"model-00001-of-00001.safetensors"}})");
  fs::create_symlink("../../blobs/4567", folder / "snapshots/main/model.safetensors.index.json");
  const Checkpoint checkpoint = Checkpoint::open(folder / "snapshots/main");
  CHECK(checkpoint.read_as_f32(checkpoint.at("a")) == std::vector<float>{7});
}

TEST_CASE("a_missing_tensor_is_named_with_the_folder_and_the_nearest_names") {
  const Folder folder;
  folder.write("model.safetensors", single<float>("model.layers.0.mlp.gate.weight", "F32", {1}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path);
  CHECK(message_of([&] { checkpoint.at("layers.0.mlp.gate.weight"); }) ==
        folder.path +
            ": tensor layers.0.mlp.gate.weight is missing; the nearest names are model.layers.0.mlp.gate.weight");
}

TEST_CASE("reads_return_the_asked_bytes_and_touch_nothing_else") {
  const Folder folder;
  std::vector<uint8_t> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  const Checkpoint checkpoint = Checkpoint::open(folder.write("a.safetensors", single("w", "U8", bytes)));
  const TensorEntry& tensor = checkpoint.at("w");
  for (const auto& [begin, count] : {std::pair<size_t, size_t>(0, 1000), {0, 0}, {1000, 0}, {999, 1}, {3, 500}}) {
    std::vector<uint8_t> out(count + 2, 0xa5);
    checkpoint.read(tensor, static_cast<int64_t>(begin), std::as_writable_bytes(std::span(out).subspan(1, count)));
    CHECK((out.front() == 0xa5 && out.back() == 0xa5));
    CHECK(std::equal(out.begin() + 1, out.end() - 1, bytes.begin() + static_cast<ptrdiff_t>(begin)));
  }
  CHECK((fcntl(checkpoint.file_descriptor(0), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("a_file_cut_after_opening_is_an_error_that_names_file_tensor_and_offset") {
  const Folder folder;
  const std::string path = folder.write("a.safetensors", single<float>("w", "F32", {1, 2, 3}));
  const Checkpoint checkpoint = Checkpoint::open(path);
  const TensorEntry& tensor = checkpoint.at("w");
  fs::resize_file(path, static_cast<uintmax_t>(tensor.offset + 9));
  CHECK(message_of([&] { checkpoint.read_as_f32(tensor); }) ==
        fmt::format("{}: reading 12 bytes of tensor w at byte {} of the file failed: the file ends 3 bytes early", path,
                    tensor.offset));
  std::vector<std::byte> out(8);
  checkpoint.read(tensor, 0, out);
}

TEST_CASE("files_close_with_the_checkpoint_and_when_opening_fails") {
  const auto open_files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  const auto before = open_files();
  {
    Checkpoint checkpoint = Checkpoint::open(kData + "index/ok_two_shards");
    CHECK(open_files() == before + 2);
    Checkpoint moved = std::move(checkpoint);
    CHECK(moved.read_as_f32(moved.at("model.norm.weight")) == std::vector<float>{3, 4});
    moved = Checkpoint::open(kData + "ok_two_tensors.safetensors");
    CHECK(open_files() == before + 1);
  }
  open_message(kData + "index/bad_zero_byte_shard");
  open_message(kData + "bad_overlap.safetensors");
  CHECK(open_files() == before);
}

TEST_CASE("float_tensors_convert_with_one_rounding_at_every_chunk_edge") {
  const Folder folder;
  // 64 KiB chunks: 16384 F32, 32768 BF16 or F16, 8192 F64 elements.
  for (const size_t count : {0, 1, 8191, 8192, 8193, 16383, 16384, 16385, 32767, 32768, 32769, 70000}) {
    CAPTURE(count);
    std::vector<float> f32(count);
    std::vector<bf16> b16(count);
    std::vector<fp16> h16(count);
    std::vector<double> f64(count);
    for (size_t i = 0; i < count; ++i) {
      f64[i] = (i % 2 ? 1.0 : -1.0) * (1.0 + static_cast<double>(i) / 8192 + 0x1p-40);
      f32[i] = static_cast<float>(f64[i]);
      b16[i] = to_bf16(f32[i]);
      h16[i] = to_fp16(f32[i]);
    }
    const auto opened = [&](const std::string& bytes) {
      return Checkpoint::open(folder.write("a.safetensors", bytes));
    };
    const auto check = [&](const Checkpoint& checkpoint, auto&& as_f32, auto&& as_bf16) {
      const auto floats = checkpoint.read_as_f32(checkpoint.at("w"));
      const auto halves = checkpoint.read_as_bf16(checkpoint.at("w"));
      REQUIRE((floats.size() == count && halves.size() == count));
      for (size_t i = 0; i < count; ++i) REQUIRE((floats[i] == as_f32(i) && halves[i] == as_bf16(i)));
    };
    check(
        opened(single("w", "F32", f32)), [&](size_t i) { return f32[i]; }, [&](size_t i) { return b16[i]; });
    check(
        opened(single("w", "BF16", b16)), [&](size_t i) { return to_float(b16[i]); }, [&](size_t i) { return b16[i]; });
    check(
        opened(single("w", "F16", h16)), [&](size_t i) { return to_float(h16[i]); },
        [&](size_t i) { return to_bf16(to_float(h16[i])); });
    check(
        opened(single("w", "F64", f64)), [&](size_t i) { return f32[i]; },
        [&](size_t i) { return to_bf16(to_float_odd(f64[i])); });
  }
  const Checkpoint tie =
      Checkpoint::open(folder.write("t.safetensors", single<double>("w", "F64", {1 + 0x1p-8 + 0x1p-40})));
  CHECK(tie.read_as_bf16(tie.at("w"))[0].bits == 0x3f81);
}

TEST_CASE("i64_tensors_come_bit_for_bit_and_never_as_floats") {
  const Folder folder;
  const std::vector<int64_t> values = {24'000'000'000'001, -1, INT64_MIN, INT64_MAX, (int64_t{1} << 53) + 1};
  const Checkpoint checkpoint = Checkpoint::open(folder.write("a.safetensors", single("w", "I64", values)));
  CHECK(checkpoint.read_i64(checkpoint.at("w")) == values);
  CHECK(
      contains(message_of([&] { checkpoint.read_as_f32(checkpoint.at("w")); }), "tensor w is I64, expected F32, BF16"));
  CHECK(contains(message_of([&] { checkpoint.read_as_bf16(checkpoint.at("w")); }),
                 "tensor w is I64, expected F32, BF16"));
  const Checkpoint floats = Checkpoint::open(kData + "ok_two_tensors.safetensors");
  CHECK(contains(message_of([&] { floats.read_i64(floats.at("w")); }), "tensor w is F32, expected I64"));
}

TEST_CASE("threads_read_one_checkpoint_at_once") {
  const Folder folder;
  std::vector<int64_t> values(100000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int64_t>(i);
  const Checkpoint checkpoint = Checkpoint::open(folder.write("a.safetensors", single("w", "I64", values)));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      for (int64_t i = thread; i < 2000; ++i) {
        std::vector<int64_t> out(49);
        const int64_t first = i * 49;
        checkpoint.read(checkpoint.at("w"), first * 8, std::as_writable_bytes(std::span(out)));
        for (size_t k = 0; k < out.size(); ++k) wrong += out[k] != first + static_cast<int64_t>(k);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("a_header_of_100000_tensors_opens_in_linear_time_and_bounded_memory") {
  const auto seconds = [](int count, int64_t& peak, int64_t& header_bytes) {
    const Folder folder;
    std::string json = "{";
    for (int i = 0; i < count; ++i)
      json += fmt::format(R"({}"model.language_model.layers.{}.mlp.experts.{}.gate_proj.weight":)"
                          R"({{"dtype":"BF16","shape":[1,1],"data_offsets":[{},{}]}})",
                          i ? "," : "", i / 512, i % 512, 2 * i, 2 * i + 2);
    json += "}";
    header_bytes = std::ssize(json);
    folder.write("model.safetensors", file_of(json, std::string(static_cast<size_t>(2 * count), '\1')));
    json = {};
    const int64_t before = heap_bytes();
    restart_heap_peak();
    const auto start = std::chrono::steady_clock::now();
    const Checkpoint checkpoint = Checkpoint::open(folder.path);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    peak = heap_bytes_most() - before;
    CHECK(std::ssize(checkpoint.tensors()) == count);
    CHECK(checkpoint.find("model.language_model.layers.1.mlp.experts.7.gate_proj.weight") != nullptr);
    return elapsed.count();
  };
  int64_t peak = 0, header_bytes = 0;
  const double tenth = seconds(10000, peak, header_bytes);
  const double whole = seconds(100000, peak, header_bytes);
  MESSAGE("100000 tensors, header bytes=" << header_bytes << " open_s=" << whole << " (10000: " << tenth
                                          << ") heap_bytes_max=" << peak);
  CHECK(whole < 5);  // quadratic work would take minutes
  CHECK(peak < header_bytes + (int64_t{64} << 20));
}

}  // namespace offload::checkpoint_test
