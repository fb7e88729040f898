// All-reduces over ranks on CUDA devices: every way against sums in rank order, captured, failing and stalled.
// Skipped, with the reason, where there is no device.
#include <chrono>

#include "cuda/all_reduce.h"
#include "cuda_group.h"

using namespace offload;
using cuda::GroupOptions;
using cuda::GroupWay;

namespace {

constexpr GroupWay kWays[] = {GroupWay::waiting, GroupWay::ordered, GroupWay::nccl};
// FP32 sums of 64 terms at most, each of magnitude 1 at most, against FP64.
constexpr double kSumAbsolute = 64 * 64 * 0x1p-24;
constexpr float kGuard = 12345.0f;
constexpr int64_t kGuards = 64;

// The number that `rank` brings for element i of round `round`.
float number(int rank, int64_t i, int round) {
  uint64_t v = (static_cast<uint64_t>(i) * 64 + static_cast<uint64_t>(rank)) * 1000 + static_cast<uint64_t>(round);
  v = (v + 1) * 0x9e3779b97f4a7c15u;
  v ^= v >> 29;
  return static_cast<float>(static_cast<int64_t>(v % 2000001) - 1000000) * 1e-6f;
}

template <typename T>
T stored(float value) {
  if constexpr (sizeof(T) == 2)
    return to_bf16(value);
  else
    return value;
}
template <typename T>
float loaded(T value) {
  if constexpr (sizeof(T) == 2)
    return to_float(value);
  else
    return value;
}

// What every rank should have, by hand.
template <typename T>
std::vector<T> expected_sum(int world, int64_t elements, int round) {
  std::vector<T> sums;
  for (int64_t i = 0; i < elements; ++i) {
    float sum = 0.0f;
    double exact = 0.0;
    for (int q = 0; q < world; ++q) {
      const float x = loaded(stored<T>(number(q, i, round)));
      sum += x;
      exact += double{x};
    }
    REQUIRE(std::abs(double{sum} - exact) <= kSumAbsolute);
    sums.push_back(stored<T>(sum));
  }
  return sums;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void meet(CudaGroup& group, int rank) {
  if (!group.end(rank).all_equal(7)) throw Error(ErrorCode::internal, "equal values differ");
}

// Every rank all-reduces `elements` in each round; returns how many ranks in how many rounds had other bits than the
// sum in rank order, or touched what lies behind the tensor.
template <typename T>
int wrong_results(CudaGroup& group, DType dtype, int64_t elements, int rounds) {
  std::vector<std::vector<T>> expected;
  for (int round = 0; round < rounds; ++round) expected.push_back(expected_sum<T>(group.world(), elements, round));
  std::atomic<int> wrong = 0;
  group.run([&](int rank) {
    cuda::CudaBackend& backend = group.backend(rank);
    const Buffer memory = backend.allocate((elements + kGuards) * dtype_bytes(dtype), "test");
    const Tensor all(memory.data(), dtype, {elements + kGuards}), tensor = all.narrow(0, 0, elements);
    std::vector<T> values(static_cast<size_t>(elements + kGuards), stored<T>(kGuard));
    meet(group, rank);  // taking memory may wait for a peer's device, which must not wait for this rank
    for (int round = 0; round < rounds; ++round) {
      for (int64_t i = 0; i < elements; ++i) values[static_cast<size_t>(i)] = stored<T>(number(rank, i, round));
      backend.upload(std::as_bytes(std::span(values)), all);
      group.end(rank).all_reduce_sum(tensor);
      backend.download(all, std::as_writable_bytes(std::span(values)));
      std::vector<T> wanted = expected[static_cast<size_t>(round)];
      wanted.resize(values.size(), stored<T>(kGuard));
      if (!same_bits(values, wanted)) ++wrong;
    }
    meet(group, rank);  // memory that peers write stays until all are done
  });
  return wrong;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

cuda::PeerPath no_path(int, int) {
  return {cuda::Reach::absent, "left out"};
}

// With peer access where there is any, and without.
std::vector<GroupOptions> both_links(const Layout& layout) {
  const GroupOptions with{.measure = false}, without{.prove_path = no_path, .measure = false};
  if (std::all_of(layout.begin(), layout.end(), [&](int device) { return device == layout.front(); })) return {with};
  return {with, without};
}

}  // namespace

TEST_CASE("ways_are_chosen_up_to_and_from_where_they_win_without_a_gap") {
  using cuda::WayChoice;
  const WayChoice none = cuda::choose_ways({{.bytes = 10, .ordered_s = 5.0}, {.bytes = 100, .ordered_s = 6.0}});
  CHECK(none.waiting_bytes_max == 0);
  CHECK(none.of(10) == GroupWay::ordered);
  CHECK(none.of(int64_t{1} << 40) == GroupWay::ordered);
  const WayChoice all = cuda::choose_ways({{.bytes = 10, .waiting_s = 1.0, .ordered_s = 5.0, .nccl_s = 2.0},
                                           {.bytes = 100, .waiting_s = 4.0, .ordered_s = 5.0, .nccl_s = 3.0},
                                           {.bytes = 200, .waiting_s = 1.0, .ordered_s = 5.0, .nccl_s = 6.0},
                                           {.bytes = 300, .ordered_s = 9.0, .nccl_s = 8.0}});
  CHECK(all.of(10) == GroupWay::waiting);
  CHECK(all.of(11) == GroupWay::ordered);
  CHECK(all.of(299) == GroupWay::ordered);
  CHECK(all.of(300) == GroupWay::nccl);
  CHECK(cuda::choose_ways({{.bytes = 16 << 20, .ordered_s = 600e-6}}).is_slow);
  CHECK_FALSE(cuda::choose_ways({{.bytes = 16 << 20, .ordered_s = 600e-6, .nccl_s = 110e-6}}).is_slow);
}

TEST_CASE("a_broken_path_between_devices_is_used_by_nobody_and_said") {
  for (const Layout& layout : layouts()) {
    if (layout != Layout{0, 1}) continue;
    const auto broken = [](int, int) { return cuda::PeerPath{cuda::Reach::broken, "words were lost"}; };
    CudaGroup group(layout, {.prove_path = broken});
    CHECK_FALSE(group.group().has(GroupWay::nccl, 1 << 20));
    CHECK(group.group().describe().find("broken peer access") != std::string::npos);
    for (const int64_t elements : {2560, 3000001}) CHECK(wrong_results<float>(group, DType::f32, elements, 2) == 0);
  }
}

TEST_CASE("every_way_gives_every_rank_the_sum_in_rank_order_and_touches_nothing_else") {
  for (const Layout& layout : layouts())
    for (GroupOptions options : both_links(layout))
      for (const GroupWay way : kWays) {
        options.only = way;
        CudaGroup group(layout, options);
        for (const int64_t elements : {1, 2, 3, 63, 257, 2560, 2561, 8 * 2560, 65536, 65537, 3000001}) {
          if (!group.group().has(way, elements)) continue;
          CAPTURE(layout_text(layout));
          CAPTURE(std::string(cuda::group_way_name(way)));
          CAPTURE(elements);
          const int rounds = elements > 65537 ? 2 : 5;
          CHECK(wrong_results<float>(group, DType::f32, elements, rounds) == 0);
          CHECK(wrong_results<bf16>(group, DType::bf16, elements, rounds) == 0);
        }
      }
}

TEST_CASE("a_group_measures_its_ways_and_the_ones_it_chooses_give_the_same_bits") {
  for (const Layout& layout : layouts())
    for (GroupOptions options : both_links(layout)) {
      options.measure = true;
      CudaGroup group(layout, options);
      MESSAGE(group.group().describe());
      for (const cuda::WaySample& sample : group.group().samples())
        MESSAGE(sample.bytes, " bytes: waiting ", 1e6 * sample.waiting_s.value_or(0), " us, ordered ",
                1e6 * sample.ordered_s.value_or(0), " us, nccl ", 1e6 * sample.nccl_s.value_or(0), " us");
      for (const int64_t elements : {2560, 300000, 6000000})
        CHECK(wrong_results<float>(group, DType::f32, elements, 2) == 0);
    }
}

TEST_CASE("an_all_reduce_in_a_captured_body_counts_on_and_mixes_with_others") {
  for (const Layout& layout : layouts())
    for (const GroupOptions& options : both_links(layout)) {
      CudaGroup group(layout, options);
      constexpr int64_t kElements = 2560;
      if (!group.group().has(GroupWay::waiting, kElements)) continue;
      CAPTURE(layout_text(layout));
      std::atomic<int> wrong = 0;
      group.run([&](int rank) {
        cuda::CudaBackend& backend = group.backend(rank);
        const Buffer memory = backend.allocate(kElements * 4, "test");
        const Tensor tensor(memory.data(), DType::f32, {kElements});
        std::vector<float> values(kElements);
        meet(group, rank);
        for (int round = 0; round < 12; ++round) {
          for (int64_t i = 0; i < kElements; ++i) values[static_cast<size_t>(i)] = number(rank, i, round);
          backend.upload(std::as_bytes(std::span(values)), tensor);
          // Twice in the body: the sum of equal sums is world times the first.
          const auto body = [&] {
            group.end(rank).all_reduce_sum(tensor);
            group.end(rank).all_reduce_sum(tensor);
          };
          if (round % 4 == 3)
            body();
          else
            backend.repeat(1, body);
          backend.download(tensor, std::as_writable_bytes(std::span(values)));
          const std::vector<float> once = expected_sum<float>(group.world(), kElements, round);
          for (size_t i = 0; i < values.size(); ++i) {
            float twice = 0.0f;
            for (int q = 0; q < group.world(); ++q) twice += once[i];
            if (values[i] != twice) ++wrong;
          }
        }
        meet(group, rank);
      });
      CHECK(wrong == 0);
    }
}

TEST_CASE("a_rank_that_throws_frees_the_others_at_once_and_the_group_works_again") {
  for (const Layout& layout : layouts())
    for (GroupOptions options : both_links(layout))
      for (const GroupWay way : kWays) {
        options.only = way;
        CudaGroup group(layout, options);
        constexpr int64_t kElements = 2560;
        if (!group.group().has(way, kElements)) continue;
        CAPTURE(layout_text(layout));
        CAPTURE(std::string(cuda::group_way_name(way)));
        CHECK(wrong_results<float>(group, DType::f32, kElements, 2) == 0);
        const auto begin = std::chrono::steady_clock::now();
        std::string message;
        try {
          group.run([&](int rank) {
            cuda::CudaBackend& backend = group.backend(rank);
            const Buffer memory = backend.allocate(kElements * 4, "test");
            const Tensor tensor(memory.data(), DType::f32, {kElements});
            backend.fill_zero(tensor);
            std::vector<float> host(kElements);
            meet(group, rank);
            for (int i = 0; i < 40; ++i) {
              if (rank == group.world() - 1 && i == 7) throw Error(ErrorCode::device, "the cable fell out");
              group.end(rank).all_reduce_sum(tensor);
              if (i % 10 == 9) backend.download(tensor, std::as_writable_bytes(std::span(host)));
            }
            static_cast<void>(group.end(rank).all_equal(1));
          });
        } catch (const Error& error) {
          message = error.message();
        }
        CHECK(message == "the cable fell out");
        CHECK(seconds_since(begin) < 5.0);
        CHECK(wrong_results<float>(group, DType::f32, kElements, 3) == 0);
      }
}

TEST_CASE("a_peer_that_does_not_come_ends_the_wait_with_one_error_that_names_each_ranks_last_step") {
  for (const Layout& layout : layouts())
    for (GroupOptions options : both_links(layout))
      for (const GroupWay way : kWays) {
        options.only = way;
        options.stall_after = std::chrono::milliseconds(300);
        CudaGroup group(layout, options);
        constexpr int64_t kElements = 2560;
        if (!group.group().has(way, kElements)) continue;
        CAPTURE(layout_text(layout));
        CAPTURE(std::string(cuda::group_way_name(way)));
        const auto begin = std::chrono::steady_clock::now();
        std::string message;
        try {
          group.run([&](int rank) {
            cuda::CudaBackend& backend = group.backend(rank);
            const Buffer memory = backend.allocate(kElements * 4, "test");
            const Tensor tensor(memory.data(), DType::f32, {kElements});
            backend.fill_zero(tensor);
            std::vector<float> host(kElements);
            meet(group, rank);
            for (int i = 0; i < 3; ++i) {
              if (rank == 1 && i == 2) return;
              group.end(rank).all_reduce_sum(tensor);
              backend.download(tensor, std::as_writable_bytes(std::span(host)));
            }
          });
        } catch (const Error& error) {
          message = error.message();
        }
        CAPTURE(message);
        CHECK(message.find("waited 0.3 s") != std::string::npos);
        CHECK(message.find("rank 1 at ") != std::string::npos);
        CHECK(message.find("stuck") != std::string::npos);
        CHECK(seconds_since(begin) < 5.0);
        CHECK(wrong_results<float>(group, DType::f32, kElements, 3) == 0);
      }
}

TEST_CASE("paths_between_devices_are_proven_or_say_why_they_are_not_used") {
  const int count = cuda::count_devices().count;
  for (int a = 0; a < count; ++a)
    for (int b = 0; b <= a; ++b) {
      const cuda::PeerPath path = cuda::prove_peer_path(a, b);
      MESSAGE("devices ", a, " and ", b, ": ", std::string(cuda::reach_name(path.reach)), " ", path.why);
      CHECK((a == b) == (path.reach == cuda::Reach::same_device));
      const bool needs_reason = path.reach == cuda::Reach::absent || path.reach == cuda::Reach::broken;
      CHECK(path.why.empty() != needs_reason);
    }
}

// A device that faults is lost for its process, so this runs in one of its own: ctest's entry cuda_fault_test.
TEST_CASE("a_kernel_fault_ends_every_rank_with_the_faults_own_error" * doctest::skip()) {
  const std::vector<Layout> all = layouts();
  if (all.empty()) return;
  CudaGroup group(all.back());
  const auto begin = std::chrono::steady_clock::now();
  std::string message;
  try {
    group.run([&](int rank) {
      cuda::CudaBackend& backend = group.backend(rank);
      const Buffer memory = backend.allocate(2560 * 4, "test");
      const Tensor tensor(memory.data(), DType::f32, {2560});
      std::vector<float> host(2560);
      meet(group, rank);
      for (int i = 0; i < 20; ++i) {
        if (rank == 1 && i == 5) {
          cuda::SliceSum args{.ins = 1, .outs = 1, .count = 4};
          args.in[0] = memory.data();
          args.out[0] = reinterpret_cast<void*>(uintptr_t{64});
          cuda::slice_sum(args, DType::f32, backend.compute_stream());
        }
        group.end(rank).all_reduce_sum(tensor);
        backend.download(tensor, std::as_writable_bytes(std::span(host)));
      }
    });
  } catch (const Error& error) {
    message = error.message();
  }
  CAPTURE(message);
  CHECK(message.find("CUDA error") != std::string::npos);
  CHECK(seconds_since(begin) < 5.0);
}
