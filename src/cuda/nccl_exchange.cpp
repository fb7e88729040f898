#include "cuda/nccl_exchange.h"

#include <nccl.h>

#include <atomic>
#include <vector>

#include "core/collective.h"
#include "cuda/device_memory.h"

namespace offload::cuda {
namespace {

void check_nccl(ncclResult_t status, const char* what) {
  if (status != ncclSuccess) throw_error(ErrorCode::device, "{}: NCCL: {}", what, ncclGetErrorString(status));
}

class Communicators final : public NcclExchange {
 public:
  explicit Communicators(std::span<const int> devices) : comms_(devices.size()) {
    const DeviceScope scope(devices.front());
    check_nccl(ncclCommInitAll(comms_.data(), static_cast<int>(devices.size()), devices.data()), "starting NCCL");
  }
  ~Communicators() override {
    if (is_aborted_) return;
    for (const ncclComm_t comm : comms_) static_cast<void>(ncclCommDestroy(comm));
  }

  void exchange(int rank, Parts send, Parts receive, cudaStream_t stream) override {
    if (is_aborted_) throw Aborted{};
    const ncclComm_t comm = comms_[static_cast<size_t>(rank)];
    check_nccl(ncclGroupStart(), "beginning an exchange");
    for (size_t q = 0; q < comms_.size(); ++q) {
      const auto peer = static_cast<int>(q);
      if (!send[q].empty())
        check_nccl(ncclSend(send[q].data(), send[q].size(), ncclInt8, peer, comm, stream), "sending a part");
      if (!receive[q].empty())
        check_nccl(ncclRecv(receive[q].data(), receive[q].size(), ncclInt8, peer, comm, stream), "receiving a part");
    }
    check_nccl(ncclGroupEnd(), "exchanging parts");
  }

  void abort() noexcept override {
    if (is_aborted_.exchange(true)) return;
    for (const ncclComm_t comm : comms_) static_cast<void>(ncclCommAbort(comm));
  }

 private:
  std::atomic<bool> is_aborted_ = false;
  std::vector<ncclComm_t> comms_;  // by rank; gone after an abort
};

}  // namespace

std::unique_ptr<NcclExchange> NcclExchange::open(std::span<const int> devices, std::string& why) {
  try {
    return std::make_unique<Communicators>(devices);
  } catch (const Error& error) {
    why = error.message();
    return nullptr;
  }
}

}  // namespace offload::cuda
