#include "offload/numa.h"

#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base.h"

namespace offload {

struct NumaBinding::Topology {
  hwloc_topology_t handle = nullptr;

  Topology() {
    if (hwloc_topology_init(&handle) != 0) {
      handle = nullptr;
    } else if (hwloc_topology_load(handle) != 0) {
      hwloc_topology_destroy(handle);
      handle = nullptr;
    }
  }
  ~Topology() {
    if (handle != nullptr) hwloc_topology_destroy(handle);
  }
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  hwloc_obj_t node(int index) const {
    if (handle == nullptr || index < 0) return nullptr;
    return hwloc_get_obj_by_type(handle, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(index));
  }
};

NumaBinding::NumaBinding() : topology_(std::make_unique<Topology>()) {}

NumaBinding::~NumaBinding() = default;

int NumaBinding::nodes() const {
  if (topology_->handle == nullptr) return 1;
  return std::max(1, hwloc_get_nbobjs_by_type(topology_->handle, HWLOC_OBJ_NUMANODE));
}

int NumaBinding::node_of_system(int system_node) const {
  for (int index = 0; index < nodes(); ++index) {
    const hwloc_obj_t object = topology_->node(index);
    if (object != nullptr && static_cast<int>(object->os_index) == system_node) return index;
  }
  return -1;
}

std::string NumaBinding::bind_memory(std::span<std::byte> memory, int node) const {
  const hwloc_obj_t object = topology_->node(node);
  if (object == nullptr)
    return fmt::format("NUMA node {} does not exist, found {} node(s); memory is not bound", node, nodes());
  if (nodes() == 1 || memory.empty()) return "";
  if (hwloc_set_area_membind(topology_->handle, memory.data(), memory.size(), object->nodeset, HWLOC_MEMBIND_BIND,
                             HWLOC_MEMBIND_BYNODESET) == 0)
    return "";
  return fmt::format("{} bytes could not be bound to NUMA node {}: {}; copies may cross the socket link", memory.size(),
                     node, std::strerror(errno));
}

bool NumaBinding::bind_thread(int node) const {
  const hwloc_obj_t object = topology_->node(node);
  if (object == nullptr || object->cpuset == nullptr || hwloc_bitmap_iszero(object->cpuset)) return false;
  return hwloc_set_cpubind(topology_->handle, object->cpuset, HWLOC_CPUBIND_THREAD) == 0;
}

double NumaBinding::share_on_node(std::span<const std::byte> memory, int node) const {
  constexpr size_t kSamples = 64;
  const hwloc_obj_t object = topology_->node(node);
  if (object == nullptr || nodes() == 1 || memory.empty()) return 1.0;
  const hwloc_bitmap_t found = hwloc_bitmap_alloc();
  size_t known = 0, here = 0;
  for (size_t i = 0; i < kSamples; ++i) {
    const std::byte* page = memory.data() + (memory.size() - 1) / kSamples * i;
    if (hwloc_get_area_memlocation(topology_->handle, page, 1, found, HWLOC_MEMBIND_BYNODESET) != 0) continue;
    if (hwloc_bitmap_iszero(found)) continue;
    ++known;
    if (hwloc_bitmap_isincluded(found, object->nodeset)) ++here;
  }
  hwloc_bitmap_free(found);
  return known == 0 ? 1.0 : static_cast<double>(here) / static_cast<double>(known);
}

}  // namespace offload
