#include "offload/direct_reader.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "core/checkpoint.h"
#include "synthetic_checkpoint.h"

namespace offload::direct_reader_test {
namespace fs = std::filesystem;

namespace {

std::vector<char> noise(size_t bytes, const std::string& name) {
  std::vector<char> out(bytes);
  fill_synthetic(name, out);
  return out;
}

// Files of the given sizes, open, with what they hold.
struct Files {
  Files(const std::string& folder, std::initializer_list<size_t> sizes) {
    for (const size_t size : sizes) {
      const std::string path = fmt::format("{}/f{}", folder, read_files.size());
      content.push_back(noise(size, path));
      std::ofstream(path, std::ios::binary).write(content.back().data(), static_cast<std::streamsize>(size));
      descriptors.emplace_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      read_files.push_back({path, descriptors.back().get()});
    }
  }
  std::vector<std::vector<char>> content;
  std::vector<FileDescriptor> descriptors;
  std::vector<ReadFile> read_files;
};

// A request with memory of its own between guard bytes.
struct Target {
  Target(const ReadRequest& wanted, const std::vector<char>& file)
      : request(wanted), memory(static_cast<size_t>(wanted.bytes()) + 16, std::byte{0xA5}) {
    for (int64_t row = 0; row < wanted.rows; ++row)
      for (int64_t i = 0; i < wanted.row_bytes; ++i)
        expected.push_back(
            static_cast<std::byte>(file[static_cast<size_t>(wanted.offset + row * wanted.file_stride + i)]));
  }
  bool arrived() const {
    for (size_t i = 0; i < 8; ++i)
      if (memory[i] != std::byte{0xA5} || memory[memory.size() - 1 - i] != std::byte{0xA5}) return false;
    return std::equal(expected.begin(), expected.end(), memory.begin() + 8);
  }
  ReadRequest request;
  std::vector<std::byte> memory, expected;
};

std::vector<ReadRequest> requests_of(std::vector<Target>& targets) {
  std::vector<ReadRequest> out;
  for (Target& target : targets) {
    out.push_back(target.request);
    out.back().dest = target.memory.data() + 8;
  }
  return out;
}

struct Path {
  bool uring, direct;
};
constexpr Path kPaths[] = {{true, true}, {true, false}, {false, true}, {false, false}};

DirectReaderOptions options_of(Path path, int64_t chunk_bytes = 8192) {
  DirectReaderOptions options;
  options.use_uring = path.uring;
  options.use_direct = path.direct;
  options.threads = 2;
  options.queue_depth = 4;
  options.chunk_bytes = chunk_bytes;
  return options;
}

int open_descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// The message of the Error that `call` throws, "" when it throws none.
template <typename Call>
std::string error_of(const Call& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.message();
  }
  return "";
}

std::vector<Target> random_targets(const Files& files, std::mt19937& random, int count) {
  std::vector<Target> targets;
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < count; ++i) {
    const auto f = static_cast<size_t>(below(std::ssize(files.content)));
    const auto size = std::ssize(files.content[f]);
    ReadRequest request{.file = static_cast<int>(f)};
    if (below(2) == 0) {
      request.offset = below(size);
      request.row_bytes = below(size - request.offset + 1);
    } else {
      request.rows = 1 + below(20);
      request.file_stride = 1 + below(size / 40 + 1);
      request.row_bytes = 1 + below(request.file_stride);
      request.offset = below(size - request.rows * request.file_stride);
    }
    targets.emplace_back(request, files.content[f]);
  }
  return targets;
}

}  // namespace

TEST_CASE("every_path_delivers_the_same_bytes_for_any_offsets_sizes_and_strides") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {300'007, 65'536, 4'097, 70'001});
  std::mt19937 random(7);
  for (const Path path : kPaths)
    for (const int64_t chunk_bytes : {4096, 8192, 1 << 20})
      for (const int count : {1, 2, 40}) {
        CAPTURE(path.uring);
        CAPTURE(path.direct);
        CAPTURE(chunk_bytes);
        std::vector<Target> targets = random_targets(files, random, count);
        int64_t wanted = 0, told = 0;
        for (const Target& target : targets) wanted += target.request.bytes();
        DirectReader reader(files.read_files, options_of(path, chunk_bytes));
        const ReadReport report = reader.read(requests_of(targets), [&](int64_t bytes) { told += bytes; });
        for (const Target& target : targets) CHECK(target.arrived());
        CHECK(told == wanted);
        CHECK((!report.used_uring || path.uring));
        CHECK((!report.used_direct || path.direct));
      }
}

TEST_CASE("direct_reads_work_on_a_memory_file_system_or_fall_back") {
  if (!fs::is_directory("/dev/shm")) {
    MESSAGE("skipped: no /dev/shm here");
    return;
  }
  const TemporaryFolder folder("/dev/shm");
  const Files files(folder.path(), {50'001});
  for (const Path path : kPaths) {
    std::vector<Target> targets{Target({.offset = 4'095, .row_bytes = 45'906}, files.content[0])};
    DirectReader(files.read_files, options_of(path)).read(requests_of(targets), {});
    CHECK(targets[0].arrived());
  }
}

TEST_CASE("a_gap_between_requests_is_not_read_when_it_is_large_and_near_requests_share_a_read") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {1'000'000});
  const auto reads = [&](int64_t second_offset) {
    std::vector<Target> targets{Target({.offset = 10, .row_bytes = 100}, files.content[0]),
                                Target({.offset = second_offset, .row_bytes = 100}, files.content[0])};
    const ReadReport report =
        DirectReader(files.read_files, options_of(kPaths[0], 1 << 20)).read(requests_of(targets), {});
    CHECK(targets[0].arrived());
    CHECK(targets[1].arrived());
    return report;
  };
  CHECK(reads(110).reads == 1);
  CHECK(reads(5'000).reads == 1);
  CHECK(reads(900'000).reads == 2);
  CHECK(reads(900'000).file_bytes == 2 * 4096);
}

TEST_CASE("a_file_that_is_too_short_is_an_error_naming_file_tensor_and_offset") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {30'000, 30'000});
  for (const Path path : kPaths) {
    DirectReaderOptions options = options_of(path, 32'768);
    options.name_at = [](int file, int64_t offset) { return fmt::format("tensor t{}@{}", file, offset); };
    REQUIRE(::truncate(files.read_files[1].path.c_str(), 20'001) == 0);
    std::vector<std::byte> memory(60'000);
    const ReadRequest requests[] = {{.file = 0, .offset = 0, .row_bytes = 30'000, .dest = memory.data()},
                                    {.file = 1, .offset = 11, .row_bytes = 29'989, .dest = memory.data() + 30'000}};
    const int before = open_descriptors();
    const std::string message =
        error_of([&] { DirectReader(files.read_files, options).read(requests, {}); }, ErrorCode::input);
    CHECK(message.find(files.read_files[1].path) != std::string::npos);
    CHECK(message.find("tensor t1@20001 at byte 20001") != std::string::npos);
    CHECK(message.find("the file ends here") != std::string::npos);
    CHECK(open_descriptors() == before);
  }
}

TEST_CASE("an_injected_failure_of_any_read_is_one_error_without_leak_or_hang") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {100'001});
  for (const Path path : kPaths) {
    int failures = 0;
    for (int64_t n = 0;; ++n) {
      REQUIRE(n < 100);
      DirectReaderOptions options = options_of(path);
      options.fault = [n](int64_t read) { return read == n ? EIO : 0; };
      std::vector<Target> targets{Target({.offset = 5, .row_bytes = 99'990}, files.content[0])};
      const int before = open_descriptors();
      const std::string message =
          error_of([&] { DirectReader(files.read_files, options).read(requests_of(targets), {}); }, ErrorCode::input);
      CHECK(open_descriptors() == before);
      if (message.empty()) {
        CHECK(targets[0].arrived());
        break;
      }
      CHECK(message.find("Input/output error") != std::string::npos);
      CHECK(message.find("at byte ") != std::string::npos);
      ++failures;
    }
    CHECK(failures == 13);  // 100,001 bytes in chunks of 8,192
  }
}

TEST_CASE("a_file_system_that_refuses_a_direct_read_is_read_through_the_page_cache") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {100'001});
  for (const Path path : {kPaths[0], kPaths[2]}) {
    DirectReaderOptions options = options_of(path);
    options.fault = [](int64_t) { return EINVAL; };
    std::vector<Target> targets{Target({.offset = 5, .row_bytes = 99'990}, files.content[0])};
    const ReadReport report = DirectReader(files.read_files, options).read(requests_of(targets), {});
    CHECK(targets[0].arrived());
    CHECK_FALSE(report.used_direct);
  }
}

TEST_CASE("what_progress_throws_stops_the_read_within_a_second") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {400'000});
  for (const Path path : kPaths) {
    std::vector<Target> targets{Target({.offset = 5, .row_bytes = 99'990}, files.content[0])};
    const auto start = std::chrono::steady_clock::now();
    const std::string message = error_of(
        [&] {
          DirectReader(files.read_files, options_of(path)).read(requests_of(targets), [](int64_t) {
            throw_error(ErrorCode::interrupted, "interrupted");
          });
        },
        ErrorCode::interrupted);
    CHECK(message == "interrupted");
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
  }
}

TEST_CASE("run_load_ends_stalled_work_when_progress_throws") {
  int ticks = 0;
  const auto stalled = [](int, LoadMeter& meter) {
    while (!meter.stopped()) std::this_thread::yield();
  };
  CHECK_THROWS_AS(run_load(3, stalled,
                           [&](int64_t) {
                             if (++ticks == 2) throw_error(ErrorCode::interrupted, "stop");
                           }),
                  Error);
  CHECK(ticks == 2);
}

TEST_CASE("run_load_rethrows_the_first_error_of_a_worker_and_stops_the_others") {
  const auto work = [](int thread, LoadMeter& meter) {
    if (thread == 1) throw_error(ErrorCode::input, "worker 1");
    while (!meter.stopped()) std::this_thread::yield();
  };
  CHECK(error_of([&] { run_load(3, work, {}); }, ErrorCode::input) == "worker 1");
}

TEST_CASE("a_read_of_nothing_reads_nothing") {
  const TemporaryFolder folder;
  const Files files(folder.path(), {100});
  const ReadRequest empty{.file = 0, .offset = 50, .row_bytes = 0};
  CHECK(DirectReader(files.read_files, options_of(kPaths[0])).read({}, {}).reads == 0);
  CHECK(DirectReader(files.read_files, options_of(kPaths[0])).read({&empty, 1}, {}).reads == 0);
}

}  // namespace offload::direct_reader_test
