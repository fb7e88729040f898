#include "offload/expert_cache.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <type_traits>
#include <utility>

namespace offload::expert_cache_test {

namespace {

// Whether `act` ends in a failed assertion; in a child, so that the suite lives on.
template <typename Act>
bool asserts(Act&& act) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // not doctest's
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(1);
    act();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

}  // namespace

TEST_CASE("a_slot_goes_from_free_over_filling_to_ready_and_a_pin_keeps_it") {
  ExpertCache cache(2, 4, 2);
  CHECK(cache.state(0) == ExpertCache::State::free);
  CHECK(cache.slots_free() == 2);
  CHECK_FALSE(cache.begin_fill(0, {1, 3}).exists());
  CHECK(cache.state(0) == ExpertCache::State::filling);
  CHECK(cache.find({1, 3}) == 0);
  CHECK_FALSE(cache.evictable(0));
  {
    const ExpertCache::Pin waits = cache.pin(0, {1, 3});
    cache.end_fill(0);
    CHECK(cache.pinned(0));
    CHECK_FALSE(cache.evictable(0));
    CHECK(waits.slot() == 0);
  }
  CHECK(cache.evictable(0));
  CHECK(cache.slots_free() == 1);
  CHECK(cache.begin_fill(0, {0, 3}) == ExpertKey{1, 3});
  CHECK(cache.find({1, 3}) == -1);
  CHECK(cache.key(0) == ExpertKey{0, 3});
  cache.check();
}

TEST_CASE("pins_count_and_move_without_letting_go") {
  static_assert(!std::is_copy_constructible_v<ExpertCache::Pin> && !std::is_copy_assignable_v<ExpertCache::Pin>);
  ExpertCache cache(1, 4, 2);
  cache.begin_fill(0, {0, 1});
  cache.end_fill(0);
  cache.begin_fill(1, {0, 2});
  cache.end_fill(1);
  ExpertCache::Pin first = cache.pin(0, {0, 1}), second = cache.pin(0, {0, 1});
  ExpertCache::Pin moved = std::move(first);
  CHECK_FALSE(first);
  second.release();
  CHECK(cache.pinned(0));
  moved = cache.pin(1, {0, 2});  // lets slot 0 go
  CHECK_FALSE(cache.pinned(0));
  CHECK(cache.pinned(1));
  moved.release();
  moved.release();
  CHECK_FALSE(cache.pinned(1));
  cache.check();
}

TEST_CASE("a_slot_that_is_filling_or_pinned_is_never_overwritten") {
  ExpertCache cache(1, 8, 2);
  cache.begin_fill(0, {0, 1});
  CHECK(asserts([&] { cache.begin_fill(0, {0, 2}); }));
  cache.end_fill(0);
  {
    const ExpertCache::Pin pin = cache.pin(0, {0, 1});
    CHECK(asserts([&] { cache.begin_fill(0, {0, 2}); }));
  }
  CHECK_FALSE(asserts([&] { cache.begin_fill(0, {0, 2}); }));
}

TEST_CASE("one_expert_never_lies_in_two_slots") {
  ExpertCache cache(1, 8, 2);
  cache.begin_fill(0, {0, 1});
  CHECK(asserts([&] { cache.begin_fill(1, {0, 1}); }));
}

TEST_CASE("a_pin_of_another_content_or_an_id_out_of_range_is_a_bug") {
  ExpertCache cache(2, 8, 2);
  cache.begin_fill(0, {0, 1});
  CHECK(asserts([&] { static_cast<void>(cache.pin(0, {0, 2})); }));
  CHECK(asserts([&] { static_cast<void>(cache.pin(1, {0, 1})); }));
  CHECK(asserts([&] { cache.end_fill(1); }));
  CHECK(asserts([&] { static_cast<void>(cache.find({0, 8})); }));
  CHECK(asserts([&] { static_cast<void>(cache.find({2, 0})); }));
  CHECK(asserts([&] { static_cast<void>(cache.state(2)); }));
}

}  // namespace offload::expert_cache_test
