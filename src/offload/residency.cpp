#include "offload/residency.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace offload {
namespace {

constexpr int64_t kBlockAlignment = 64;  // a cache line; vector loads of a block's start are aligned

}  // namespace

Residency::Residency(const WeightSource& source, std::vector<ExpertLayer> layers, const ExpertShape& shape)
    : source_(source),
      layers_(std::move(layers)),
      shape_(shape),
      block_stride_((shape.block_bytes() + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment) {
  for (const ExpertLayer& layer : layers_)
    for (int64_t e = 0; e < shape_.experts; ++e) expert_pieces(source_, layer, shape_, e);
}

void Residency::load(int threads, const std::function<void(int64_t)>& progress) {
  memory_ = HostMemory(bytes(), "routed experts");
  const int64_t blocks = static_cast<int64_t>(layers_.size()) * shape_.experts;
  std::atomic<int64_t> next{0};
  std::mutex mutex;  // guards first_error and the calls of progress
  std::exception_ptr first_error;
  const auto work = [&] {
    try {
      for (int64_t b = next++; b < blocks; b = next++) {
        const ExpertLayer& layer = layers_[static_cast<size_t>(b / shape_.experts)];
        for (const ExpertPiece& piece : expert_pieces(source_, layer, shape_, b % shape_.experts))
          source_.read(piece.tensor, piece.tensor_offset,
                       {memory_.data() + b * block_stride_ + piece.block_offset, static_cast<size_t>(piece.bytes)});
        const std::lock_guard lock(mutex);
        if (first_error) return;
        if (progress) progress(shape_.block_bytes());
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first_error) first_error = std::current_exception();
      next = blocks;
    }
  };
  {
    std::vector<std::jthread> workers;
    for (int t = 1; t < threads; ++t) workers.emplace_back(work);
    work();
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace offload
