// ExpertForecast: how likely each expert is to be chosen at its layer's next visit, learned from the routing so far.
//
// Integers and IEEE arithmetic only, so that all ranks and all machines agree. Knows nothing of slots. Confined to one
// thread. Allocates nothing after construction.
#ifndef OFFLOAD_OFFLOAD_EXPERT_FORECAST_H_
#define OFFLOAD_OFFLOAD_EXPERT_FORECAST_H_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "offload/expert_cache.h"
#include "offload/routing_trace.h"

namespace offload {

// A distinct expert of a step at one layer and how many rows chose it.
struct ActiveExpert {
  int32_t expert = 0;
  int32_t rows = 0;
};

class ExpertForecast {
 public:
  explicit ExpertForecast(const RoutingShape& shape);

  // One visit of `layer` by `rows` rows. REQUIRES: `active` is distinct.
  void observe(int64_t layer, std::span<const ActiveExpert> active, int64_t rows, Phase phase);

  // Estimated chance in (0, 1) that a decode row at the layer's next visit chooses the expert.
  double chance(ExpertKey key) const;
  // The same for the next prefill chunk, from what the last ones touched.
  double prefill_chance(ExpertKey key) const;

  // The estimate behind a decode look-ahead: experts of the next layer that followed, the last time, the experts which
  // are active now. Calls visit(expert, chance) for each that any of them vouches for.
  // REQUIRES: observe(layer, ...) was the last observation.
  template <typename Visit>
  void for_each_follower(Visit&& visit) const {
    for (const Follower& follower : followers_) visit(follower.expert, vouched_.at(follower.bucket).chance());
  }

 private:
  // Uses over trials of whatever shares a bucket, the old ones fading.
  struct Rate {
    uint32_t trials = 0, uses = 0;
    float prior = 0;

    void count(bool used);
    double chance() const { return (uses + 4.0 * static_cast<double>(prior)) / (trials + 4.0); }
  };
  struct Past {
    uint16_t share = 0;         // moving average of being active, in 1/65536
    uint8_t touched = 0;        // bit i: active in the prefill chunk i + 1 visits ago
    uint8_t touched_known = 0;  // bit i: there was such a chunk
    uint32_t last_visit = 0;    // number of the layer's visit that chose it, 0: none
  };
  struct Follower {
    int32_t expert;
    uint32_t bucket;
  };

  static constexpr size_t kAges = 20, kShares = 34;
  static constexpr size_t kVotes = 8, kLevels = 4;

  size_t index(int64_t layer, int64_t expert) const { return static_cast<size_t>(layer * shape_.experts + expert); }
  size_t bucket(const Past& past, uint32_t visits) const;
  void observe_decode(int64_t layer);
  void observe_prefill(int64_t layer, std::span<const ActiveExpert> active, int64_t rows);
  void settle_followers(int64_t layer);
  void learn_followers(int64_t layer, std::span<const ActiveExpert> active);
  void forecast_followers(int64_t layer, std::span<const ActiveExpert> active);

  RoutingShape shape_;
  std::vector<Past> past_;         // [layers, experts]
  std::vector<uint32_t> visits_;   // by layer; decode visits only
  std::vector<uint8_t> active_;    // by expert, of the visit being observed
  std::vector<Rate> rates_;        // [kAges, kShares]
  std::array<Rate, 5> touched_{};  // by prefill bucket
  std::vector<int32_t> last_set_;  // what the visit before chose, for learning who follows whom
  int64_t last_layer_ = -1;
  std::vector<int32_t> successors_;  // [layers, experts, top_k], -1 padded
  std::vector<Follower> followers_;
  std::vector<uint16_t> votes_;  // by expert
  std::array<Rate, kVotes * kLevels> vouched_{};
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_EXPERT_FORECAST_H_
