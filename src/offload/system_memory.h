// How much host memory this process may still take: the machine's, cut by every cgroup that it is in.
//
// Reads /proc and /sys/fs/cgroup below a root that tests replace. Does not know what the memory is for (see budget.h),
// and does not reserve any. Thread-safe: no state.
#ifndef OFFLOAD_OFFLOAD_SYSTEM_MEMORY_H_
#define OFFLOAD_OFFLOAD_SYSTEM_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace offload {

struct SystemMemory {
  int64_t total_bytes = 0;      // of the machine
  int64_t available_bytes = 0;  // may be taken now without swapping and without meeting a limit; never negative
  // What makes available_bytes what it is, as a path below the root: "/proc/meminfo", or the file of the tightest
  // cgroup limit.
  std::string decided_by;
  std::optional<int64_t> memlock_bytes;  // RLIMIT_MEMLOCK (soft); nothing when unlimited or unknown
};

// available = min(MemAvailable, over each cgroup from the process's own up to the root: limit - usage + inactive file
// cache). Limits: memory.max and memory.high (v2), memory.limit_in_bytes and hierarchical_memory_limit (v1); cache that
// nobody used lately is given back by the kernel before a limit bites. A cgroup file that is absent or malformed sets
// no limit. Throws Error{resource} when /proc/meminfo cannot be understood.
SystemMemory read_system_memory(const std::string& root = "/");

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_SYSTEM_MEMORY_H_
