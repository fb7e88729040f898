#include "core/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/base.h"

namespace offload {
namespace {

constexpr int64_t kTopKMax = 1 << 24;  // above any vocabulary

// Room among a row's largest logits for ids that are not allowed: padding of the matrix, whose logits are seldom large.
// A guess: with less, more rows are fetched whole.
constexpr int64_t kRoomForOthers = 12;

// Likelier first, ties to the lower id; a total order.
bool is_likelier(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.id < b.id;
}

std::string spelled(std::string_view field, OptionSpelling spelling) {
  std::string name(field);
  if (spelling == OptionSpelling::field) return name;
  std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

}  // namespace

void check_sampling(const SamplingOptions& options, OptionSpelling spelling) {
  const auto check = [&](std::string_view field, double value, bool holds, std::string_view expected) {
    if (!std::isfinite(value) || !holds)
      throw_error(ErrorCode::usage, "{} is {}; expected {}", spelled(field, spelling), number_text(value), expected);
  };
  check("temperature", options.temperature, options.temperature >= 0, "a finite number from 0 (greedy) up");
  if (options.top_k < 0 || options.top_k > kTopKMax)
    throw_error(ErrorCode::usage, "{} is {}; expected an integer from 0 (off) to {}", spelled("top_k", spelling),
                options.top_k, kTopKMax);
  check("top_p", options.top_p, options.top_p > 0 && options.top_p <= 1, "a number above 0 and at most 1 (off)");
  check("min_p", options.min_p, options.min_p >= 0 && options.min_p <= 1, "a number from 0 (off) to 1");
  check("repetition_penalty", options.repetition_penalty, options.repetition_penalty > 0,
        "a finite number above 0 (1: off)");
}

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), read at any place.
double uniform_draw(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

// Blocks that a compiler turns into vector maxima; of the few that hold a larger one than the least of the best so far,
// each number. The best are a heap whose front is the least.
bool largest_logits(std::span<const float> logits, std::span<Logit> best) {
  constexpr size_t kLanes = 16, kBlock = 64 * kLanes;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  OFL_ASSERT(!best.empty() && best.size() <= logits.size());
  size_t held = 0;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const std::span block = logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    float most[kLanes];
    float refused[kLanes] = {};
    std::fill(std::begin(most), std::end(most), -kInfinity);
    const auto see = [&](size_t lane, float value) {
      most[lane] = value > most[lane] ? value : most[lane];
      refused[lane] += value < kInfinity ? 0.0f : 1.0f;
    };
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) see(lane, block[i + lane]);
    for (; i < block.size(); ++i) see(0, block[i]);
    if (std::any_of(std::begin(refused), std::end(refused), [](float count) { return count != 0; })) return false;
    if (held == best.size() && *std::max_element(std::begin(most), std::end(most)) <= best.front().value) continue;
    for (i = 0; i < block.size(); ++i) {
      if (held == best.size()) {
        if (block[i] <= best.front().value) continue;
        std::pop_heap(best.begin(), best.end(), comes_first);
        --held;
      }
      best[held++] = {static_cast<int32_t>(begin + i), block[i] + 0.0f};
      std::push_heap(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(held), comes_first);
    }
  }
  std::sort_heap(best.begin(), best.end(), comes_first);
  return true;
}

Sampler::Sampler(const SamplingOptions& options, std::vector<bool> allowed)
    : options_(options), allowed_(std::move(allowed)) {}

void Sampler::observe(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    OFL_ASSERT(id >= 0);
    if (static_cast<size_t>(id) >= observed_.size()) observed_.resize(static_cast<size_t>(id) + 1);
    observed_[static_cast<size_t>(id)] = true;
  }
}

// The allowed ids with their penalised logits. Doubles, clamped, so that no penalty makes an infinity of a number.
void Sampler::fill_candidates(std::span<const float> logits) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    const float logit = logits[i];
    if (std::isnan(logit) || logit == std::numeric_limits<float>::infinity())
      throw_error(ErrorCode::internal,
                  "the logits of step {} hold {} at id {}; the weights are damaged or the arithmetic overflowed",
                  draws_, number_text(logit), i);
    if (logit == -std::numeric_limits<float>::infinity()) continue;
    if (!is_allowed(static_cast<int32_t>(i))) continue;
    double value = logit;
    if (i < observed_.size() && observed_[i]) {
      value = value > 0 ? value / options_.repetition_penalty : value * options_.repetition_penalty;
      value = std::clamp(value, -kLargest, kLargest);
    }
    candidates_.push_back({static_cast<int32_t>(i), value});
  }
  if (candidates_.empty())
    throw_error(ErrorCode::internal, "the logits of step {} leave no token to choose: each of the {} is -inf or masked",
                draws_, logits.size());
}

void Sampler::keep_top_k() {
  const auto count = static_cast<size_t>(options_.top_k);
  if (count == 0 || count >= candidates_.size()) return;
  const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(candidates_.begin(), end, candidates_.end(), is_likelier);
  candidates_.erase(end, candidates_.end());
}

// Logits to weights exp((logit - largest) / temperature): the likeliest one's is 1, so nothing overflows.
void Sampler::weigh() {
  double largest = -std::numeric_limits<double>::max();
  for (const Candidate& candidate : candidates_) largest = std::max(largest, candidate.probability);
  for (Candidate& candidate : candidates_) {
    const double distance = candidate.probability - largest;
    candidate.probability = distance == 0 ? 1 : std::exp(distance / options_.temperature);
  }
}

// Pops candidates off a heap until they hold top_p of the sum: a vocabulary is not sorted for the few that stay.
void Sampler::keep_top_p() {
  if (options_.top_p >= 1) return;
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.probability;
  const auto comes_later = [](const Candidate& a, const Candidate& b) { return is_likelier(b, a); };
  std::make_heap(candidates_.begin(), candidates_.end(), comes_later);
  auto heap_end = candidates_.end();
  double held = 0;
  do {
    std::pop_heap(candidates_.begin(), heap_end, comes_later);
    --heap_end;
    held += heap_end->probability;
  } while (heap_end != candidates_.begin() && held < options_.top_p * total);
  candidates_.erase(candidates_.begin(), heap_end);
  std::reverse(candidates_.begin(), candidates_.end());
}

void Sampler::keep_min_p() {
  if (options_.min_p <= 0) return;
  // The likeliest candidate has weight 1 and is never dropped.
  std::erase_if(candidates_, [&](const Candidate& candidate) { return candidate.probability < options_.min_p; });
}

void Sampler::to_probabilities() {
  weigh();
  keep_top_p();
  keep_min_p();
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.probability;
  for (Candidate& candidate : candidates_) candidate.probability /= total;
}

std::span<const Sampler::Candidate> Sampler::distribution(std::span<const float> logits) {
  if (is_greedy() && !logits.empty()) {
    Logit best;
    if (largest_logits(logits, {&best, 1}) && !distribution(std::span<const Logit>(&best, 1)).empty())
      return candidates_;
  }
  fill_candidates(logits);
  if (options_.temperature == 0) {
    const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), is_likelier);
    candidates_.assign(1, {best.id, 1.0});
    return candidates_;
  }
  keep_top_k();
  to_probabilities();
  return candidates_;
}

int64_t Sampler::largest_wanted() const {
  if (is_greedy()) return 1;
  return options_.top_k == 0 || options_.temperature == 0 || options_.repetition_penalty != 1
             ? 0
             : options_.top_k + kRoomForOthers;
}

std::span<const Sampler::Candidate> Sampler::distribution(std::span<const Logit> largest) {
  candidates_.clear();
  if (largest_wanted() == 0) return {};
  // One more than are kept: a row without one is not cut, and its order is by id.
  const auto needed = is_greedy() ? 1 : static_cast<size_t>(options_.top_k) + 1;
  for (const Logit& logit : largest) {
    if (candidates_.size() == needed || logit.value == -std::numeric_limits<float>::infinity()) break;
    if (is_allowed(logit.id)) candidates_.push_back({logit.id, logit.value});
  }
  if (candidates_.size() < needed) return {};
  if (!is_greedy()) candidates_.pop_back();
  to_probabilities();
  return candidates_;
}

int32_t Sampler::sample(std::span<const float> logits) {
  static_cast<void>(distribution(logits));
  return draw();
}

std::optional<int32_t> Sampler::sample(std::span<const Logit> largest) {
  if (distribution(largest).empty()) return {};
  return draw();
}

// One of the candidates.
int32_t Sampler::draw() {
  const double draw = uniform_draw(options_.seed, draws_++);
  double held = 0;
  for (const Candidate& choice : candidates_) {
    held += choice.probability;
    if (draw < held) return choice.id;
  }
  // The sum of the probabilities is 1 up to rounding, and the draw lay above it.
  const auto last =
      std::find_if(candidates_.rbegin(), candidates_.rend(), [](const Candidate& c) { return c.probability > 0; });
  return last->id;
}

}  // namespace offload
