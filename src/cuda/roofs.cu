#include "cuda/roofs.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <future>
#include <vector>

#include "cuda/blas.h"
#include "cuda/kernel.cuh"
#include "cuda/mma.cuh"

namespace offload::cuda {
namespace {

constexpr int kRounds = 7;

constexpr int64_t kLinkBytes = int64_t{256} << 20;

void use_device(const DeviceCaps& caps) {
  check(cudaSetDevice(caps.device), "selecting the device");
}

class DeviceBlock {
 public:
  explicit DeviceBlock(int64_t bytes) {
    check(cudaMalloc(&data_, static_cast<size_t>(bytes)), "taking device memory to measure with");
  }
  ~DeviceBlock() { static_cast<void>(cudaFree(data_)); }
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

class HostBlock {
 public:
  explicit HostBlock(int64_t bytes) {
    check(cudaHostAlloc(&data_, static_cast<size_t>(bytes), cudaHostAllocDefault),
          "taking page-locked host memory to measure with");
  }
  ~HostBlock() { static_cast<void>(cudaFreeHost(data_)); }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

void copy_pieces(const HostBlock& host, const DeviceBlock& device, int64_t count, int64_t bytes, cudaStream_t stream) {
  for (int64_t i = 0; i < count; ++i)
    check(cudaMemcpyAsync(static_cast<std::byte*>(device.data()) + i * bytes,
                          static_cast<std::byte*>(host.data()) + i * bytes, static_cast<size_t>(bytes),
                          cudaMemcpyHostToDevice, stream),
          "copying to the device");
}

// The least of kRounds times of `work` on the stream, after one to warm up.
double best_seconds(cudaStream_t stream, const std::function<void()>& work) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  work();
  float best_ms = 1e30f;
  for (int i = 0; i < kRounds; ++i) {
    check(cudaEventRecord(begin, stream), "recording an event");
    work();
    check(cudaEventRecord(end, stream), "recording an event");
    check(cudaEventSynchronize(end), "waiting for the device");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "reading a time");
    best_ms = std::min(best_ms, ms);
  }
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  return static_cast<double>(best_ms) * 1e-3;
}

struct Stream {
  Stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream"); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t stream = nullptr;
};

// Every 16 bytes once, four loads under way per thread; the store keeps the loads.
__global__ void read_kernel(const uint4* x, int64_t count, uint32_t* sink) {
  uint32_t all = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const uint4 v = x[i + u * step];
      all ^= v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  for (; i < count; i += step) all ^= x[i].x;
  if (all == 0x9e3779b9u) *sink = all;
}

// Normal-looking bits: 16-bit floats of magnitude 0.5 to 2 with either sign, the same in both formats' ranges.
__global__ void fill_kernel(uint16_t* x, int64_t count, bool is_bf16) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint64_t v = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
  v = (v ^ (v >> 31)) * 0xbf58476d1ce4e5b9u;
  const auto bits = static_cast<uint32_t>(v >> 40);
  const uint32_t sign = (bits & 1u) << 15;
  x[i] =
      static_cast<uint16_t>(is_bf16 ? sign | 0x3f00u | ((bits >> 1) & 0xffu) : sign | 0x3800u | ((bits >> 1) & 0x7ffu));
}

constexpr int kMmaThreads = 256, kMmaBlocks = 2;  // of a multiprocessor
constexpr int kMmaSums = 8;                       // of a warp: enough to hide the instruction's latency
constexpr int kMmaRounds = 4096;

__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks) m16n8k8_kernel(float* sink) {
  const uint32_t ones = 0x3c003c00u, more = threadIdx.x * 0x00010001u;  // FP16 from 1 to 1.25
  float d[kMmaSums][4] = {};
  for (int round = 0; round < kMmaRounds; ++round) {
#pragma unroll
    for (auto& sums : d) mma_f16_1688(sums, {ones + more, ones ^ more}, ones + more);
  }
  float all = 0;
  for (const auto& sums : d) all += sums[0] + sums[1] + sums[2] + sums[3];
  if (all == 1) *sink = all;  // never; keeps the sums
}

__global__ void empty_kernel() {}

}  // namespace

double measure_device_read_bytes_per_s(const DeviceCaps& caps) {
  use_device(caps);
  constexpr int64_t kBytes = int64_t{2} << 30;
  const DeviceBlock block(kBytes), sink(256);
  const Stream lane;
  check(cudaMemsetAsync(block.data(), 0x5a, kBytes, lane.stream), "filling device memory");
  const double seconds = best_seconds(lane.stream, [&] {
    launch(read_kernel, static_cast<unsigned>(caps.multiprocessors * 8), 512, 0, lane.stream,
           static_cast<const uint4*>(block.data()), kBytes / 16, static_cast<uint32_t*>(sink.data()));
  });
  return static_cast<double>(kBytes) / seconds;
}

double measure_gemm_seconds(const DeviceCaps& caps, GemmType type, int64_t m, int64_t n, int64_t k) {
  use_device(caps);
  const DeviceBlock x(m * k * 2), w(n * k * 2), out(m * n * 2);
  const Stream lane;
  const auto fill = [&](const DeviceBlock& block, int64_t count) {
    launch(fill_kernel, blocks_for(count, 256), 256, 0, lane.stream, static_cast<uint16_t*>(block.data()), count,
           type == GemmType::bf16);
  };
  fill(x, m * k);
  fill(w, n * k);
  cublasHandle_t blas = nullptr;
  check_blas(cublasCreate(&blas), "opening cuBLAS");
  check_blas(cublasSetStream(blas, lane.stream), "setting cuBLAS's stream");
  const cudaDataType data_type = type == GemmType::bf16 ? CUDA_R_16BF : CUDA_R_16F;
  const float one = 1.0f, zero = 0.0f;
  const double seconds = best_seconds(lane.stream, [&] {
    check_blas(
        cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m), static_cast<int>(k),
                     &one, w.data(), data_type, static_cast<int>(k), x.data(), data_type, static_cast<int>(k), &zero,
                     out.data(), data_type, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "a matrix product of cuBLAS");
  });
  static_cast<void>(cublasDestroy(blas));
  return seconds;
}

double measure_gemm_flops_per_s(const DeviceCaps& caps, GemmType type) {
  constexpr int64_t m = 8192, n = 4096, k = 4096;
  return 2.0 * m * n * k / measure_gemm_seconds(caps, type, m, n, k);
}

double measure_m16n8k8_flops_per_s(const DeviceCaps& caps) {
  use_device(caps);
  const DeviceBlock sink(256);
  const Stream lane;
  const int blocks = caps.multiprocessors * kMmaBlocks;
  const double seconds = best_seconds(lane.stream, [&] {
    launch(m16n8k8_kernel, static_cast<unsigned>(blocks), kMmaThreads, 0, lane.stream,
           static_cast<float*>(sink.data()));
  });
  return 2.0 * 16 * 8 * 8 * kMmaSums * kMmaRounds * (kMmaThreads / kWarp) * blocks / seconds;
}

double measure_link_bytes_per_s(const DeviceCaps& caps) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  return static_cast<double>(kPiece) / measure_copy_seconds(caps, kPiece);
}

double measure_copy_seconds(const DeviceCaps& caps, int64_t bytes) {
  use_device(caps);
  const int64_t copies = std::clamp<int64_t>(kLinkBytes / bytes, 1, 1000);
  const DeviceBlock block(copies * bytes);
  const HostBlock host(copies * bytes);
  const Stream lane;
  return best_seconds(lane.stream, [&] { copy_pieces(host, block, copies, bytes, lane.stream); }) /
         static_cast<double>(copies);
}

LinkLoad::LinkLoad(const DeviceCaps& caps) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  std::promise<void> started;
  std::future<void> has_started = started.get_future();
  copier_ = std::thread([this, caps, started = std::move(started)]() mutable {
    bool has_said = false;
    try {
      use_device(caps);
      const DeviceBlock block(kLinkBytes);
      const HostBlock host(kLinkBytes);
      const Stream lane;
      copy_pieces(host, block, kLinkBytes / kPiece, kPiece, lane.stream);
      started.set_value();
      has_said = true;
      while (!ends_) {
        copy_pieces(host, block, kLinkBytes / kPiece, kPiece, lane.stream);
        if (cudaStreamSynchronize(lane.stream) != cudaSuccess) return;
      }
    } catch (...) {
      if (!has_said) started.set_exception(std::current_exception());
    }
  });
  try {
    has_started.get();
  } catch (...) {
    copier_.join();
    throw;
  }
}

LinkLoad::~LinkLoad() {
  ends_ = true;
  if (copier_.joinable()) copier_.join();
}

double measure_launch_seconds(const DeviceCaps& caps) {
  use_device(caps);
  constexpr int kLaunches = 1000;
  const Stream lane;
  return best_seconds(lane.stream,
                      [&] {
                        for (int i = 0; i < kLaunches; ++i) launch(empty_kernel, 1, 32, 0, lane.stream);
                      }) /
         kLaunches;
}

double measure_wait_seconds(const DeviceCaps& caps) {
  use_device(caps);
  constexpr int kWaits = 500;
  const Stream lane;
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kWaits; ++i) {
      launch(empty_kernel, 1, 32, 0, lane.stream);
      check(cudaStreamSynchronize(lane.stream), "waiting for the device");
    }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kWaits);
  }
  return best;
}

}  // namespace offload::cuda
