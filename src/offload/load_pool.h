// run_load: the threads of a load, its progress and its one way to stop.
//
// Workers add the bytes that they have finished to a LoadMeter and look at stopped() often enough to end within a
// fraction of a second. The calling thread alone calls `progress`, so a callback needs no lock. Keeps nothing.
#ifndef OFFLOAD_OFFLOAD_LOAD_POOL_H_
#define OFFLOAD_OFFLOAD_LOAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>

namespace offload {

// Told the bytes finished since the last call, 0 or more: it is called several times a second even when none arrive.
// May throw to stop the load.
using LoadProgressSink = std::function<void(int64_t bytes)>;

class LoadMeter {
 public:
  void add(int64_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  void stop() { stopped_.store(true, std::memory_order_relaxed); }
  // What was added since the last take.
  int64_t take() { return bytes_.exchange(0, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> stopped_{false};
};

// Calls work(t, meter) for t = 0 .. threads - 1, each on a thread of its own, until all return. When one of them or
// `progress` throws, the others are told to stop, and the first error is rethrown after all have ended.
void run_load(int threads, const std::function<void(int thread, LoadMeter& meter)>& work,
              const LoadProgressSink& progress);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_LOAD_POOL_H_
