#include "bench_ops.h"

#include <fnmatch.h>

#include <chrono>
#include <cstring>

#include "bench_shapes.h"
#include "op_cases.h"
#include "op_suite.h"
#include "terminal.h"

namespace offload::tools {
namespace {

constexpr double kSampleSeconds = 2e-3;  // the clock and the call around it cost well below 1 us

// The tests' view of a backend's memory.
class BenchMirror final : public Mirror {
 public:
  explicit BenchMirror(BenchMemory& memory) : memory_(memory) {}
  void* allocate(int64_t bytes) override { return memory_.allocate(bytes); }
  void release_all() override {}  // the memory outlives the case
  void upload(void* device, const void* host, int64_t bytes) override {
    memory_.backend().upload(std::span(static_cast<const std::byte*>(host), static_cast<size_t>(bytes)),
                             Tensor(device, DType::u8, {bytes}));
  }
  void download(void* host, const void* device, int64_t bytes) override {
    memory_.backend().download(Tensor(const_cast<void*>(device), DType::u8, {bytes}),
                               std::span(static_cast<std::byte*>(host), static_cast<size_t>(bytes)));
  }

 private:
  BenchMemory& memory_;
};

BenchCase from_test(const OpCase& test) {
  return {test.op, test.name, [test](BenchMemory& memory) -> PreparedBench {
            BenchMirror mirror(memory);
            const std::vector<Tensor> tensors = upload_case(test, mirror);
            PreparedBench prepared{[test, tensors](Ops& ops, int64_t) { test.run(ops, tensors); }, {}};
            for (size_t i = 0; i < tensors.size(); ++i)
              if (test.tensors[i].role != Role::input) prepared.outputs.push_back(tensors[i]);
            return prepared;
          }};
}

// The logical elements of a strided tensor, row by row.
void hash_tensor(Backend& backend, const Tensor& tensor, BenchHash& hash) {
  if (tensor.elements() == 0) return;
  if (tensor.contiguous()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
    backend.download(tensor, bytes);
    hash.add(bytes);
    return;
  }
  // The outermost dimension that can still be split.
  for (int i = 0; i < tensor.rank(); ++i) {
    if (tensor.dim(i) == 1) continue;
    for (int64_t j = 0; j < tensor.dim(i); ++j) hash_tensor(backend, tensor.narrow(i, j, 1), hash);
    return;
  }
}

}  // namespace

std::vector<BenchCase> chosen_cases(const CaseChoice& choice) {
  std::vector<BenchCase> chosen;
  const auto add = [&](BenchCase bench) {
    if (!choice.op.empty() && bench.op != choice.op) return;
    if (!choice.name_glob.empty() && fnmatch(choice.name_glob.c_str(), bench.name.c_str(), 0) != 0) return;
    chosen.push_back(std::move(bench));
  };
  for (BenchCase& shape : published_shapes()) add(std::move(shape));
  for (const OpCase& test : all_op_cases()) add(from_test(test));
  if (!chosen.empty()) return chosen;
  std::string names;
#define OFL_ADD_NAME(Args, name) names += fmt::format("{}{}", names.empty() ? "" : ", ", #name);
  OFL_FOR_EACH_OP(OFL_ADD_NAME)
#undef OFL_ADD_NAME
  throw_error(ErrorCode::usage, "no case matches --op \"{}\" --case \"{}\"; the ops are {}", printable(choice.op),
              printable(choice.name_glob), names);
}

BenchRow measure_case(const BenchCase& bench, int64_t repeat, const Settings& settings) {
  const std::unique_ptr<Backend> backend = make_backend(settings);
  Ops& ops = backend->ops();
  backend->create_events(0);
  Lane& lane = backend->compute_lane();
  BenchMemory memory(*backend);
  const PreparedBench prepared = bench.prepare(memory);
  ops.set_planning(true);
  prepared.run(ops, 0);
  ops.set_planning(false);
  ops.set_scratch(memory.empty(DType::u8, {std::max<int64_t>(ops.scratch_peak_bytes(), Arena::kAlignment)}));

  BenchRow row{.name = bench.name};
  ops.reset_cost();
  prepared.run(ops, 0);
  row.cost = ops.total_cost();
  BenchHash hash;
  for (const Tensor& output : prepared.outputs) hash_tensor(*backend, output, hash);
  row.hash = hash.value();

  int64_t call = 1;
  const auto time_of = [&](int64_t calls) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) prepared.run(ops, call++);
    lane.drain();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  int64_t calls = 1;
  lane.drain();
  while (time_of(calls) < kSampleSeconds) calls *= 2;  // the warm-up
  for (int64_t i = 0; i < repeat; ++i) {
    stop_if_interrupted();
    row.seconds.push_back(time_of(calls) / static_cast<double>(calls));
  }
  return row;
}

}  // namespace offload::tools
