// A benchmark's tensors in a backend's memory, filled with numbers that depend on nothing but their place.
#ifndef OFFLOAD_TOOLS_BENCH_MEMORY_H_
#define OFFLOAD_TOOLS_BENCH_MEMORY_H_

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/backend.h"

namespace offload::tools {

class BenchMemory {
 public:
  explicit BenchMemory(Backend& backend) : backend_(backend) {}  // outlives this

  // Uniform in mean +- spread. F32 or BF16; spread 0 is a constant.
  Tensor numbers(DType dtype, std::initializer_list<int64_t> shape, float spread = 1.0f, float mean = 0.0f);
  // I32, value_of(element).
  Tensor ids(std::initializer_list<int64_t> shape, const std::function<int32_t(int64_t)>& value_of);
  // Of undefined content.
  Tensor empty(DType dtype, std::initializer_list<int64_t> shape);
  void* allocate(int64_t bytes);

  Backend& backend() const { return backend_; }

 private:
  Backend& backend_;
  std::vector<Buffer> buffers_;
};

// What a case does once its tensors exist. `call` counts up, so that weights can rotate.
struct PreparedBench {
  std::function<void(Ops& ops, int64_t call)> run;
  std::vector<Tensor> outputs;
};

struct BenchCase {
  std::string op;    // op_name()
  std::string name;  // unique
  std::function<PreparedBench(BenchMemory&)> prepare;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BENCH_MEMORY_H_
