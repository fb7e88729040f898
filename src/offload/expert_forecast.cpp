#include "offload/expert_forecast.h"

#include <algorithm>
#include <bit>

namespace offload {
namespace {

// A decode row moves an expert's share by 1/128. docs/policy.md has the alternatives.
constexpr int kShareShift = 7;
// A prefill chunk moves shares like at most so many decode rows, so that a scan cannot flush what decode has taught.
constexpr int64_t kPrefillWeightRows = 8;
// Counts are halved here, so that a rate follows what text does to it.
constexpr uint32_t kTrialsMax = 1u << 16;

// 0, 1 | 2, 3 | 4-5, 6-7 | 8-11, 12-15 | ...: two of them an octave. A float's exponent and the first digit behind it.
// REQUIRES: at most 2^24.
size_t half_octave(uint32_t value) {
  constexpr uint32_t kOne = 127 * 2;
  return value < 2 ? value : (std::bit_cast<uint32_t>(static_cast<float>(value)) >> 22) - kOne;
}

size_t prefill_bucket(uint8_t touched, uint8_t known) {
  if ((known & 1) == 0) return 4;  // never seen
  return static_cast<size_t>((touched & 1) * 2 + ((touched >> 1) & 1));
}

}  // namespace

void ExpertForecast::Rate::count(bool used) {
  trials += 1;
  uses += used ? 1 : 0;
  if (trials < kTrialsMax) return;
  trials /= 2;
  uses /= 2;
}

ExpertForecast::ExpertForecast(const RoutingShape& shape) : shape_(shape) {
  const auto keys = static_cast<size_t>(shape.layers * shape.experts);
  past_.resize(keys);
  visits_.resize(static_cast<size_t>(shape.layers));
  active_.resize(static_cast<size_t>(shape.experts));
  votes_.resize(static_cast<size_t>(shape.experts));
  rates_.resize(kAges * kShares);
  // Priors: what the share says, more for the freshly used.
  for (size_t age = 0; age < kAges; ++age)
    for (size_t share = 0; share < kShares; ++share) {
      const double level = static_cast<double>((share % 2 == 0 ? 2u : 3u) << (share / 2)) * 0x1p-17;
      const double fresh = 0.25 / static_cast<double>(age + 1);
      rates_[age * kShares + share].prior = static_cast<float>(std::min(0.95, std::max(level, fresh)));
    }
  touched_[0].prior = 0.2F;
  touched_[1].prior = 0.5F;
  touched_[2].prior = 0.8F;
  touched_[3].prior = 0.9F;
  touched_[4].prior = 0.9F;
  last_set_.reserve(static_cast<size_t>(shape.top_k));
  successors_.assign(keys * static_cast<size_t>(shape.top_k), -1);
  followers_.reserve(static_cast<size_t>(std::min(shape.top_k * shape.top_k, shape.experts)));
}

void ExpertForecast::observe(int64_t layer, std::span<const ActiveExpert> active, int64_t rows, Phase phase) {
  std::fill(active_.begin(), active_.end(), uint8_t{0});
  for (const ActiveExpert& one : active) {
    OFL_ASSERT(one.expert >= 0 && one.expert < shape_.experts && one.rows > 0 && rows > 0);
    OFL_ASSERT(active_[static_cast<size_t>(one.expert)] == 0);
    active_[static_cast<size_t>(one.expert)] = 1;
  }
  settle_followers(layer);
  if (phase == Phase::prefill) {
    observe_prefill(layer, active, rows);
  } else {
    observe_decode(layer);
  }
  followers_.clear();
  const bool narrow = phase == Phase::decode && static_cast<int64_t>(active.size()) <= shape_.top_k;
  if (narrow) {
    learn_followers(layer, active);
    forecast_followers(layer, active);
  }
  last_set_.clear();
  last_layer_ = narrow ? layer : -1;
  if (narrow)
    for (const ActiveExpert& one : active) last_set_.push_back(one.expert);
}

inline size_t ExpertForecast::bucket(const Past& past, uint32_t visits) const {
  constexpr uint32_t kOld = 0xFFFF;
  const uint32_t age = past.last_visit == 0 ? kOld : std::min(visits - past.last_visit, kOld);  // 0: at the last visit
  return std::min(half_octave(age), kAges - 1) * kShares + half_octave(past.share);
}

void ExpertForecast::observe_decode(int64_t layer) {
  const uint32_t visit = visits_[static_cast<size_t>(layer)]++;
  for (int64_t e = 0; e < shape_.experts; ++e) {
    Past& past = past_[index(layer, e)];
    const bool used = active_[static_cast<size_t>(e)] != 0;
    rates_[bucket(past, visit)].count(used);
    past.share = static_cast<uint16_t>(past.share + (((used ? 65535 : 0) - past.share) >> kShareShift));
    if (used) past.last_visit = visit + 1;
  }
}

void ExpertForecast::observe_prefill(int64_t layer, std::span<const ActiveExpert> active, int64_t rows) {
  const int64_t weight = std::min(rows, kPrefillWeightRows);
  for (int64_t e = 0; e < shape_.experts; ++e) {
    Past& past = past_[index(layer, e)];
    const bool used = active_[static_cast<size_t>(e)] != 0;
    touched_[prefill_bucket(past.touched, past.touched_known)].count(used);
    past.touched = static_cast<uint8_t>(past.touched << 1 | (used ? 1 : 0));
    past.touched_known = static_cast<uint8_t>(past.touched_known << 1 | 1);
    past.share = static_cast<uint16_t>(past.share - (past.share * weight >> kShareShift));
  }
  for (const ActiveExpert& one : active) {
    Past& past = past_[index(layer, one.expert)];
    const int64_t gain = (int64_t{65535} * one.rows / rows) * weight >> kShareShift;
    past.share = static_cast<uint16_t>(std::min<int64_t>(65535, past.share + gain));
  }
}

double ExpertForecast::chance(ExpertKey key) const {
  const Past& past = past_[index(key.layer, key.expert)];
  return rates_[bucket(past, visits_[static_cast<size_t>(key.layer)])].chance();
}

double ExpertForecast::prefill_chance(ExpertKey key) const {
  const Past& past = past_[index(key.layer, key.expert)];
  return touched_.at(prefill_bucket(past.touched, past.touched_known)).chance();
}

void ExpertForecast::settle_followers(int64_t layer) {
  if (last_layer_ < 0 || layer != (last_layer_ + 1) % shape_.layers) return;
  for (const Follower& follower : followers_)
    vouched_.at(follower.bucket).count(active_[static_cast<size_t>(follower.expert)] != 0);
}

void ExpertForecast::learn_followers(int64_t layer, std::span<const ActiveExpert> active) {
  if (last_layer_ < 0 || layer != (last_layer_ + 1) % shape_.layers) return;
  const auto top_k = static_cast<size_t>(shape_.top_k);
  for (const int32_t before : last_set_) {
    const std::span<int32_t> own(&successors_[index(last_layer_, before) * top_k], top_k);
    std::fill(own.begin(), own.end(), -1);
    for (size_t i = 0; i < active.size(); ++i) own[i] = active[i].expert;
  }
}

void ExpertForecast::forecast_followers(int64_t layer, std::span<const ActiveExpert> active) {
  const auto top_k = static_cast<size_t>(shape_.top_k);
  const auto next = static_cast<int32_t>((layer + 1) % shape_.layers);
  for (const ActiveExpert& one : active)
    for (size_t i = 0; i < top_k; ++i) {
      const int32_t expert = successors_[index(layer, one.expert) * top_k + i];
      if (expert < 0) break;
      if (votes_[static_cast<size_t>(expert)]++ == 0) followers_.push_back({expert, 0});
    }
  for (Follower& follower : followers_) {
    uint16_t& votes = votes_[static_cast<size_t>(follower.expert)];
    const double own = chance({next, follower.expert});
    const size_t level = own < 0.05 ? 0 : own < 0.15 ? 1 : own < 0.3 ? 2 : 3;
    follower.bucket = static_cast<uint32_t>(std::min<size_t>(votes, kVotes) * kLevels - kLevels + level);
    votes = 0;
  }
}

}  // namespace offload
