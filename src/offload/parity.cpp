#include "offload/parity.h"

#include <algorithm>
#include <cmath>

#include "core/base.h"

namespace offload {
namespace {

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace

TopTwo top_two(std::span<const float> logits) {
  OFL_ASSERT(logits.size() >= 2);
  size_t first = 0;
  for (size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[first]) first = i;
  size_t second = first == 0 ? 1 : 0;
  for (size_t i = 0; i < logits.size(); ++i)
    if (i != first && logits[i] > logits[second]) second = i;
  return {{static_cast<int32_t>(first), static_cast<int32_t>(second)}, {logits[first], logits[second]}};
}

double kl_divergence(std::span<const float> p_logits, std::span<const float> q_logits) {
  OFL_ASSERT(p_logits.size() == q_logits.size() && !p_logits.empty());
  const double p_top = *std::max_element(p_logits.begin(), p_logits.end());
  const double q_top = *std::max_element(q_logits.begin(), q_logits.end());
  double p_sum = 0, q_sum = 0, weighted = 0;
  for (size_t i = 0; i < p_logits.size(); ++i) {
    const double p = p_logits[i] - p_top, q = q_logits[i] - q_top, weight = std::exp(p);
    p_sum += weight;
    q_sum += std::exp(q);
    weighted += weight * (p - q);
  }
  return weighted / p_sum - std::log(p_sum) + std::log(q_sum);
}

void LogitComparison::add(int64_t row, std::span<const float> baseline, std::span<const float> candidate) {
  OFL_ASSERT(baseline.size() == candidate.size());
  ++rows_;
  if (!all_finite(baseline) || !all_finite(candidate)) {
    ++rows_not_finite_;
    return;
  }
  logits_ += static_cast<int64_t>(baseline.size());
  for (size_t i = 0; i < baseline.size(); ++i) {
    const double difference = std::abs(double{baseline[i]} - double{candidate[i]});
    max_difference_ = std::max(max_difference_, difference);
    difference_sum_ += difference;
  }
  kl_.push_back(kl_divergence(baseline, candidate));
  ChangedDecision decision{.row = row, .baseline = top_two(baseline), .candidate = top_two(candidate)};
  const int32_t choice = decision.candidate.ids[0];
  if (choice == decision.baseline.ids[0]) return;
  decision.is_tie = baseline[static_cast<size_t>(choice)] == decision.baseline.logits[0];
  ++(decision.is_tie ? ties_ : flips_);
  if (!decision.is_tie) largest_margin_ = std::max(largest_margin_, decision.margin());
  changed_.push_back(decision);
}

void LogitComparison::add(const LogitComparison& other) {
  rows_ += other.rows_;
  rows_not_finite_ += other.rows_not_finite_;
  ties_ += other.ties_;
  flips_ += other.flips_;
  logits_ += other.logits_;
  largest_margin_ = std::max(largest_margin_, other.largest_margin_);
  max_difference_ = std::max(max_difference_, other.max_difference_);
  difference_sum_ += other.difference_sum_;
  kl_.insert(kl_.end(), other.kl_.begin(), other.kl_.end());
}

double LogitComparison::mean_difference() const {
  return logits_ == 0 ? 0 : difference_sum_ / static_cast<double>(logits_);
}

double LogitComparison::mean_kl() const {
  double sum = 0;
  for (const double kl : kl_) sum += kl;
  return kl_.empty() ? 0 : sum / static_cast<double>(kl_.size());
}

double LogitComparison::median_kl() const {
  if (kl_.empty()) return 0;
  std::vector<double> sorted = kl_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::vector<std::string> strict_faults(const ArmScore& arm, const Yardstick& yardstick) {
  OFL_ASSERT(yardstick.prompt_flips.empty() || yardstick.prompt_flips.size() == arm.prompts.size());
  std::vector<std::string> faults;
  if (arm.rows_not_finite > 0) faults.push_back(fmt::format("{} rows are not finite", arm.rows_not_finite));
  if (arm.flips > yardstick.flips)
    faults.push_back(fmt::format("{} flips, the controls' most is {}", arm.flips, yardstick.flips));
  if (arm.largest_margin > yardstick.largest_margin)
    faults.push_back(fmt::format("a flip at margin {:.4g}, the controls' largest is {:.4g}", arm.largest_margin,
                                 yardstick.largest_margin));
  for (size_t i = 0; i < yardstick.prompt_flips.size(); ++i)
    if (yardstick.prompt_flips[i] == 0 && arm.prompts[i].flips > 0)
      faults.push_back(fmt::format("prompt {}: {} flips where no control has one", printable(arm.prompts[i].prompt),
                                   arm.prompts[i].flips));
  if (!arm.oracle || !yardstick.baseline) return faults;
  const auto check = [&](std::string_view what, double kl, double baseline, double factor) {
    if (kl > factor * baseline)
      faults.push_back(
          fmt::format("{} KL {:.3g} to the oracle, above {} x the baseline's {:.3g}", what, kl, factor, baseline));
  };
  check("mean", arm.oracle->mean, yardstick.baseline->mean, kMeanKlFactorMax);
  check("median", arm.oracle->median, yardstick.baseline->median, kMedianKlFactorMax);
  return faults;
}

}  // namespace offload
