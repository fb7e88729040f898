// Ranks that meet: all or none, with a bounded wait.
#include <doctest/doctest.h>

#include <thread>

#include "cpu/thread_collective.h"

namespace offload::rank_meeting_test {

namespace {

// Runs work(rank) on a thread for each rank and returns what each threw, "" for nothing.
template <typename Work>
std::vector<std::string> run_ranks(int world, const Work& work) {
  std::vector<std::string> thrown(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const Error& error) {
        thrown[static_cast<size_t>(rank)] = error.message();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

}  // namespace

TEST_CASE("ranks_that_meet_see_what_the_others_wrote_before") {
  constexpr int kWorld = 4;
  RankMeeting meeting(kWorld);
  std::vector<int> written(kWorld, 0);
  const auto thrown = run_ranks(kWorld, [&](int rank) {
    for (int round = 1; round <= 200; ++round) {
      written[static_cast<size_t>(rank)] = round;
      meeting.wait_for_all(rank);
      for (const int other : written)
        if (other != round) throw Error(ErrorCode::internal, "a rank was early");
      meeting.wait_for_all(rank);
    }
  });
  for (const std::string& text : thrown) CHECK(text == "");
}

TEST_CASE("equal_values_are_told_from_values_of_which_one_differs") {
  for (const int odd : {-1, 0, 2}) {
    RankMeeting meeting(3);
    const auto thrown = run_ranks(3, [&](int rank) {
      const bool equal = meeting.all_equal(rank, rank == odd ? 8 : 7);
      if (equal != (odd < 0)) throw Error(ErrorCode::internal, "wrong");
    });
    for (const std::string& text : thrown) CHECK(text == "");
  }
}

TEST_CASE("a_peer_that_does_not_come_ends_the_wait_with_how_far_each_rank_came_and_frees_the_others") {
  RankMeeting meeting(3, std::chrono::milliseconds(50));
  const auto thrown = run_ranks(3, [&](int rank) {
    meeting.wait_for_all(rank);
    if (rank == 1) return;
    meeting.wait_for_all(rank);
  });
  CHECK(thrown[1] == "");
  const bool first = thrown[0].find("rank 0 at 2, rank 1 at 1, rank 2 at 2") != std::string::npos;
  const bool last = thrown[2].find("rank 0 at 2, rank 1 at 1, rank 2 at 2") != std::string::npos;
  CHECK((first || last));
  CHECK(thrown[0] != "");
  CHECK(thrown[2] != "");
  CHECK(meeting.aborted());
  meeting.recover();
  for (const std::string& text : run_ranks(3, [&](int rank) { meeting.wait_for_all(rank); })) CHECK(text == "");
}

TEST_CASE("an_abort_frees_who_waits_and_who_comes_later") {
  cpu::ThreadGroup group(2);
  const std::unique_ptr<Collective> ends[] = {group.end(0), group.end(1)};
  const auto thrown = run_ranks(2, [&](int rank) {
    if (rank == 1) return ends[1]->abort();
    ends[0]->all_equal(1);
  });
  CHECK(thrown[0] == Aborted().message());
  CHECK_THROWS_AS(ends[1]->all_equal(1), Aborted);
}

}  // namespace offload::rank_meeting_test
