// RamTable: the same bytes on every way of reading, and nothing left of a load that failed.
#include "offload/host_table.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <numeric>

#include "synthetic_checkpoint.h"

namespace offload::host_table_test {

namespace {

constexpr int64_t kColumns = 20;
const std::string kStem = "layers.2.ple.table";

// Row r of the table is `bytes`[r * row_bytes, ...). Parts of uneven heights, one of them empty, in two files.
struct StoredTable {
  TemporaryFolder folder;
  std::vector<char> bytes;
  int64_t rows = 0;

  StoredTable() {
    const std::vector<int64_t> heights = {700, 0, 3, 4000, 1};
    rows = std::accumulate(heights.begin(), heights.end(), int64_t{0});
    Json index = {{"metadata", Json::object()}, {"weight_map", Json::object()}};
    for (int file = 0; file < 2; ++file) {
      Json header = Json::object();
      std::vector<char> content;
      for (size_t k = 0; k < heights.size(); ++k) {
        if ((k < 3) != (file == 0)) continue;
        const std::string name = fmt::format("{}.shard_{}.weight", kStem, k);
        std::vector<char> part(static_cast<size_t>(heights[k] * kColumns * 2));
        fill_synthetic(name, part);
        header[name] = {{"dtype", "BF16"},
                        {"shape", {heights[k], kColumns}},
                        {"data_offsets", {content.size(), content.size() + part.size()}}};
        content.insert(content.end(), part.begin(), part.end());
        bytes.insert(bytes.end(), part.begin(), part.end());
        index["weight_map"][name] = file_name(file);
      }
      std::string text = header.dump();
      if (text.size() % 2 == 0) text += ' ';  // data at an odd offset
      const uint64_t size = text.size();
      std::ofstream out(folder.path(file_name(file)), std::ios::binary);
      out.write(reinterpret_cast<const char*>(&size), sizeof size);
      out << text;
      out.write(content.data(), std::ssize(content));
    }
    std::ofstream(folder.path("model.safetensors.index.json")) << index.dump();
  }
  static std::string file_name(int file) { return fmt::format("model-{}.safetensors", file); }
};

DirectReaderOptions small_reads(bool uring, bool direct) {
  return {.use_uring = uring, .use_direct = direct, .threads = 2, .queue_depth = 4, .chunk_bytes = 16 << 10};
}

struct OpenTable {
  Checkpoint checkpoint;
  TextTensors tensors;
  std::unique_ptr<WeightSource> source;
  explicit OpenTable(const StoredTable& stored)
      : checkpoint(Checkpoint::open(stored.folder.path())),
        tensors(checkpoint.tensors(), checkpoint.path()),
        source(checkpoint_source(checkpoint, tensors)) {}
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "no error";
}

std::vector<std::byte> all_rows(RamTable& table) {
  std::vector<int64_t> ids(static_cast<size_t>(table.rows()));
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::byte> out(static_cast<size_t>(table.bytes()));
  table.gather(ids, out);
  return out;
}

}  // namespace

TEST_CASE("a_table_has_the_rows_of_its_parts_on_every_way_of_reading_them") {
  const StoredTable stored;
  const OpenTable open(stored);
  for (const bool uring : {true, false})
    for (const bool direct : {true, false}) {
      CAPTURE(uring);
      CAPTURE(direct);
      RamTable table(*open.source, kStem, stored.rows, kColumns);
      int64_t told = 0;
      table.load(small_reads(uring, direct), [&](int64_t bytes) { told += bytes; });
      CHECK(told == table.bytes());
      CHECK(table.read_report().reads > 4);
      CHECK((uring || !table.read_report().used_uring));
      CHECK((direct || !table.read_report().used_direct));
      const std::vector<std::byte> rows = all_rows(table);
      REQUIRE(rows.size() == stored.bytes.size());
      CHECK(std::memcmp(rows.data(), stored.bytes.data(), rows.size()) == 0);
      const int64_t ids[] = {4703, 0, 700, 700};
      std::vector<std::byte> out(4 * kColumns * 2);
      table.gather(ids, out);
      for (size_t i = 0; i < 4; ++i)
        CHECK(std::memcmp(out.data() + i * kColumns * 2, stored.bytes.data() + ids[i] * kColumns * 2, kColumns * 2) ==
              0);
    }
}

TEST_CASE("a_failed_read_a_short_file_and_a_stop_end_the_load_and_a_later_one_works") {
  const StoredTable stored;
  const OpenTable open(stored);
  RamTable table(*open.source, kStem, stored.rows, kColumns);
  for (const bool uring : {true, false}) {
    DirectReaderOptions broken = small_reads(uring, true);
    broken.fault = [](int64_t n) { return n == 3 ? EIO : 0; };
    const std::string message = error_of([&] { table.load(broken, {}); });
    CHECK(message.find(kStem + ".shard_") != std::string::npos);
    CHECK(message.find("Input/output error") != std::string::npos);
    const auto stop = [](int64_t) { throw Error(ErrorCode::interrupted, "stop"); };
    CHECK(error_of([&] { table.load(small_reads(uring, true), stop); }) == "stop");
    table.load(small_reads(uring, true), {});
    CHECK(std::memcmp(all_rows(table).data(), stored.bytes.data(), stored.bytes.size()) == 0);
  }
  const std::string file = stored.folder.path(StoredTable::file_name(1));
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 10);
  const std::string message = error_of([&] { table.load(small_reads(true, true), {}); });
  CHECK(message.find(file) != std::string::npos);
  CHECK(message.find("the file ends here") != std::string::npos);
}

TEST_CASE("a_made_up_table_is_the_same_for_any_number_of_threads") {
  const std::unique_ptr<WeightSource> source = dummy_source(3);
  constexpr int64_t kRows = 300'000;  // more than one piece
  std::vector<std::byte> expected(kRows * kColumns * 2);
  const int64_t shape[] = {kRows, kColumns};
  source->read(source->require(kStem + ".weight", shape), 0, expected);
  for (const int threads : {1, 3}) {
    RamTable table(*source, kStem, kRows, kColumns);
    int64_t told = 0;
    table.load({.threads = threads}, [&](int64_t bytes) { told += bytes; });
    CHECK(told == table.bytes());
    CHECK(table.read_report().reads == 0);
    CHECK(all_rows(table) == expected);
  }
}

}  // namespace offload::host_table_test
