#include "backends.h"

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/roofs.h"

namespace offload::tools {

std::unique_ptr<Backend> make_backend(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  return std::make_unique<cpu::CpuBackend>(
      std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = settings.threads}));
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
