// RankMeeting: where the ranks of a group, which are threads of one process, wait for one another.
//
// A rank that fails aborts the meeting: every rank that waits or will wait gets Aborted instead of a hang. A rank whose
// peers do not come in time gives up and aborts it, too. No allocation after construction. Thread-safe.
#ifndef OFFLOAD_CORE_RANK_MEETING_H_
#define OFFLOAD_CORE_RANK_MEETING_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/collective.h"

namespace offload {

class RankMeeting {
 public:
  // `stall_after`: how long a rank waits for its peers before it gives up; zero: for ever.
  explicit RankMeeting(int world, std::chrono::milliseconds stall_after = {});

  int world() const { return static_cast<int>(arrivals_.size()); }

  // Returns when every rank has called it as often. Throws Aborted, or Error{device} that says how far each rank came
  // when the peers did not come in time.
  void wait_for_all(int rank);
  // Whether all ranks brought the same value. Throws as wait_for_all().
  bool all_equal(int rank, uint64_t value);

  void abort() noexcept;
  bool aborted() const;
  // Usable again. REQUIRES: no rank is in a call.
  void recover() noexcept;

 private:
  const std::chrono::milliseconds stall_after_;
  mutable std::mutex mutex_;  // guards everything below but values_, which the meeting itself orders
  std::condition_variable all_arrived_;
  std::vector<uint64_t> arrivals_;  // of each rank since the last recover()
  std::vector<uint64_t> values_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  bool aborted_ = false;
};

// "rank 0 at 12, rank 1 at 11"
std::string steps_text(const std::vector<uint64_t>& step_of_rank);

}  // namespace offload

#endif  // OFFLOAD_CORE_RANK_MEETING_H_
