// Replay of a routing trace against a policy, with nothing behind it: what would hit, what would be copied.
//
// Thread-safe: no state.
#ifndef OFFLOAD_OFFLOAD_POLICY_REPLAY_H_
#define OFFLOAD_OFFLOAD_POLICY_REPLAY_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "offload/expert_policy.h"
#include "offload/routing_trace.h"

namespace offload {

struct PhaseReplay {
  int64_t steps = 0;
  PolicyCounts counts;

  // Share of the slab runs whose expert lay in its slot before the layer was routed; 0 when there was none.
  double hit_rate() const;
};

struct Replay {
  PhaseReplay prefill, decode;

  int64_t copies() const { return prefill.counts.copies() + decode.counts.copies(); }
};

// Runs `policy` over steps [begin, end) of the trace; counts what these steps added.
Replay replay(ExpertPolicy& policy, const RoutingTrace& trace, int64_t begin, int64_t end);

// The fewest misses that any choice of victims can have over the whole trace with copies on demand (Belady 1966: evict
// what is needed last), counted over the same steps. A layer's residents run first.
Replay replay_belady(const RoutingTrace& trace, int64_t slots, int64_t begin, int64_t end);

// One line of the comparison: the decode hit rates of `trace` from step `begin` on, at a share of all experts.
struct ReplayRow {
  std::string trace;
  double resident = 0;  // share of all experts
  double lru = 0, adaptive = 0, belady = 0;
  int64_t copied_bytes = 0;  // by adaptive, decode, look-ahead included
};
ReplayRow compare_policies(const std::string& name, const RoutingTrace& trace, int64_t begin, double resident,
                           int64_t expert_bytes, int lookahead_layers);
// A Markdown table.
std::string replay_table(std::span<const ReplayRow> rows);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_POLICY_REPLAY_H_
