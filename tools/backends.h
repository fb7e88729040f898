// The door to the backends: which exist in this build, and how one is made.
#ifndef OFFLOAD_TOOLS_BACKENDS_H_
#define OFFLOAD_TOOLS_BACKENDS_H_

#include <memory>
#include <vector>

#include "common.h"
#include "core/backend.h"
#include "core/collective.h"

namespace offload::tools {

// REQUIRES: settings from settings_of().
std::unique_ptr<Backend> make_backend(const Settings& settings);

// One backend per rank and what joins them. Outlives the engine.
class DeviceSet {
 public:
  explicit DeviceSet(const Settings& settings);
  ~DeviceSet();
  Devices devices() const;

 private:
  struct Group;  // what the collectives of one backend share

  std::vector<std::unique_ptr<Backend>> backends_;
  std::unique_ptr<Group> group_;
  std::vector<std::unique_ptr<Collective>> ends_;
};

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BACKENDS_H_
