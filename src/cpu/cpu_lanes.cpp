#include "cpu/cpu_lanes.h"

#include <cstring>

namespace offload::cpu {
namespace {

constexpr size_t kQueuePlaces = 4096;

}  // namespace

CpuLanes::CpuLanes(int events)
    : events_(static_cast<size_t>(events)), queue_(kQueuePlaces), thread_([this] { run_copies(); }) {}

CpuLanes::~CpuLanes() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CpuLanes::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void CpuLanes::push(const Command& command) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || pushed_ - done_ < queue_.size(); });
  rethrow_failure();
  queue_[pushed_++ % queue_.size()] = command;
  changed_.notify_all();
}

void CpuLanes::run_copies() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || (!failure_ && done_ < pushed_); });
    if (stop_) return;
    const Command command = queue_[done_ % queue_.size()];
    if (command.kind == Command::Kind::wait) {
      const Event& event = events_[static_cast<size_t>(command.event)];
      changed_.wait(lock, [&] { return stop_ || event.reached >= command.generation; });
      if (stop_) return;
    } else if (command.kind == Command::Kind::record) {
      events_[static_cast<size_t>(command.event)].reached = command.generation;
    } else {
      lock.unlock();
      std::exception_ptr failure;
      try {
        if (command.kind == Command::Kind::call) {
          command.function(command.context);
        } else {
          if (before_copy_) before_copy_();
          std::memcpy(command.device, command.host, command.bytes);
        }
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = failure;
    }
    ++done_;
    changed_.notify_all();
  }
}

void CpuLanes::Compute::copy_in(std::span<const std::byte> host, const Tensor& device) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  std::memcpy(device.data(), host.data(), host.size());
}

void CpuLanes::Compute::call(void (*function)(void*), void* context) {
  function(context);
}

void CpuLanes::Compute::record(int event) {
  const std::lock_guard lock(lanes_.mutex_);
  Event& e = lanes_.events_[static_cast<size_t>(event)];
  e.reached = ++e.issued;
  lanes_.changed_.notify_all();
}

void CpuLanes::Compute::wait(int event) {
  std::unique_lock lock(lanes_.mutex_);
  const Event& e = lanes_.events_[static_cast<size_t>(event)];
  lanes_.changed_.wait(lock, [&] { return lanes_.failure_ || e.reached >= e.issued; });
  lanes_.rethrow_failure();
}

void CpuLanes::Copy::copy_in(std::span<const std::byte> host, const Tensor& device) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  lanes_.push({.kind = Command::Kind::copy, .host = host.data(), .device = device.data(), .bytes = host.size()});
}

void CpuLanes::Copy::call(void (*function)(void*), void* context) {
  lanes_.push({.kind = Command::Kind::call, .function = function, .context = context});
}

void CpuLanes::Copy::record(int event) {
  uint64_t generation;
  {
    const std::lock_guard lock(lanes_.mutex_);
    generation = ++lanes_.events_[static_cast<size_t>(event)].issued;
  }
  lanes_.push({.kind = Command::Kind::record, .event = event, .generation = generation});
}

void CpuLanes::Copy::wait(int event) {
  uint64_t generation;
  {
    const std::lock_guard lock(lanes_.mutex_);
    generation = lanes_.events_[static_cast<size_t>(event)].issued;
  }
  lanes_.push({.kind = Command::Kind::wait, .event = event, .generation = generation});
}

void CpuLanes::Copy::drain() {
  std::unique_lock lock(lanes_.mutex_);
  lanes_.changed_.wait(lock, [&] { return lanes_.failure_ || lanes_.done_ == lanes_.pushed_; });
  lanes_.rethrow_failure();
}

}  // namespace offload::cpu
