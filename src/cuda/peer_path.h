// PeerPath: whether one device reaches another's memory, found by writing there and looking, not by asking.
//
// Some boards say that they have peer access and lose the writes. A path that was found whole has peer access turned on
// for the life of the process; one that was not has it off.
#ifndef OFFLOAD_CUDA_PEER_PATH_H_
#define OFFLOAD_CUDA_PEER_PATH_H_

#include <string>
#include <string_view>

namespace offload::cuda {

enum class Reach {
  same_device,  // no path needed
  peer,         // loads, stores and copies arrived in both directions
  absent,       // the driver offers none
  broken,       // the driver offers one, and bytes were lost
};
std::string_view reach_name(Reach reach);

struct PeerPath {
  Reach reach = Reach::absent;
  std::string why;  // in one line where it is absent or broken
};

// Between devices `a` and `b`, both ways: kernels on each store into and load from the other's memory, and copies go
// there. Takes some milliseconds and 2 MiB of each. Leaves the current device as it was. Throws Error{resource}.
PeerPath prove_peer_path(int a, int b);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_PEER_PATH_H_
