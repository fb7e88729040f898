// SideStream: a stream beside the ops' own, and the events that order work between the two.
//
// Owns them. What runs on it starts after mark() and start() and is waited for by join(), so that it can be captured
// into a graph with the ops' stream. Confined to the thread of its ops; one use at a time.
#ifndef OFFLOAD_CUDA_SIDE_STREAM_H_
#define OFFLOAD_CUDA_SIDE_STREAM_H_

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

  // What is issued here after start() starts after what `main` had at mark().
  void mark(cudaStream_t main);
  void start();
  // What `main` gets later starts after what was issued here.
  void join(cudaStream_t main);

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t marked_ = nullptr, done_ = nullptr;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_SIDE_STREAM_H_
