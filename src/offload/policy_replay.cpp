#include "offload/policy_replay.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

namespace offload {
namespace {

PolicyCounts difference(const PolicyCounts& after, const PolicyCounts& before) {
  return {.hits = after.hits - before.hits,
          .misses = after.misses - before.misses,
          .off_slab = after.off_slab - before.off_slab,
          .copies_lookahead = after.copies_lookahead - before.copies_lookahead,
          .lookahead_used = after.lookahead_used - before.lookahead_used};
}

}  // namespace

double PhaseReplay::hit_rate() const {
  const int64_t all = counts.hits + counts.misses;
  return all == 0 ? 0 : static_cast<double>(counts.hits) / static_cast<double>(all);
}

Replay replay(ExpertPolicy& policy, const RoutingTrace& trace, int64_t begin, int64_t end) {
  OFL_ASSERT(trace.shape() == policy.options().shape && begin >= 0 && end <= trace.steps());
  const PolicyCounts prefill = policy.counts(Phase::prefill), decode = policy.counts(Phase::decode);
  Replay out;
  ActiveExperts active(trace.shape().experts);
  for (int64_t s = begin; s < end; ++s) {
    ++(trace.phase(s) == Phase::decode ? out.decode : out.prefill).steps;
    const bool continues = s + 1 < trace.steps() && trace.phase(s + 1) == Phase::prefill;
    for (int64_t l = 0; l < trace.shape().layers; ++l)
      policy.on_routed(
          l,
          {.active = active.collect(trace.ids(s, l)), .rows = trace.rows(s), .visits_left = 0, .continues = continues},
          trace.phase(s));
  }
  out.prefill.counts = difference(policy.counts(Phase::prefill), prefill);
  out.decode.counts = difference(policy.counts(Phase::decode), decode);
  return out;
}

Replay replay_belady(const RoutingTrace& trace, int64_t slots, int64_t begin, int64_t end) {
  OFL_ASSERT(slots > 0 && begin >= 0 && end <= trace.steps());
  const int64_t layers = trace.shape().layers, experts = trace.shape().experts;
  ActiveExperts active(experts);
  // Backwards once: the group (step, layer) that uses each distinct expert next.
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  struct Use {
    int64_t key, next;
  };
  std::vector<Use> uses;
  std::vector<size_t> begins(static_cast<size_t>(end * layers) + 1);
  for (int64_t g = 0; g < end * layers; ++g) {
    begins[static_cast<size_t>(g)] = uses.size();
    for (const ActiveExpert& one : active.collect(trace.ids(g / layers, g % layers)))
      uses.push_back({g % layers * experts + one.expert, kNever});
  }
  begins.back() = uses.size();
  std::vector<int64_t> next_use(static_cast<size_t>(layers * experts), kNever);
  for (int64_t g = end * layers - 1; g >= 0; --g)
    for (size_t u = begins[static_cast<size_t>(g)]; u < begins[static_cast<size_t>(g) + 1]; ++u) {
      uses[u].next = next_use[static_cast<size_t>(uses[u].key)];
      next_use[static_cast<size_t>(uses[u].key)] = g;
    }

  Replay out;
  std::vector<bool> resident(static_cast<size_t>(layers * experts));
  std::vector<int64_t> current(static_cast<size_t>(layers * experts), kNever);  // next use of a resident
  std::priority_queue<std::pair<int64_t, int64_t>> farthest;                    // (next use, key), stale ones too
  int64_t held = 0;
  std::vector<Use> missed;
  for (int64_t g = 0; g < end * layers; ++g) {
    PhaseReplay& phase = trace.phase(g / layers) == Phase::decode ? out.decode : out.prefill;
    const bool counted = g / layers >= begin;
    if (counted && g % layers == 0) ++phase.steps;
    missed.clear();
    for (size_t u = begins[static_cast<size_t>(g)]; u < begins[static_cast<size_t>(g) + 1]; ++u) {
      const Use& use = uses[u];
      if (!resident[static_cast<size_t>(use.key)]) {
        missed.push_back(use);
        continue;
      }
      phase.counts.hits += counted ? 1 : 0;
      current[static_cast<size_t>(use.key)] = use.next;
      farthest.push({use.next, use.key});
    }
    for (const Use& use : missed) {
      phase.counts.misses += counted ? 1 : 0;
      while (held == slots) {
        const auto [next, key] = farthest.top();
        farthest.pop();
        if (!resident[static_cast<size_t>(key)] || current[static_cast<size_t>(key)] != next) continue;
        resident[static_cast<size_t>(key)] = false;
        --held;
      }
      resident[static_cast<size_t>(use.key)] = true;
      current[static_cast<size_t>(use.key)] = use.next;
      farthest.push({use.next, use.key});
      ++held;
    }
  }
  return out;
}

ReplayRow compare_policies(const std::string& name, const RoutingTrace& trace, int64_t begin, double resident,
                           int64_t expert_bytes, int lookahead_layers) {
  ReplayRow row{.trace = name, .resident = resident};
  PolicyOptions options{.shape = trace.shape(), .lookahead_layers = lookahead_layers};
  options.slots = std::llround(resident * static_cast<double>(trace.shape().layers * trace.shape().experts));
  const auto decode_of = [&](PolicyKind kind) {
    options.kind = kind;
    ExpertPolicy policy(options);
    replay(policy, trace, 0, begin);
    return replay(policy, trace, begin, trace.steps()).decode;
  };
  row.lru = decode_of(PolicyKind::lru).hit_rate();
  const PhaseReplay adaptive = decode_of(PolicyKind::adaptive);
  row.adaptive = adaptive.hit_rate();
  row.copied_bytes = adaptive.counts.copies() * expert_bytes;
  row.belady = replay_belady(trace, options.slots, begin, trace.steps()).decode.hit_rate();
  return row;
}

std::string replay_table(std::span<const ReplayRow> rows) {
  std::string out =
      "| trace | resident | lru | adaptive | belady | adaptive copies, GiB |\n|---|---:|---:|---:|---:|---:|\n";
  for (const ReplayRow& row : rows)
    out += fmt::format("| {} | {:.1f} % | {:.1f} % | {:.1f} % | {:.1f} % | {:.2f} |\n", row.trace, 100 * row.resident,
                       100 * row.lru, 100 * row.adaptive, 100 * row.belady,
                       static_cast<double>(row.copied_bytes) / (1 << 30));
  return out;
}

}  // namespace offload
