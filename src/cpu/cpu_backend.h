// CpuBackend: the host as a device. Its memory is the host's, its transfers are copies.
#ifndef OFFLOAD_CPU_CPU_BACKEND_H_
#define OFFLOAD_CPU_CPU_BACKEND_H_

#include <memory>

#include "core/backend.h"

namespace offload::cpu {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::unique_ptr<Ops> ops) : ops_(std::move(ops)) {}

  std::string_view name() const override { return "cpu"; }
  Buffer allocate(int64_t bytes, std::string_view tag) override;
  Ops& ops() override { return *ops_; }
  void upload(std::span<const std::byte> host, const Tensor& device) override;
  void download(const Tensor& device, std::span<std::byte> host) override;
  void fill_zero(const Tensor& device) override;

 private:
  void release(void* data, int64_t bytes) noexcept override;

  std::unique_ptr<Ops> ops_;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_BACKEND_H_
