#include "version.h"

#include "core/base.h"
#include "tools/commit.h"

namespace offload::tools {

std::string_view built_commit() {
  return kBuiltCommit;
}

std::string version_text(std::string_view program) {
  return fmt::format("{} {} ({})", program, OFFLOAD_VERSION, kBuiltCommit);
}

}  // namespace offload::tools
