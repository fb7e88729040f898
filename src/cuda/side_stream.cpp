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
  for (cudaEvent_t* event : {&marked_, &done_})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
}

SideStream::~SideStream() {
  for (const cudaEvent_t event : {marked_, done_}) static_cast<void>(cudaEventDestroy(event));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void SideStream::mark(cudaStream_t main) {
  record(marked_, main);
}
void SideStream::start() {
  wait(stream_, marked_);
}
void SideStream::join(cudaStream_t main) {
  record(done_, stream_);
  wait(main, done_);
}

}  // namespace offload::cuda
