// RankTeam: one thread per rank, alive as long as the team, that run the same work together.
//
// Rank 0 is the calling thread. A rank that throws aborts its collective, all ranks end, and the first cause is
// rethrown. A rank that does not end even so (its device hangs, say) can be left by ending the process alone.
#ifndef OFFLOAD_OFFLOAD_RANK_TEAM_H_
#define OFFLOAD_OFFLOAD_RANK_TEAM_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

// Told the cause when a rank has failed and the others have not ended in time, on the thread of the rank that failed.
// Ends the process; if it returns, the team waits on.
using StuckHook = std::function<void(const std::exception_ptr& cause)>;

class RankTeam {
 public:
  // Twice what a rank waits for its peers on its own.
  static constexpr std::chrono::milliseconds kStuckAfter{20'000};

  explicit RankTeam(int world, StuckHook on_stuck = {}, std::chrono::milliseconds stuck_after = kStuckAfter);
  ~RankTeam();

  int world() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs work(rank) on every rank and returns when all have ended. `abort(rank)` is called from the thread of a rank
  // that throws; it must free the others from their waits. Rethrows the first exception that is not Aborted.
  void run(const std::function<void(int rank)>& work, const std::function<void(int rank)>& abort);

 private:
  void run_rank(int rank);
  void serve(int rank);
  void end_threads();

  const StuckHook on_stuck_;
  const std::chrono::milliseconds stuck_after_;
  std::mutex mutex_;
  std::condition_variable work_arrived_, work_done_;
  const std::function<void(int)>* work_ = nullptr;
  const std::function<void(int)>* abort_ = nullptr;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::exception_ptr first_error_;
  bool has_cause_ = false;  // first_error_ is no Aborted
  std::vector<std::thread> threads_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_RANK_TEAM_H_
