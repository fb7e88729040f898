// Ranks that run together end together, with the first cause, even where one of them hangs.
#include "offload/rank_team.h"

#include <doctest/doctest.h>

#include <atomic>

#include "core/rank_meeting.h"

namespace offload::rank_team_test {

TEST_CASE("the_first_cause_is_rethrown_whichever_rank_throws_it_and_the_team_runs_again") {
  for (int thrower = 0; thrower < 4; ++thrower) {
    RankMeeting meeting(4);
    RankTeam team(4);
    const auto run = [&](bool throws) {
      team.run(
          [&](int rank) {
            for (int i = 0; i < 20; ++i) {
              if (throws && rank == thrower && i == 7) throw Error(ErrorCode::device, "first");
              meeting.wait_for_all(rank);
            }
          },
          [&](int) { meeting.abort(); });
    };
    try {
      run(true);
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.message() == "first");
    }
    meeting.recover();
    CHECK_NOTHROW(run(false));
  }
}

TEST_CASE("a_rank_that_hangs_behind_anothers_failure_is_told_of_with_the_cause") {
  for (const int thrower : {0, 1}) {
    std::atomic<bool> told = false;
    std::string message;
    RankTeam team(
        2,
        [&](const std::exception_ptr& cause) {
          try {
            std::rethrow_exception(cause);
          } catch (const Error& error) {
            message = error.message();
          }
          told = true;
          told.notify_all();
        },
        std::chrono::milliseconds(20));
    CHECK_THROWS_AS(team.run(
                        [&](int rank) {
                          if (rank == thrower) throw Error(ErrorCode::device, "a fan stopped");
                          told.wait(false);  // a device that hangs until then
                        },
                        [](int) {}),
                    Error);
    CHECK(message == "a fan stopped");
  }
}

}  // namespace offload::rank_team_test
