// The door to the backends: which exist in this build, and how one is made.
#ifndef OFFLOAD_TOOLS_BACKENDS_H_
#define OFFLOAD_TOOLS_BACKENDS_H_

#include <memory>

#include "common.h"
#include "core/backend.h"

namespace offload::tools {

// REQUIRES: settings from settings_of().
std::unique_ptr<Backend> make_backend(const Settings& settings);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BACKENDS_H_
