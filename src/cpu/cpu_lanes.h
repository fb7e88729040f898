// CpuLanes: the two lanes of the CPU backend. Compute is the calling thread, so its work is done when a call returns;
// copies run on a thread of their own, in order.
//
// The queue has a fixed number of places; a lane that is full makes the caller wait. Confined to one calling thread.
#ifndef OFFLOAD_CPU_CPU_LANES_H_
#define OFFLOAD_CPU_CPU_LANES_H_

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/backend.h"

namespace offload::cpu {

class CpuLanes {
 public:
  explicit CpuLanes(int events);
  ~CpuLanes();

  Lane& compute() { return compute_; }
  Lane& copy() { return copy_; }

  // For tests: called on the copy thread before each copy; may throw, which fails the lane, or dawdle.
  void set_before_copy(std::function<void()> hook) { before_copy_ = std::move(hook); }

 private:
  // How often an event was recorded, and up to which of these its lane has come.
  struct Event {
    uint64_t issued = 0, reached = 0;
  };
  struct Command {
    enum class Kind : uint8_t { copy, call, record, wait } kind = Kind::copy;
    const std::byte* host = nullptr;
    void* device = nullptr;
    size_t bytes = 0;
    void (*function)(void*) = nullptr;
    void* context = nullptr;
    int event = 0;
    uint64_t generation = 0;
  };

  class Compute final : public Lane {
   public:
    explicit Compute(CpuLanes& lanes) : lanes_(lanes) {}
    void copy_in(std::span<const std::byte> host, const Tensor& device) override;
    void call(void (*function)(void*), void* context) override;
    void record(int event) override;
    void wait(int event) override;
    void drain() override {}

   private:
    CpuLanes& lanes_;
  };
  class Copy final : public Lane {
   public:
    explicit Copy(CpuLanes& lanes) : lanes_(lanes) {}
    void copy_in(std::span<const std::byte> host, const Tensor& device) override;
    void call(void (*function)(void*), void* context) override;
    void record(int event) override;
    void wait(int event) override;
    void drain() override;

   private:
    CpuLanes& lanes_;
  };

  void push(const Command& command);
  void run_copies();
  void rethrow_failure() const;

  Compute compute_{*this};
  Copy copy_{*this};
  std::function<void()> before_copy_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<Event> events_;
  std::vector<Command> queue_;  // a ring
  uint64_t pushed_ = 0, done_ = 0;
  bool stop_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_LANES_H_
