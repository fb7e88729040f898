// NcclExchange: NCCL as the carrier of a large all-reduce's parts. The sums are our own, so that their order, and with
// it every bit, is the same as on every other way.
//
// Point to point alone: of NCCL's own reductions none keeps rank order beyond two ranks, and its multicast (NVLS) is
// never asked for; who opens it sets NCCL_NVLS_ENABLE=0, which is the only way to keep NCCL from preparing it.
// Implemented twice: nccl_exchange.cpp, and no_nccl_exchange.cpp for a build without NCCL.
#ifndef OFFLOAD_CUDA_NCCL_EXCHANGE_H_
#define OFFLOAD_CUDA_NCCL_EXCHANGE_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "cuda/device.h"

namespace offload::cuda {

class NcclExchange {
 public:
  // One rank on each of `devices`, which differ. Null, and why in one line, where NCCL is not built in or fails to
  // start: it is never needed.
  static std::unique_ptr<NcclExchange> open(std::span<const int> devices, std::string& why);
  virtual ~NcclExchange() = default;

  // Enqueues on rank's stream: send[q] goes to rank q, receive[q] comes from it; device memory, nothing for the rank
  // itself. From the rank's thread; all ranks call it in the same order. Throws Error{device}.
  using Parts = std::span<const std::span<std::byte>>;
  virtual void exchange(int rank, Parts send, Parts receive, cudaStream_t stream) = 0;

  // Frees streams that wait in an exchange that a rank did not come to; it is of no use after that. From any thread.
  virtual void abort() noexcept = 0;
};

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_NCCL_EXCHANGE_H_
