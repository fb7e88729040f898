// CpuBackend: the host as a device. Its memory is the host's, its transfers are copies, its copy lane is a thread.
#ifndef OFFLOAD_CPU_CPU_BACKEND_H_
#define OFFLOAD_CPU_CPU_BACKEND_H_

#include <functional>
#include <memory>

#include "core/backend.h"
#include "cpu/cpu_lanes.h"

namespace offload::cpu {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::unique_ptr<Ops> ops) : ops_(std::move(ops)) {}

  std::string_view name() const override { return "cpu"; }
  bool uses_host_memory() const override { return true; }
  Buffer allocate(int64_t bytes, std::string_view tag) override;
  Buffer allocate_host(int64_t bytes, std::string_view tag) override { return allocate(bytes, tag); }
  Ops& ops() override { return *ops_; }
  void create_events(int count) override { lanes_ = std::make_unique<CpuLanes>(count); }
  // REQUIRES: create_events was called.
  Lane& compute_lane() override { return lanes_->compute(); }
  Lane& copy_lane() override { return lanes_->copy(); }
  CpuLanes& lanes() { return *lanes_; }

  // For tests: called before each allocation; may throw.
  void set_before_allocate(std::function<void()> hook) { before_allocate_ = std::move(hook); }
  void upload(std::span<const std::byte> host, const Tensor& device) override;
  void download(const Tensor& device, std::span<std::byte> host) override;
  void fill_zero(const Tensor& device) override;

 private:
  void release(void* data, int64_t bytes) noexcept override;

  std::unique_ptr<Ops> ops_;
  std::unique_ptr<CpuLanes> lanes_;
  std::function<void()> before_allocate_;
};

}  // namespace offload::cpu

#endif  // OFFLOAD_CPU_CPU_BACKEND_H_
