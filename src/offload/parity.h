// Parity: how far the logits of one run are from those of another over the same tokens, and what counts as strict.
//
// A decision is a row's token of largest logit, equal logits to the lower id. A changed decision is an exact tie when
// the baseline gives the candidate's choice the very logit of its own, else a flip; its margin is the baseline's
// largest logit less its second. Pure; no file, no model. Confined to one thread.
#ifndef OFFLOAD_OFFLOAD_PARITY_H_
#define OFFLOAD_OFFLOAD_PARITY_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace offload {

// The two largest logits of a row.
struct TopTwo {
  std::array<int32_t, 2> ids{};
  std::array<float, 2> logits{};
};
// REQUIRES: at least two logits.
TopTwo top_two(std::span<const float> logits);

// KL(p || q) in nats of the softmax distributions of two rows of finite logits.
double kl_divergence(std::span<const float> p_logits, std::span<const float> q_logits);

struct ChangedDecision {
  int64_t row = 0;  // of the prompt's tokens and the chain behind them
  TopTwo baseline, candidate;
  bool is_tie = false;

  double margin() const { return double{baseline.logits[0]} - double{baseline.logits[1]}; }
};

// Rows of one candidate against the same rows of a baseline. A row with a logit that is no finite number, in either,
// counts as not finite and nowhere else.
class LogitComparison {
 public:
  void add(int64_t row, std::span<const float> baseline, std::span<const float> candidate);
  // The rows of another prompt; their changed decisions are not taken over.
  void add(const LogitComparison& other);

  int64_t rows() const { return rows_; }
  int64_t rows_not_finite() const { return rows_not_finite_; }
  int64_t ties() const { return ties_; }
  int64_t flips() const { return flips_; }
  double largest_margin() const { return largest_margin_; }  // of the flips; 0 without one
  double max_difference() const { return max_difference_; }
  double mean_difference() const;
  double mean_kl() const;  // 0 without a finite row, as the median
  double median_kl() const;
  const std::vector<ChangedDecision>& changed() const { return changed_; }

 private:
  int64_t rows_ = 0, rows_not_finite_ = 0, ties_ = 0, flips_ = 0, logits_ = 0;
  double largest_margin_ = 0, max_difference_ = 0, difference_sum_ = 0;
  std::vector<double> kl_;  // of the finite rows
  std::vector<ChangedDecision> changed_;
};

// KL of an oracle against a run, over all rows.
struct OracleKl {
  double mean = 0, median = 0;
};

struct PromptFlips {
  std::string prompt;
  int64_t flips = 0;
};

// What the verdict on an arm needs of its run, and of the runs that it is measured by.
struct ArmScore {
  int64_t flips = 0, rows_not_finite = 0;
  double largest_margin = 0;
  std::vector<PromptFlips> prompts = {};  // `flips` by prompt
  std::optional<OracleKl> oracle = {};    // nothing: not compared with one
};
struct Yardstick {
  int64_t flips = 0;          // of the control that changed most decisions
  double largest_margin = 0;  // of any control
  // On each of ArmScore's prompts, in its order, those of the control that changed most there, which need not be the
  // same on another prompt. Empty: no control ran.
  std::vector<int64_t> prompt_flips = {};
  std::optional<OracleKl> baseline = {};
};

// Equally right BF16 runs lie up to a factor 1.21 apart in their mean KL to FP32 and less in the median (the noise
// floor of the model's specification, twelve runs).
inline constexpr double kMeanKlFactorMax = 1.25;
inline constexpr double kMedianKlFactorMax = 1.15;

// Why the arm can be told from a control, one line each; empty: it is strict. A prompt on which the arm flips and no
// control does is a fault of its own, however many flips the controls have elsewhere. Without a control any flip is one
// of the pooled count, so that no prompt is named. KL counts where both have one.
// REQUIRES: a yardstick of as many prompts as the arm, or of none.
std::vector<std::string> strict_faults(const ArmScore& arm, const Yardstick& yardstick);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PARITY_H_
