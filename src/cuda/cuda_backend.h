// CudaBackend: one CUDA device as a Backend: its memory, its two lanes as streams, and its ops.
//
// Owns the streams, the events and the ops. upload() returns when the host bytes may be reused and is ordered on the
// compute lane; download() and fill_zero() come after everything on it. Confined to one thread at a time; the ops
// and lanes are for the thread that called bind_thread() last. After a device fault every later call throws.
#ifndef OFFLOAD_CUDA_CUDA_BACKEND_H_
#define OFFLOAD_CUDA_CUDA_BACKEND_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/backend.h"
#include "cuda/cuda_ops.h"
#include "cuda/device.h"
#include "cuda/staging_ring.h"

namespace offload::cuda {

class CudaLane final : public Lane {
 public:
  // Where the device has to choose whose blocks start next.
  enum class Priority { usual, first };
  // Owns neither.
  CudaLane(const std::vector<cudaEvent_t>& events, StagingRing& staging, Priority priority = Priority::usual);
  ~CudaLane() override;
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  cudaStream_t stream() const { return stream_; }

  void copy_in(std::span<const std::byte> host, const Tensor& device) override;
  void call(void (*function)(void*), void* context) override;
  void record(int event) override;
  void wait(int event) override;
  void drain() override;

 private:
  const std::vector<cudaEvent_t>& events_;
  StagingRing& staging_;
  cudaStream_t stream_ = nullptr;
};

class CudaBackend final : public Backend {
 public:
  // `ranks_on_device`: how many backends share the device; free_bytes() is this one's part. Throws Error like
  // query_device().
  explicit CudaBackend(int ordinal, std::optional<int> force_sm = {}, int ranks_on_device = 1);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  const DeviceCaps& caps() const { return caps_; }
  cudaStream_t compute_stream() const { return compute_->stream(); }
  // For sums over ranks that run beside the ops.
  CudaLane& sum_lane() { return *sums_; }
  // Called when the host has waited for the device's results, before it uses them; may throw. Empty: nothing to check.
  void set_result_check(std::function<void()> check) { result_check_ = std::move(check); }

  std::string_view name() const override { return name_; }
  bool uses_host_memory() const override { return false; }
  bool reads_pinned_memory() const override { return caps_.reads_pinned_memory; }
  std::optional<int64_t> free_bytes() override;
  void bind_thread() override;
  Buffer allocate(int64_t bytes, std::string_view tag) override;
  Buffer allocate_host(int64_t bytes, std::string_view tag) override;
  Ops& ops() override { return *ops_; }
  // As a CUDA graph, captured when the key comes the second time. Memory that goes takes all graphs with it.
  void repeat(uint64_t key, const std::function<void()>& body) override;
  void create_events(int count) override;
  Lane& compute_lane() override { return *compute_; }
  Lane& copy_lane() override { return *copy_; }
  void upload(std::span<const std::byte> host, const Tensor& device) override;
  void download(const Tensor& device, std::span<std::byte> host) override;
  void fill_zero(const Tensor& device) override;

 private:
  struct DestroyGraph {
    void operator()(cudaGraphExec_t graph) const { static_cast<void>(cudaGraphExecDestroy(graph)); }
  };
  struct Repeated {
    std::unique_ptr<CUgraphExec_st, DestroyGraph> graph;  // null: the key came once
    Cost cost;
  };

  void release(void* data, int64_t bytes) noexcept override;
  Repeated capture(const std::function<void()>& body);

  int64_t device_free_bytes();

  DeviceCaps caps_;
  int ranks_on_device_;
  std::string name_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> host_blocks_;  // of allocate_host(), not yet released
  std::unique_ptr<StagingRing> staging_;
  std::unique_ptr<CudaLane> compute_, copy_, sums_;
  std::unique_ptr<CudaOps> ops_;
  std::unordered_map<uint64_t, Repeated> repeated_;
  std::function<void()> result_check_;
};

// Pins memory for every device of the process; false when the system has no more to give. Throws Error{device}.
bool pin_host_memory(std::span<std::byte> memory);
void unpin_host_memory(std::span<std::byte> memory);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_CUDA_BACKEND_H_
