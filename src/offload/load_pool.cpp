#include "offload/load_pool.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base.h"

namespace offload {
namespace {

// How long the user's stop may go unnoticed; far below the second that a load may take to end.
constexpr std::chrono::milliseconds kTick{50};

}  // namespace

void run_load(int threads, const std::function<void(int, LoadMeter&)>& work, const LoadProgressSink& progress) {
  OFL_ASSERT(threads >= 1);
  LoadMeter meter;
  std::mutex mutex;  // guards running and first_error
  std::condition_variable ended;
  int running = 0;
  std::exception_ptr first_error;
  const auto fail = [&] {
    meter.stop();
    const std::lock_guard lock(mutex);
    if (!first_error) first_error = std::current_exception();
  };
  const auto body = [&](int thread) {
    try {
      work(thread, meter);
    } catch (...) {
      fail();
    }
    const std::lock_guard lock(mutex);
    --running;
    ended.notify_one();
  };
  {
    std::vector<std::jthread> workers;
    workers.reserve(static_cast<size_t>(threads));
    try {
      for (int t = 0; t < threads; ++t) {
        {
          const std::lock_guard lock(mutex);
          ++running;
        }
        workers.emplace_back(body, t);
      }
    } catch (const std::system_error& error) {
      {
        const std::lock_guard lock(mutex);
        --running;
      }
      try {
        throw_error(ErrorCode::resource, "a loading thread could not be started: {}; lower --threads", error.what());
      } catch (...) {
        fail();
      }
    }
    for (bool done = false; !done;) {
      std::unique_lock lock(mutex);
      done = ended.wait_for(lock, kTick, [&] { return running == 0; });
      if (first_error) continue;
      lock.unlock();
      try {
        if (progress) progress(meter.take());
      } catch (...) {
        fail();
      }
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace offload
