// The generators of routing_trace.h.

#include <algorithm>
#include <numeric>

#include "core/base.h"
#include "offload/routing_trace.h"

namespace offload {
namespace {

// splitmix64 (Steele, Lea, Flood 2014): the same numbers on every machine, unlike the standard distributions.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  size_t below(size_t count) { return static_cast<size_t>(unit() * static_cast<double>(count)); }

 private:
  uint64_t state_;
};

using Ranking = std::vector<uint16_t>;  // rank -> expert

Ranking draw_ranking(size_t experts, Random& random) {
  Ranking ranking(experts);
  std::iota(ranking.begin(), ranking.end(), uint16_t{0});
  for (size_t i = experts; i > 1; --i) std::swap(ranking[i - 1], ranking[random.below(i)]);
  return ranking;
}

// A trace whose rows come one after another from `row`, which fills [layers, top_k].
template <typename DrawRow>
RoutingTrace draw_rows(const RoutingShape& shape, std::span<const DrawnStep> steps, DrawRow&& row) {
  RoutingTrace trace(shape);
  const auto layers = static_cast<size_t>(shape.layers), top_k = static_cast<size_t>(shape.top_k);
  std::vector<uint16_t> one(layers * top_k), ids;
  for (const DrawnStep& step : steps) {
    const auto rows = static_cast<size_t>(step.rows);
    ids.resize(layers * rows * top_k);
    for (size_t r = 0; r < rows; ++r) {
      row(std::span(one));
      for (size_t l = 0; l < layers; ++l) std::copy_n(&one[l * top_k], top_k, &ids[(l * rows + r) * top_k]);
    }
    trace.append(step.phase, step.rows, ids);
  }
  return trace;
}

class SkewedRows {
 public:
  SkewedRows(const RoutingShape& shape, const SkewedRouting& routing, uint64_t seed)
      : layers_(static_cast<size_t>(shape.layers)),
        experts_(static_cast<size_t>(shape.experts)),
        top_k_(static_cast<size_t>(shape.top_k)),
        routing_(routing),
        random_(seed) {
    for (size_t l = 0; l < layers_; ++l) {
      popular_.push_back(draw_ranking(experts_, random_));
      partner_.push_back(draw_ranking(experts_, random_));
    }
    for (size_t i = 0; i < layers_ * static_cast<size_t>(routing.topics); ++i)
      topical_.push_back(draw_ranking(experts_, random_));
    taken_.resize(experts_);
    // Multiplication and addition alone, so that every machine gets the same table.
    const double ratio = 1 - 1 / (1 + routing.width * static_cast<double>(experts_));
    double weight = 1;
    below_rank_.push_back(0);
    for (size_t rank = 0; rank < experts_; ++rank, weight *= ratio) below_rank_.push_back(below_rank_.back() + weight);
  }

  void operator()(std::span<uint16_t> row) {
    if (random_.unit() < routing_.topic_change) topic_ = random_.below(static_cast<size_t>(routing_.topics));
    for (size_t l = 0; l < layers_; ++l) {
      const std::span<uint16_t> own = row.subspan(l * top_k_, top_k_);
      std::copy_n(&row[l * top_k_], has_row_ ? top_k_ : 0, std::back_inserter(before_));
      for (size_t k = 0; k < top_k_; ++k) {
        uint16_t id = draw(l, row);
        for (int attempt = 0; taken_[id] != 0; ++attempt)
          id = attempt < 8 ? draw(l, row) : static_cast<uint16_t>(random_.below(experts_));
        taken_[id] = 1;
        own[k] = id;
      }
      for (const uint16_t id : own) taken_[id] = 0;
      before_.clear();
    }
    has_row_ = true;
  }

 private:
  uint16_t draw(size_t layer, std::span<const uint16_t> row) {
    const double kind = random_.unit();
    if (kind < routing_.reuse) {
      if (!before_.empty()) return before_[random_.below(top_k_)];
    } else if (kind < routing_.reuse + routing_.partner && layer > 0) {
      return partner_[layer][row[(layer - 1) * top_k_ + random_.below(top_k_)]];
    }
    const bool topical = random_.unit() < routing_.topic;
    const Ranking& ranking = topical ? topical_[topic_ * layers_ + layer] : popular_[layer];
    const double u = random_.unit() * below_rank_.back();
    return ranking[static_cast<size_t>(std::upper_bound(below_rank_.begin() + 1, below_rank_.end() - 1, u) -
                                       below_rank_.begin() - 1)];
  }

  size_t layers_, experts_, top_k_;
  SkewedRouting routing_;
  Random random_;
  size_t topic_ = 0;
  bool has_row_ = false;
  std::vector<Ranking> popular_, partner_, topical_;  // by layer; topical_ by topic, then layer
  std::vector<uint16_t> before_;                      // the row before, at the layer being drawn
  std::vector<uint8_t> taken_;
  std::vector<double> below_rank_;  // unnormalised cumulative popularity of the ranks below
};

}  // namespace

RoutingTrace draw_trace(const RoutingShape& shape, const UniformRouting&, std::span<const DrawnStep> steps,
                        uint64_t seed) {
  Random random(seed);
  const auto top_k = static_cast<size_t>(shape.top_k), experts = static_cast<size_t>(shape.experts);
  return draw_rows(shape, steps, [&](std::span<uint16_t> row) {
    for (size_t begin = 0; begin < row.size(); begin += top_k)
      for (size_t k = 0; k < top_k; ++k) {  // Floyd's sampling without replacement
        auto id = static_cast<uint16_t>(random.below(experts - top_k + k + 1));
        const auto own = row.subspan(begin, k);
        if (std::find(own.begin(), own.end(), id) != own.end()) id = static_cast<uint16_t>(experts - top_k + k);
        row[begin + k] = id;
      }
  });
}

RoutingTrace draw_trace(const RoutingShape& shape, const SkewedRouting& routing, std::span<const DrawnStep> steps,
                        uint64_t seed) {
  OFL_ASSERT(routing.topics > 0 && routing.width > 0);
  return draw_rows(shape, steps, SkewedRows(shape, routing, seed));
}

}  // namespace offload
