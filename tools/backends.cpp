#include "backends.h"

#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/roofs.h"
#include "cpu/thread_collective.h"

namespace offload::tools {

std::unique_ptr<Backend> make_backend(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  const int threads_of_rank = std::max(1, settings.threads / settings.tp);
  return std::make_unique<cpu::CpuBackend>(
      std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = threads_of_rank}));
}

struct DeviceSet::Group {
  explicit Group(int world) : threads(world) {}
  cpu::ThreadGroup threads;
};

DeviceSet::~DeviceSet() = default;

DeviceSet::DeviceSet(const Settings& settings) {
  for (int rank = 0; rank < settings.tp; ++rank) backends_.push_back(make_backend(settings));
  if (settings.tp == 1) return;
  group_ = std::make_unique<Group>(settings.tp);
  for (int rank = 0; rank < settings.tp; ++rank) ends_.push_back(group_->threads.end(rank));
}

Devices DeviceSet::devices() const {
  std::vector<Backend*> backends;
  std::vector<Collective*> ends;
  for (const auto& backend : backends_) backends.push_back(backend.get());
  for (const auto& end : ends_) ends.push_back(end.get());
  return {std::move(backends), std::move(ends)};
}

Roofs measure_roofs(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  return {.read_bytes_per_s = cpu::measure_dram_read_bytes_per_s(settings.threads),
          .flops_per_s = cpu::measure_fma_flops_per_s(settings.threads, cpu::best_isa())};
}

std::string_view instruction_set(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  return cpu::isa_name(cpu::best_isa());
}

}  // namespace offload::tools
