#include "offload/rank_team.h"

#include <system_error>

#include "core/base.h"
#include "core/collective.h"

namespace offload {

RankTeam::RankTeam(int world, StuckHook on_stuck, std::chrono::milliseconds stuck_after)
    : on_stuck_(std::move(on_stuck)), stuck_after_(stuck_after) {
  OFL_ASSERT(world >= 1);
  try {
    for (int rank = 1; rank < world; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    end_threads();
    throw_error(ErrorCode::resource,
                "{} threads are needed for as many ranks, {} could be started: {}; lower --tp or raise the limit on "
                "processes (ulimit -u)",
                world - 1, started, error.code().message());
  }
}

RankTeam::~RankTeam() {
  end_threads();
}

void RankTeam::end_threads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankTeam::run(const std::function<void(int)>& work, const std::function<void(int)>& abort) {
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    abort_ = &abort;
    first_error_ = nullptr;
    has_cause_ = false;
    running_ = world();
    ++round_;
  }
  work_arrived_.notify_all();
  run_rank(0);
  std::unique_lock lock(mutex_);
  work_done_.wait(lock, [&] { return running_ == 0; });
  if (first_error_) std::rethrow_exception(first_error_);
}

void RankTeam::run_rank(int rank) {
  std::exception_ptr error;
  bool is_cause = false;
  try {
    (*work_)(rank);
  } catch (const Aborted&) {
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
    is_cause = true;
  }
  if (is_cause) (*abort_)(rank);
  std::unique_lock lock(mutex_);
  if (is_cause && !has_cause_) {
    first_error_ = error;
    has_cause_ = true;
    const bool all_end = !on_stuck_ || work_done_.wait_for(lock, stuck_after_, [&] { return running_ == 1; });
    if (!all_end) on_stuck_(error);
  } else if (error && !first_error_) {
    first_error_ = error;
  }
  --running_;
  work_done_.notify_all();
}

void RankTeam::serve(int rank) {
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      work_arrived_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    run_rank(rank);
  }
}

}  // namespace offload
