// An engine on the demo checkpoint over ranks that are threads, on a device of the test's choice.
#ifndef OFFLOAD_TESTS_RANK_RIG_H_
#define OFFLOAD_TESTS_RANK_RIG_H_

#include <functional>
#include <memory>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/thread_collective.h"
#include "golden_chain.h"
#include "remote_device.h"

namespace offload {

struct World {
  int ranks = 1;
  ShardForm shard = ShardForm::expert;
  ExpertCacheOptions cache = {};
  Arithmetic arithmetic{DType::bf16, Rounding::fused};
  int64_t chunk = 64;
  int64_t prefill_group = 0;
  uint64_t seed = 1;       // of remote devices
  bool is_closed = false;  // their memory to the host
  bool sums = false;       // see RemoteDevice::Options
  std::function<void(EngineOptions&)> edit = {};
  std::function<std::unique_ptr<Ops>(int rank)> ops = {};  // of CPU devices; nothing: CpuOps of one thread
};

inline std::unique_ptr<cpu::CpuOps> one_thread() {
  return std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1});
}
inline std::unique_ptr<cpu::CpuBackend> make_device(const World& world, int rank, const cpu::CpuBackend*) {
  if (world.ops) return std::make_unique<cpu::CpuBackend>(world.ops(rank));
  return std::make_unique<cpu::CpuBackend>(one_thread());
}
inline std::unique_ptr<RemoteDevice> make_device(const World& world, int rank, const RemoteDevice*) {
  return std::make_unique<RemoteDevice>(
      RemoteDevice::Options{world.seed * 100 + static_cast<uint64_t>(rank), world.is_closed, world.sums});
}
inline std::unique_ptr<Collective> make_end(cpu::CpuBackend&, std::unique_ptr<Collective> end) {
  return end;
}
inline std::unique_ptr<Collective> make_end(RemoteDevice& device, std::unique_ptr<Collective> end) {
  return device.wrap(std::move(end));
}

template <typename Device>
class RigOn {
 public:
  // `prepare` and `before_load` are called for each rank's device, after and before the engine is made.
  using Prepare = std::function<void(Device&, int rank)>;
  explicit RigOn(const World& world, const Prepare& prepare = {}, const Prepare& before_load = {})
      : group_(world.ranks) {
    EngineOptions options;
    options.model_dir = Golden::model_dir();
    options.context = 1024;
    options.chunk = world.chunk;
    options.prefill_group = world.prefill_group;
    options.load_threads = 1;
    options.shard = world.shard;
    options.cache = world.cache;
    options.arithmetic = world.arithmetic;
    if (world.edit) world.edit(options);
    std::vector<Backend*> backends;
    std::vector<Collective*> ends;
    std::vector<Ops*> host_ops;
    for (int rank = 0; rank < world.ranks; ++rank) {
      devices_.push_back(make_device(world, rank, static_cast<const Device*>(nullptr)));
      backends.push_back(devices_.back().get());
      host_ops_.push_back(one_thread());
      host_ops.push_back(host_ops_.back().get());
      if (before_load) before_load(*devices_.back(), rank);
      if (world.ranks > 1) {
        ends_.push_back(make_end(*devices_.back(), group_.end(rank)));
        ends.push_back(ends_.back().get());
      }
    }
    engine_ = std::make_unique<Engine>(options, Devices(backends, ends, host_ops));
    for (int rank = 0; rank < world.ranks && prepare; ++rank) prepare(device(rank), rank);
  }

  Engine& engine() { return *engine_; }
  Device& device(int rank) { return *devices_[static_cast<size_t>(rank)]; }

  std::vector<float> run(const GoldenPrompt& prompt, size_t chain_tokens) {
    return chain_logits(*engine_, prompt, chain_tokens);
  }

 private:
  cpu::ThreadGroup group_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Ops>> host_ops_;
  std::vector<std::unique_ptr<Collective>> ends_;
  std::unique_ptr<Engine> engine_;
};

using Rig = RigOn<cpu::CpuBackend>;
using RemoteRig = RigOn<RemoteDevice>;

}  // namespace offload

#endif  // OFFLOAD_TESTS_RANK_RIG_H_
