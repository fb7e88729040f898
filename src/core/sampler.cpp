#include "core/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/base.h"

namespace offload {
namespace {

constexpr int64_t kTopKMax = 1 << 24;  // above any vocabulary

// Likelier first, ties to the lower id; a total order.
bool comes_first(const Sampler::Candidate& a, const Sampler::Candidate& b) {
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

// Blocks that a compiler turns into vector maxima, then the place within the best block.
std::optional<int32_t> largest_logit(std::span<const float> logits) {
  constexpr size_t kLanes = 16, kBlock = 64 * kLanes;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float best = -kInfinity;
  size_t best_begin = 0;
  bool has_nan = false;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const std::span block = logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    float most[kLanes];
    float nans[kLanes] = {};
    std::fill(std::begin(most), std::end(most), -kInfinity);
    size_t i = 0;
    for (; i + kLanes <= block.size(); i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float value = block[i + lane];
        most[lane] = value > most[lane] ? value : most[lane];
        nans[lane] += value != value ? 1.0f : 0.0f;
      }
    }
    for (; i < block.size(); ++i) {
      most[0] = std::max(most[0], block[i]);
      nans[0] += block[i] != block[i] ? 1.0f : 0.0f;
    }
    has_nan = has_nan || std::any_of(std::begin(nans), std::end(nans), [](float count) { return count != 0; });
    const float block_best = *std::max_element(std::begin(most), std::end(most));
    if (block_best <= best) continue;
    best = block_best;
    best_begin = begin;
  }
  if (has_nan || !std::isfinite(best)) return {};
  const auto at = std::find(logits.begin() + static_cast<std::ptrdiff_t>(best_begin), logits.end(), best);
  return static_cast<int32_t>(at - logits.begin());
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
    if (!allowed_.empty() && (i >= allowed_.size() || !allowed_[i])) continue;
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
  std::partial_sort(candidates_.begin(), end, candidates_.end(), comes_first);
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
  const auto comes_later = [](const Candidate& a, const Candidate& b) { return comes_first(b, a); };
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

std::span<const Sampler::Candidate> Sampler::distribution(std::span<const float> logits) {
  if (is_greedy()) {
    const std::optional<int32_t> id = largest_logit(logits);
    if (id && may_draw(*id)) {
      candidates_.assign(1, {*id, 1.0});
      return candidates_;
    }
  }
  fill_candidates(logits);
  if (options_.temperature == 0) {
    const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), comes_first);
    candidates_.assign(1, {best.id, 1.0});
    return candidates_;
  }
  keep_top_k();
  weigh();
  keep_top_p();
  keep_min_p();
  double total = 0;
  for (const Candidate& candidate : candidates_) total += candidate.probability;
  for (Candidate& candidate : candidates_) candidate.probability /= total;
  return candidates_;
}

int32_t Sampler::sample(std::span<const float> logits) {
  const std::span<const Candidate> choices = distribution(logits);
  const double draw = uniform_draw(options_.seed, draws_++);
  double held = 0;
  for (const Candidate& choice : choices) {
    held += choice.probability;
    if (draw < held) return choice.id;
  }
  // The sum of the probabilities is 1 up to rounding, and the draw lay above it.
  const auto last =
      std::find_if(choices.rbegin(), choices.rend(), [](const Candidate& c) { return c.probability > 0; });
  return last->id;
}

}  // namespace offload
