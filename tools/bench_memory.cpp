#include "bench_memory.h"

#include <algorithm>

namespace offload::tools {
namespace {

constexpr int64_t kChunkElements = 1 << 20;

uint64_t scrambled(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Uploads value_of(element) for all elements of a contiguous tensor, a chunk at a time.
template <typename T, typename ValueOf>
void upload_values(Backend& backend, const Tensor& tensor, const ValueOf& value_of) {
  const Tensor flat = tensor.reshaped({tensor.elements()});
  std::vector<T> chunk;
  for (int64_t begin = 0; begin < flat.elements(); begin += kChunkElements) {
    const int64_t count = std::min(kChunkElements, flat.elements() - begin);
    chunk.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) chunk[static_cast<size_t>(i)] = value_of(begin + i);
    backend.upload(std::as_bytes(std::span(chunk)), flat.narrow(0, begin, count));
  }
}

}  // namespace

void* BenchMemory::allocate(int64_t bytes) {
  buffers_.push_back(backend_.allocate(std::max<int64_t>(bytes, 1), "the benchmark"));
  return buffers_.back().data();
}

Tensor BenchMemory::empty(DType dtype, std::initializer_list<int64_t> shape) {
  return Tensor(allocate(Tensor(nullptr, dtype, shape).bytes()), dtype, shape);
}

Tensor BenchMemory::numbers(DType dtype, std::initializer_list<int64_t> shape, float spread, float mean) {
  const Tensor tensor = empty(dtype, shape);
  const auto value_of = [=](int64_t i) {
    const auto bits = static_cast<float>(scrambled(static_cast<uint64_t>(i) + 0x9e3779b97f4a7c15u) >> 40);
    return mean + spread * (bits * 0x1p-23f - 1.0f);
  };
  if (dtype == DType::bf16) {
    upload_values<bf16>(backend_, tensor, [&](int64_t i) { return to_bf16(value_of(i)); });
  } else {
    OFL_ASSERT(dtype == DType::f32);
    upload_values<float>(backend_, tensor, value_of);
  }
  return tensor;
}

Tensor BenchMemory::ids(std::initializer_list<int64_t> shape, const std::function<int32_t(int64_t)>& value_of) {
  const Tensor tensor = empty(DType::i32, shape);
  upload_values<int32_t>(backend_, tensor, value_of);
  return tensor;
}

}  // namespace offload::tools
