// DeviceGroup: what joins ranks that are threads of one process, each with a CudaBackend, on any mix of devices.
//
// An all-reduce goes one of three ways. All sum in rank order in FP32 and give the same bits, so the way may be chosen
// by speed:
//   waiting  a kernel on each rank that stores to its peers and waits for them there: a few KiB, no host in it, may be
//            captured into a graph. For ranks on devices of their own: on a shared one a kernel that waits can keep the
//            one that it waits for from starting.
//   ordered  each rank sums its share of the elements for all. Streams wait for events; hosts meet so that an event is
//            recorded before it is waited for. Any size, any mix of devices; may not be captured.
//   nccl     the same shares, carried by NCCL. For ranks on devices of their own.
// Numbers go through device memory that the rank reaches (its own device's, or a peer's by a path that was proven) and
// through page-locked host memory otherwise.
// A rank that fails aborts the group; every wait, on a host or on a device, then ends. A wait is bounded, too.
// All memory is taken by the constructor. The ends are for their ranks' threads.
#ifndef OFFLOAD_CUDA_GROUP_COLLECTIVE_H_
#define OFFLOAD_CUDA_GROUP_COLLECTIVE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/collective.h"
#include "cuda/cuda_backend.h"
#include "cuda/peer_path.h"

namespace offload::cuda {

enum class GroupWay { waiting, ordered, nccl };
std::string_view group_way_name(GroupWay way);

// From measurement: `waiting` up to so many bytes, `nccl` from so many on, `ordered` between them.
struct WayChoice {
  int64_t waiting_bytes_max = 0;
  int64_t nccl_bytes_min = INT64_MAX;
  bool is_slow = false;  // large sums, even by the best way

  GroupWay of(int64_t bytes) const {
    if (bytes <= waiting_bytes_max) return GroupWay::waiting;
    return bytes >= nccl_bytes_min ? GroupWay::nccl : GroupWay::ordered;
  }
};

// One all-reduce of a size in each way; nothing where the way is not there for it.
struct WaySample {
  int64_t bytes = 0;
  std::optional<double> waiting_s = {}, ordered_s = {}, nccl_s = {};
};
// `samples` by ascending size. A way is chosen up to, or from, the last sample where it wins without a gap.
WayChoice choose_ways(const std::vector<WaySample>& samples);

struct GroupOptions {
  // How paths are found; a test or a bench may have some missing.
  std::function<PeerPath(int device_a, int device_b)> prove_path = prove_peer_path;
  bool nccl = true;
  bool measure = true;                            // false: waiting for what fits, else ordered
  std::optional<GroupWay> only = {};              // this way wherever it can go
  std::chrono::milliseconds stall_after{10'000};  // how long a rank waits for its peers, host and device each
};

class DeviceGroup {
 public:
  // Elements of a waiting all-reduce, at most: 8 rows of a hidden size of 8192.
  static constexpr int64_t kWaitingElementsMost = int64_t{64} << 10;

  // The backends outlive the group; backend r is rank r's. Throws Error{resource}, Error{usage} for too many ranks.
  explicit DeviceGroup(std::vector<CudaBackend*> backends, const GroupOptions& options = {});
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int world() const;
  // Rank `rank`'s end; the group outlives it. One per rank. An all-reduce that is captured must be small enough to
  // wait.
  std::unique_ptr<Collective> end(int rank);

  // Whether this group has the way at all, for so many elements.
  bool has(GroupWay way, int64_t elements) const;
  const WayChoice& choice() const;
  // What the choice was made by; none where the group did not measure.
  const std::vector<WaySample>& samples() const;
  // Measures every way of the group on the ranks' devices, which should be idle. REQUIRES: no rank is in a call.
  std::vector<WaySample> measure();
  const PeerPath& path(int a, int b) const;  // between two ranks
  // "2 ranks on 2 devices; peer access, written and verified; waiting to 256 KiB, nccl from 4 MiB"
  std::string describe() const;

 private:
  class End;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_GROUP_COLLECTIVE_H_
