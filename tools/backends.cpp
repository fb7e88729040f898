#include "backends.h"

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"

namespace offload::tools {

std::unique_ptr<Backend> make_backend(const Settings& settings) {
  OFL_ASSERT(settings.device == "cpu");
  return std::make_unique<cpu::CpuBackend>(
      std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = settings.threads}));
}

}  // namespace offload::tools
