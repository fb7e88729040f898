#include "core/rank_meeting.h"

#include <algorithm>

namespace offload {

std::string steps_text(const std::vector<uint64_t>& step_of_rank) {
  std::string text;
  for (size_t rank = 0; rank < step_of_rank.size(); ++rank)
    text += fmt::format("{}rank {} at {}", rank == 0 ? "" : ", ", rank, step_of_rank[rank]);
  return text;
}

RankMeeting::RankMeeting(int world, std::chrono::milliseconds stall_after)
    : stall_after_(stall_after), arrivals_(static_cast<size_t>(world)), values_(static_cast<size_t>(world)) {}

void RankMeeting::wait_for_all(int rank) {
  std::unique_lock lock(mutex_);
  if (aborted_) throw Aborted();
  const uint64_t round = round_;
  ++arrivals_[static_cast<size_t>(rank)];
  if (++arrived_ == world()) {
    arrived_ = 0;
    ++round_;
    all_arrived_.notify_all();
    return;
  }
  const auto met = [&] { return aborted_ || round_ != round; };
  if (stall_after_.count() == 0) {
    all_arrived_.wait(lock, met);
  } else if (!all_arrived_.wait_for(lock, stall_after_, met)) {
    aborted_ = true;
    all_arrived_.notify_all();
    throw_error(ErrorCode::device,
                "rank {} waited {:.1f} s for its peers, which did not come; meetings so far: {}; a device or a rank is "
                "stuck",
                rank, std::chrono::duration<double>(stall_after_).count(), steps_text(arrivals_));
  }
  if (round_ == round) throw Aborted();
}

bool RankMeeting::all_equal(int rank, uint64_t value) {
  values_[static_cast<size_t>(rank)] = value;
  wait_for_all(rank);
  const bool equal = std::all_of(values_.begin(), values_.end(), [&](uint64_t other) { return other == value; });
  wait_for_all(rank);  // nobody writes a value again before all have read it
  return equal;
}

void RankMeeting::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  all_arrived_.notify_all();
}

bool RankMeeting::aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void RankMeeting::recover() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = false;
  arrived_ = 0;
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
}

}  // namespace offload
