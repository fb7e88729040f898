#include "cuda/side_stream.h"

namespace offload::cuda {
namespace {

void record(cudaEvent_t event, cudaStream_t stream) {
  check(cudaEventRecord(event, stream), "recording an event");
}
void wait(cudaStream_t stream, cudaEvent_t event) {
  check(cudaStreamWaitEvent(stream, event, 0), "making a stream wait");
}

}  // namespace

SideStream::SideStream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t* event : {&fork_, &done_[0], &done_[1], &free_[0], &free_[1]})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
}

SideStream::~SideStream() {
  for (const cudaEvent_t event : {fork_, done_[0], done_[1], free_[0], free_[1]})
    static_cast<void>(cudaEventDestroy(event));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void SideStream::mark(cudaStream_t main) {
  record(fork_, main);
}
void SideStream::start() {
  wait(stream_, fork_);
}

void SideStream::hand_over(int64_t place, cudaStream_t main) {
  record(done_[static_cast<size_t>(place)], stream_);
  wait(main, done_[static_cast<size_t>(place)]);
}
void SideStream::give_back(int64_t place, cudaStream_t main) {
  record(free_[static_cast<size_t>(place)], main);
}
void SideStream::wait_until_free(int64_t place) {
  wait(stream_, free_[static_cast<size_t>(place)]);
}

}  // namespace offload::cuda
