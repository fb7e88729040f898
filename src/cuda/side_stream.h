// SideStream: a stream beside the ops' own, and the events that order work between the two.
//
// Owns them. What runs on it starts after fork() and is waited for by join() or hand_over(), so that it can be captured
// into a graph with the ops' stream. Confined to the thread of its ops; one use at a time.
#ifndef OFFLOAD_CUDA_SIDE_STREAM_H_
#define OFFLOAD_CUDA_SIDE_STREAM_H_

#include <array>

#include "cuda/device.h"

namespace offload::cuda {

class SideStream {
 public:
  // On the current device. Throws Error{device}, as all of these.
  SideStream();
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t stream() const { return stream_; }

  // What is issued here later starts after what `main` has by now; mark() and start() are its two halves.
  void fork(cudaStream_t main) {
    mark(main);
    start();
  }
  void mark(cudaStream_t main);
  void start();
  // What `main` gets later starts after what was issued here.
  void join(cudaStream_t main) { hand_over(0, main); }

  // For work in turns, place 0 or 1: `main` goes on after what was issued here; this stream reuses a place after what
  // `main` had when it gave the place back.
  void hand_over(int64_t place, cudaStream_t main);
  void give_back(int64_t place, cudaStream_t main);
  void wait_until_free(int64_t place);

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t fork_ = nullptr;
  std::array<cudaEvent_t, 2> done_{}, free_{};
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_SIDE_STREAM_H_
