// Sampler: from one row of logits, or from its largest ones where they decide, to one token id.
//
// The filters run in the order of the reference: repetition penalty, temperature, top-k, top-p, min-p. A draw depends
// on the seed, the number of draws before it and the logits alone, not on the standard library. Refuses NaN and +inf:
// they are the sign of a broken model, never token 0. Does NOT know what ends a text. Confined to one thread.
#ifndef OFFLOAD_CORE_SAMPLER_H_
#define OFFLOAD_CORE_SAMPLER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace offload {

struct SamplingOptions {
  double temperature = 1;         // 0: the largest logit, ties to the lower id, whatever top_k, top_p and min_p are
  int64_t top_k = 0;              // candidates kept, ties to the lower id; 0: all
  double top_p = 1;               // keeps the fewest candidates, likeliest first, that hold this much probability
  double min_p = 0;               // drops candidates below this times the likeliest one's probability
  double repetition_penalty = 1;  // r: a positive logit of an observed id is divided by r, another multiplied by r
  uint64_t seed = 0;
};

// How messages spell an option: as the field of a request (top_k) or as a flag (--top-k).
enum class OptionSpelling { field, flag };

// Throws Error{usage} naming the first option that is NaN, infinite or out of its range, and that range.
void check_sampling(const SamplingOptions& options, OptionSpelling spelling);

// The `counter`-th number of the stream of `seed`: a multiple of 2^-53 in [0, 1).
double uniform_draw(uint64_t seed, uint64_t counter);

struct Logit {
  int32_t id = 0;
  float value = 0;
};
// Larger first, ties to the lower id; a total order of numbers.
inline bool comes_first(const Logit& a, const Logit& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

// Fills `best` with the largest of `logits` in the order of comes_first(), a -0 as 0. False, and `best` is of no use,
// where a logit is NaN or +inf. REQUIRES: `best` is not empty and not longer than `logits`.
bool largest_logits(std::span<const float> logits, std::span<Logit> best);

class Sampler {
 public:
  // allowed[id]: whether the id may be drawn; ids from allowed.size() on may not. Empty: all may. REQUIRES: options
  // pass check_sampling.
  explicit Sampler(const SamplingOptions& options, std::vector<bool> allowed = {});

  // Ids that the repetition penalty applies to from now on. REQUIRES: none negative.
  void observe(std::span<const int32_t> ids);

  struct Candidate {
    int32_t id = 0;
    double probability = 0;
  };
  // What sample() draws from: likeliest first when top-k or top-p cuts, else by id; the probabilities sum to 1. Valid
  // until the next call. Throws as sample().
  std::span<const Candidate> distribution(std::span<const float> logits);

  // Draws one id; it is not observed. Throws Error{internal} naming how many tokens were drawn before, when a logit is
  // NaN or +inf or no allowed id has a finite one.
  int32_t sample(std::span<const float> logits);

  // How many of a row's largest logits decide its draw; a row where too many of these are not allowed needs the whole
  // row all the same. 0: every row does.
  int64_t largest_wanted() const;
  // As above, from a row's largest logits in the order of largest_logits(), any number of them: the same probabilities
  // and the same draw. Nothing, and nothing is drawn, where they do not decide. REQUIRES: the row has neither NaN nor
  // +inf; of one that has, give none.
  std::span<const Candidate> distribution(std::span<const Logit> largest);
  std::optional<int32_t> sample(std::span<const Logit> largest);

  int64_t draws() const { return static_cast<int64_t>(draws_); }

 private:
  bool is_greedy() const { return options_.temperature == 0 && options_.repetition_penalty == 1; }
  bool is_allowed(int32_t id) const {
    return allowed_.empty() || (static_cast<size_t>(id) < allowed_.size() && allowed_[static_cast<size_t>(id)]);
  }
  void fill_candidates(std::span<const float> logits);
  void keep_top_k();
  void weigh();
  void keep_top_p();
  void keep_min_p();
  void to_probabilities();
  int32_t draw();

  SamplingOptions options_;
  std::vector<bool> allowed_, observed_;
  std::vector<Candidate> candidates_;  // `probability` holds the logit at first, then the weight
  uint64_t draws_ = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_SAMPLER_H_
