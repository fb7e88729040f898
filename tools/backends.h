// The door to the backends: which exist in this build, and how one is made.
#ifndef OFFLOAD_TOOLS_BACKENDS_H_
#define OFFLOAD_TOOLS_BACKENDS_H_

#include <memory>

#include "common.h"
#include "core/backend.h"
#include "offload/probe.h"

namespace offload::tools {

// REQUIRES: settings from settings_of().
std::unique_ptr<Backend> make_backend(const Settings& settings);

// Measurements of this host's cores with so many threads.
ProbeFunctions host_probe(int threads);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BACKENDS_H_
