#include "offload/pinning.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/host_memory.h"
#include "fake_pins.h"

namespace offload::pinning_test {

namespace {

constexpr int kThreads[] = {1, 2, 4, 7};
constexpr int64_t kPiece = 3 * kPageBytes;

// Two spans with a last piece that is short, one piece alone, and nothing: 9 pieces.
struct Spans {
  HostMemory first{5 * kPiece + kPageBytes + 100, "spans"}, second{2 * kPiece, "spans"}, third{64, "spans"};
  std::vector<std::span<std::byte>> all{first.span(), second.span(), {}, third.span()};
  int64_t bytes = first.bytes() + second.bytes() + third.bytes();

  std::map<const std::byte*, size_t> pieces() const {
    std::map<const std::byte*, size_t> out;
    for (const auto& span : all)
      for (int64_t at = 0; at < std::ssize(span); at += kPiece)
        out[span.data() + at] = static_cast<size_t>(std::min(kPiece, std::ssize(span) - at));
    return out;
  }
};

// "pinned", "refused" or what was thrown.
std::string end_of(const std::function<PinnedPieces::Outcome()>& pin) {
  try {
    return pin().pinned ? "pinned" : "refused";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// A word that threads wait for, long enough for any machine; a test that got none fails instead of hanging.
class Signal {
 public:
  void give() {
    const std::lock_guard lock(mutex_);
    ++given_;
    changed_.notify_all();
  }
  void await(int count = 1) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(10), [&] { return given_ >= count; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int given_ = 0;
};

// Gives a signal when the calling thread ends, by when everybody knows what became of its piece.
class AtThreadEnd {
 public:
  static void give(Signal& signal) {
    thread_local AtThreadEnd end;
    end.signal_ = &signal;
  }
  ~AtThreadEnd() { signal_->give(); }

 private:
  Signal* signal_ = nullptr;
};

// A driver that takes its time.
void pass_a_millisecond() {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

}  // namespace

TEST_CASE("every_byte_is_pinned_once_in_the_pieces_asked_for_by_any_number_of_threads") {
  for (const int threads : kThreads) {
    CAPTURE(threads);
    const Spans spans;
    FakePins pins;
    {
      PinnedPieces pinned;
      const auto outcome = pinned.pin(spans.all, pins.hooks(kPiece), threads, {});
      CHECK(outcome.pinned);
      CHECK(outcome.refused_at_bytes == 0);
      CHECK(pinned.bytes() == spans.bytes);
      CHECK(pins.pieces() == spans.pieces());
      CHECK(pins.calls() == 9);
      CHECK(pinned.pin(spans.all, pins.hooks(2 * kPiece), threads, {}).pinned);  // the old pinning goes first
      CHECK(pins.bytes() == spans.bytes);
      CHECK(pins.calls() == 9 + 5);
    }
    CHECK(pins.bytes() == 0);
  }
  PinnedPieces nothing;
  FakePins pins;
  CHECK(nothing.pin({}, pins.hooks(kPiece), 2, {}).pinned);
  CHECK(pins.calls() == 0);
}

TEST_CASE("a_piece_is_pinned_after_each_of_its_pages_was_written_to") {
  for (const int threads : kThreads) {
    CAPTURE(threads);
    const Spans spans;
    for (const auto& span : spans.all) std::fill(span.begin(), span.end(), std::byte{0xFF});
    std::atomic<int64_t> untouched{0}, others{0};
    const auto pin = [&](std::span<std::byte> piece) {
      for (int64_t at = 0; at < std::ssize(piece); ++at) {
        const bool is_zero = piece[static_cast<size_t>(at)] == std::byte{0};
        if (at % kPageBytes == 0 && !is_zero) ++untouched;
        if (at % kPageBytes != 0 && is_zero) ++others;
      }
      return true;
    };
    PinnedPieces pinned;
    pinned.pin(spans.all, {.pin = pin, .unpin = [](std::span<std::byte>) {}, .piece_bytes = kPiece}, threads, {});
    CHECK(untouched == 0);
    CHECK(others == 0);
  }
}

TEST_CASE("as_many_threads_as_asked_for_are_at_their_pieces_at_once") {
  constexpr int kTeam = 3;
  const Spans spans;
  Signal arrived;
  std::atomic<int> calls{0};
  const auto pin = [&](std::span<std::byte>) {
    arrived.give();
    if (calls++ < kTeam) arrived.await(kTeam);
    return true;
  };
  PinnedPieces pinned;
  pinned.pin(spans.all, {.pin = pin, .unpin = [](std::span<std::byte>) {}, .piece_bytes = kPiece}, kTeam, {});
  CHECK(calls == 9);
}

TEST_CASE("a_refusal_at_any_piece_unpins_what_was_pinned_and_says_how_much_that_was") {
  for (const int threads : kThreads)
    for (int64_t refuse_at = 0; refuse_at < 9; ++refuse_at) {
      CAPTURE(threads);
      CAPTURE(refuse_at);
      const Spans spans;
      FakePins pins({.refuse_at = refuse_at});
      PinnedPieces pinned;
      const auto outcome = pinned.pin(spans.all, pins.hooks(kPiece), threads, {});
      CHECK_FALSE(outcome.pinned);
      CHECK(outcome.refused_at_bytes == pins.bytes_most());
      CHECK(pinned.bytes() == 0);
      CHECK(pins.bytes() == 0);
      if (threads == 1) CHECK(pins.calls() == refuse_at + 1);
    }
}

TEST_CASE("an_exception_of_the_hook_in_one_thread_unpins_everything_and_is_rethrown") {
  for (const int threads : kThreads)
    for (int64_t throw_at = 0; throw_at < 9; ++throw_at) {
      CAPTURE(threads);
      CAPTURE(throw_at);
      const Spans spans;
      FakePins pins({.throw_at = throw_at});
      PinnedPieces pinned;
      const auto pin = [&] { return pinned.pin(spans.all, pins.hooks(kPiece), threads, {}); };
      CHECK(end_of(pin).find("driver fault") != std::string::npos);
      CHECK(pinned.bytes() == 0);
      CHECK(pins.bytes() == 0);
    }
}

TEST_CASE("between_is_called_by_the_caller_alone_and_stops_the_threads") {
  const auto caller = std::this_thread::get_id();
  for (const int threads : kThreads) {
    CAPTURE(threads);
    const Spans spans;
    FakePins pins;
    PinnedPieces pinned;
    int calls = 0;
    const auto count = [&] {
      CHECK(std::this_thread::get_id() == caller);
      ++calls;
    };
    CHECK(pinned.pin(spans.all, pins.hooks(kPiece), threads, count).pinned);
    CHECK(calls > 0);
    const auto stop = [] { throw std::runtime_error("stop"); };
    CHECK(end_of([&] { return pinned.pin(spans.all, pins.hooks(kPiece), threads, stop); }) == "stop");
    CHECK(pinned.bytes() == 0);
    CHECK(pins.bytes() == 0);
  }
}

TEST_CASE("what_stops_one_thread_stops_all_before_the_pieces_run_out") {
  constexpr int64_t kPieces = 4000;  // seconds, where nobody stops
  const HostMemory memory(kPieces * kPageBytes, "pieces to pin");
  const std::vector<std::span<std::byte>> spans{memory.span()};
  enum class Cause { refusal, exception, stop };
  for (const Cause cause : {Cause::refusal, Cause::exception, Cause::stop}) {
    CAPTURE(static_cast<int>(cause));
    std::atomic<int64_t> calls{0}, pinned_now{0};
    std::atomic<bool> is_over{false};
    const auto pin = [&](std::span<std::byte>) {
      const int64_t call = calls++;
      if (call == 10 && cause != Cause::stop) {
        is_over = true;
        if (cause == Cause::exception) throw std::runtime_error("fault");
        return false;
      }
      if (is_over || cause == Cause::stop) pass_a_millisecond();
      ++pinned_now;
      return true;
    };
    const auto unpin = [&](std::span<std::byte>) { --pinned_now; };
    const auto stop = [&] {
      if (cause == Cause::stop && calls > 10) throw std::runtime_error("stop");
    };
    PinnedPieces pinned;
    const std::string end =
        end_of([&] { return pinned.pin(spans, {.pin = pin, .unpin = unpin, .piece_bytes = kPageBytes}, 4, stop); });
    CHECK(end == std::string(cause == Cause::refusal ? "refused" : cause == Cause::stop ? "stop" : "fault"));
    CHECK(calls < kPieces);
    CHECK(pinned_now == 0);
  }
}

TEST_CASE("the_first_of_two_causes_counts") {
  enum class Cause { refusal, exception };
  constexpr Cause kCauses[] = {Cause::refusal, Cause::exception};
  const HostMemory memory(2 * kPageBytes, "pieces to pin");
  const std::vector<std::span<std::byte>> spans{memory.span()};
  for (const Cause first : kCauses)
    for (const Cause second : kCauses) {
      CAPTURE(static_cast<int>(first));
      CAPTURE(static_cast<int>(second));
      Signal second_is_in, first_has_ended;
      std::atomic<int> calls{0};
      const auto pin = [&](std::span<std::byte>) {
        const bool is_first = calls++ == 0;
        if (is_first) {
          AtThreadEnd::give(first_has_ended);
          second_is_in.await();
        } else {
          second_is_in.give();
          first_has_ended.await();
        }
        if ((is_first ? first : second) == Cause::refusal) return false;
        throw std::runtime_error(is_first ? "first" : "second");
      };
      PinnedPieces pinned;
      const std::string end = end_of([&] {
        return pinned.pin(spans, {.pin = pin, .unpin = [](std::span<std::byte>) {}, .piece_bytes = kPageBytes}, 2, {});
      });
      CHECK(end == std::string(first == Cause::refusal ? "refused" : "first"));
      CHECK(calls == 2);
    }
}

}  // namespace offload::pinning_test
