// NumaBinding: keeps a span of memory and the threads that first touch it on one NUMA node.
//
// Owns the topology that hwloc found. Never an error: where the system refuses or has one node, memory lies wherever it
// lies, and bind_memory() says so in one line. Thread-safe once constructed.
#ifndef OFFLOAD_OFFLOAD_NUMA_H_
#define OFFLOAD_OFFLOAD_NUMA_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace offload {

class NumaBinding {
 public:
  NumaBinding();
  ~NumaBinding();
  NumaBinding(const NumaBinding&) = delete;
  NumaBinding& operator=(const NumaBinding&) = delete;

  int nodes() const;

  // The logical number of the node that the system gives this number; -1 where there is none.
  int node_of_system(int system_node) const;

  // Asks that pages of `memory`, not yet touched, come from node `node` (by its logical number). Returns a warning or
  // "". With one node there is nothing to bind.
  std::string bind_memory(std::span<std::byte> memory, int node) const;

  // Keeps the calling thread on the node's cores. False where the system refuses.
  bool bind_thread(int node) const;

  // Share of the pages of `memory` that lie on `node`, by a sample; 1 where the system cannot tell.
  double share_on_node(std::span<const std::byte> memory, int node) const;

 private:
  struct Topology;
  std::unique_ptr<Topology> topology_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_NUMA_H_
