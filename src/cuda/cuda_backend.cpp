#include "cuda/cuda_backend.h"

#include <algorithm>

namespace offload::cuda {

namespace {

bool is_pinned(const void* host) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, host), "looking up host memory");
  return attributes.type != cudaMemoryTypeUnregistered;
}

}  // namespace

// --- CudaLane ---

CudaLane::CudaLane(const std::vector<cudaEvent_t>& events, StagingRing& staging, Priority priority)
    : events_(events), staging_(staging) {
  int usual = 0, first = 0;
  check(cudaDeviceGetStreamPriorityRange(&usual, &first), "asking for the streams' priorities");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == Priority::first ? first : usual),
        "creating a stream");
}

CudaLane::~CudaLane() {
  static_cast<void>(cudaStreamSynchronize(stream_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

void CudaLane::copy_in(std::span<const std::byte> host, const Tensor& device) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  if (host.empty()) return;
  // What is not pinned would make the driver hold the host up until the lane gets here.
  if (!is_pinned(host.data())) return staging_.copy_in(host, device.data(), stream_);
  check(cudaMemcpyAsync(device.data(), host.data(), host.size(), cudaMemcpyHostToDevice, stream_),
        "copying to the device");
}

void CudaLane::call(void (*function)(void*), void* context) {
  check(cudaLaunchHostFunc(stream_, function, context), "queueing a host function");
}

void CudaLane::record(int event) {
  check(cudaEventRecord(events_[static_cast<size_t>(event)], stream_), "recording an event");
}

void CudaLane::wait(int event) {
  check(cudaStreamWaitEvent(stream_, events_[static_cast<size_t>(event)], 0), "waiting for an event");
}

void CudaLane::drain() {
  check(cudaStreamSynchronize(stream_), "waiting for the device");
}

// --- CudaBackend ---

CudaBackend::CudaBackend(int ordinal, std::optional<int> force_sm, int ranks_on_device)
    : caps_(query_device(ordinal, force_sm)),
      ranks_on_device_(ranks_on_device),
      name_(fmt::format("cuda:{}", ordinal)) {
  bind_thread();
  staging_ = std::make_unique<StagingRing>();
  compute_ = std::make_unique<CudaLane>(events_, *staging_);
  copy_ = std::make_unique<CudaLane>(events_, *staging_);
  sums_ = std::make_unique<CudaLane>(events_, *staging_, CudaLane::Priority::first);
  ops_ = std::make_unique<CudaOps>(caps_, compute_->stream(), *staging_);
}

CudaBackend::~CudaBackend() {
  static_cast<void>(cudaSetDevice(caps_.device));
  repeated_.clear();
  ops_.reset();
  sums_.reset();
  copy_.reset();
  compute_.reset();
  staging_.reset();
  for (cudaEvent_t event : events_) static_cast<void>(cudaEventDestroy(event));
}

void CudaBackend::bind_thread() {
  check(cudaSetDevice(caps_.device), "choosing the device");
}

std::optional<int64_t> CudaBackend::free_bytes() {
  return device_free_bytes() / ranks_on_device_;
}

int64_t CudaBackend::device_free_bytes() {
  bind_thread();
  size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "reading the device's free memory");
  return static_cast<int64_t>(free_bytes);
}

Buffer CudaBackend::allocate(int64_t bytes, std::string_view tag) {
  if (bytes == 0) return {};
  bind_thread();
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // not sticky
    throw_error(ErrorCode::resource,
                "{} bytes on {} for {} could not be had: {} of {} are free; lower --vram-budget, --context or --chunk, "
                "or stop what else uses the device",
                bytes, name_, tag, device_free_bytes(), caps_.memory_bytes);
  }
  check(status, "taking device memory");
  return {*this, data, bytes};
}

Buffer CudaBackend::allocate_host(int64_t bytes, std::string_view tag) {
  if (bytes == 0) return {};
  bind_thread();
  void* data = nullptr;
  const cudaError_t status = cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocDefault);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // not sticky
    throw_error(ErrorCode::resource, "{} bytes of page-locked host memory for {} could not be had", bytes, tag);
  }
  check(status, "taking page-locked host memory");
  host_blocks_.push_back(data);
  return {*this, data, bytes};
}

void CudaBackend::release(void* data, int64_t) noexcept {
  static_cast<void>(cudaSetDevice(caps_.device));
  static_cast<void>(cudaStreamSynchronize(compute_->stream()));
  repeated_.clear();
  const auto host = std::find(host_blocks_.begin(), host_blocks_.end(), data);
  if (host == host_blocks_.end()) {
    static_cast<void>(cudaFree(data));
    return;
  }
  static_cast<void>(cudaFreeHost(data));
  host_blocks_.erase(host);
}

void CudaBackend::repeat(uint64_t key, const std::function<void()>& body) {
  constexpr size_t kGraphsMost = 1024;
  const auto found = repeated_.find(key);
  if (found == repeated_.end()) {
    if (repeated_.size() == kGraphsMost) repeated_.clear();
    repeated_.emplace(key, Repeated{});
    return body();
  }
  Repeated& repeated = found->second;
  if (repeated.graph == nullptr)
    repeated = capture(body);
  else
    ops_->add_cost(repeated.cost);
  check(cudaGraphLaunch(repeated.graph.get(), compute_->stream()), "launching a graph");
}

// Nothing runs meanwhile. A body that throws leaves no capture behind.
CudaBackend::Repeated CudaBackend::capture(const std::function<void()>& body) {
  const Cost before = ops_->total_cost();
  check(cudaStreamBeginCapture(compute_->stream(), cudaStreamCaptureModeThreadLocal), "beginning a graph");
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(compute_->stream(), &graph));
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaGetLastError());  // what failed is being thrown
    throw;
  }
  check(cudaStreamEndCapture(compute_->stream(), &graph), "ending a graph");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  static_cast<void>(cudaGraphDestroy(graph));
  check(status, "making a graph ready");
  Repeated repeated;
  repeated.graph.reset(executable);
  const Cost& after = ops_->total_cost();
  repeated.cost = {after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written,
                   after.flops - before.flops};
  return repeated;
}

void CudaBackend::create_events(int count) {
  OFL_ASSERT(events_.empty());
  bind_thread();
  events_.resize(static_cast<size_t>(count));
  for (cudaEvent_t& event : events_)
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
}

void CudaBackend::upload(std::span<const std::byte> host, const Tensor& device) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  bind_thread();
  staging_->copy_in(host, device.data(), compute_->stream());
}

void CudaBackend::download(const Tensor& device, std::span<std::byte> host) {
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  if (host.empty()) return;
  bind_thread();
  if (!is_pinned(host.data())) {
    staging_->copy_out(device.data(), host, compute_->stream());
  } else {
    check(cudaMemcpyAsync(host.data(), device.data(), host.size(), cudaMemcpyDeviceToHost, compute_->stream()),
          "copying from the device");
    compute_->drain();
  }
  if (result_check_) result_check_();
}

void CudaBackend::fill_zero(const Tensor& device) {
  OFL_ASSERT(device.contiguous());
  if (device.bytes() == 0) return;
  bind_thread();
  check(cudaMemsetAsync(device.data(), 0, static_cast<size_t>(device.bytes()), compute_->stream()),
        "clearing device memory");
}

// --- pinning ---

bool pin_host_memory(std::span<std::byte> memory) {
  const cudaError_t status = cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
  if (status == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorMemoryAllocation || status == cudaErrorNotSupported) return false;
  check(status, "pinning host memory");
  return false;
}

void unpin_host_memory(std::span<std::byte> memory) {
  static_cast<void>(cudaHostUnregister(memory.data()));
}

}  // namespace offload::cuda
