#include "core/sampler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "core/base.h"

namespace offload::sampler_test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfF = std::numeric_limits<float>::infinity();

std::vector<Sampler::Candidate> candidates(const SamplingOptions& options, const std::vector<float>& logits,
                                           std::vector<bool> allowed = {}, const std::vector<int32_t>& seen = {}) {
  Sampler sampler(options, std::move(allowed));
  sampler.observe(seen);
  const auto span = sampler.distribution(logits);
  return {span.begin(), span.end()};
}

// Every id and its probability as the softmax formula gives it, filters applied by definition and not by code reuse.
std::map<int32_t, double> softmax(const std::vector<std::pair<int32_t, double>>& logits) {
  double sum = 0;
  for (const auto& [id, logit] : logits) sum += std::exp(logit);
  std::map<int32_t, double> out;
  for (const auto& [id, logit] : logits) out[id] = std::exp(logit) / sum;
  return out;
}

void check_distribution(const std::vector<Sampler::Candidate>& found, const std::map<int32_t, double>& expected) {
  CHECK(found.size() == expected.size());
  for (const auto& candidate : found) {
    CAPTURE(candidate.id);
    REQUIRE(expected.count(candidate.id) == 1);
    CHECK(candidate.probability == doctest::Approx(expected.at(candidate.id)).epsilon(1e-12));
  }
}

std::string message_of(const SamplingOptions& options, OptionSpelling spelling) {
  try {
    check_sampling(options, spelling);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    return error.message();
  }
  return "";
}

std::string sampling_failure(Sampler& sampler, const std::vector<float>& logits) {
  try {
    sampler.sample(logits);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::internal);
    return error.message();
  }
  return "";
}

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 0.0f, -1.0f};

// Numbers on a grid, so that some are equal, zeros of both signs and some -inf.
std::vector<float> random_row(size_t size, uint64_t seed) {
  std::vector<float> row;
  for (size_t i = 0; i < size; ++i) {
    const double draw = uniform_draw(seed, i);
    const float value = static_cast<float>(std::round(draw * 400) / 16 - 13);
    row.push_back(i % 17 == 3 ? -kInfF : value == 0 && i % 2 == 0 ? -0.0f : value);
  }
  return row;
}

}  // namespace

TEST_CASE("plain_sampling_is_the_softmax_in_id_order") {
  const auto found = candidates({}, kLogits);
  check_distribution(found, softmax({{0, 1}, {1, 3}, {2, 2}, {3, 0}, {4, -1}}));
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i].id == static_cast<int32_t>(i));
}

TEST_CASE("temperature_divides_the_logits") {
  check_distribution(candidates({.temperature = 0.5}, kLogits), softmax({{0, 2}, {1, 6}, {2, 4}, {3, 0}, {4, -2}}));
}

TEST_CASE("top_k_keeps_k_and_gives_ties_to_the_lower_id") {
  check_distribution(candidates({.top_k = 2}, kLogits), softmax({{1, 3}, {2, 2}}));
  check_distribution(candidates({.top_k = 2}, {5, 7, 5, 5}), softmax({{1, 7}, {0, 5}}));
  check_distribution(candidates({.top_k = 1}, {5, 5, 5}), {{0, 1.0}});
  CHECK(candidates({.top_k = 99}, kLogits).size() == 5);
}

TEST_CASE("top_p_keeps_the_fewest_that_hold_it") {
  const std::vector<float> quarters(4, 1.0f);
  check_distribution(candidates({.top_p = 0.5}, quarters), {{0, 0.5}, {1, 0.5}});
  check_distribution(candidates({.top_p = 0.500001}, quarters), {{0, 1.0 / 3}, {1, 1.0 / 3}, {2, 1.0 / 3}});
  check_distribution(candidates({.top_p = 1e-300}, kLogits), {{1, 1.0}});
  CHECK(candidates({.top_p = 1}, kLogits).size() == 5);
  CHECK(candidates({.top_p = std::nextafter(1.0, 0.0)}, kLogits).size() == 5);
}

TEST_CASE("top_p_counts_within_what_top_k_left") {
  // Softmax of {3, 2} is {0.731, 0.269}: 0.7 is held by the first alone, although it has only 0.64 of all five.
  check_distribution(candidates({.top_k = 2, .top_p = 0.7}, kLogits), {{1, 1.0}});
  check_distribution(candidates({.top_p = 0.7}, kLogits), softmax({{1, 3}, {2, 2}}));
}

TEST_CASE("min_p_drops_what_is_far_below_the_likeliest") {
  const double ratio = std::exp(-1.0);  // of id 2 to id 1
  check_distribution(candidates({.min_p = ratio * 0.999}, kLogits), softmax({{1, 3}, {2, 2}}));
  check_distribution(candidates({.min_p = ratio * 1.001}, kLogits), {{1, 1.0}});
  check_distribution(candidates({.min_p = 1}, {4, 4, 1}), {{0, 0.5}, {1, 0.5}});
}

TEST_CASE("repetition_penalty_lowers_observed_ids_of_either_sign_before_the_temperature") {
  check_distribution(candidates({.temperature = 2, .repetition_penalty = 2}, kLogits, {}, {1, 4}),
                     softmax({{0, 0.5}, {1, 0.75}, {2, 1}, {3, 0}, {4, -1}}));
  Sampler greedy({.temperature = 0, .repetition_penalty = 4});
  greedy.observe(std::vector<int32_t>{1});
  CHECK(greedy.sample(kLogits) == 2);
}

TEST_CASE("greedy_takes_the_largest_and_gives_ties_to_the_lower_id") {
  CHECK(Sampler({.temperature = 0}).sample(kLogits) == 1);
  CHECK(Sampler({.temperature = 0}).sample(std::vector<float>{2, 7, 7, 1}) == 1);
  CHECK(Sampler({.temperature = 0, .top_k = 3, .top_p = 0.1, .min_p = 0.9}).sample(kLogits) == 1);
  CHECK(Sampler({.temperature = 0}).sample(std::vector<float>{-kInfF, -3e38f, -3.2e38f}) == 1);
  CHECK(Sampler({.temperature = 0}).sample(std::vector<float>{0.0f, -0.0f}) == 0);
}

TEST_CASE("the_largest_logit_is_found_at_every_place_and_not_where_a_number_is_missing") {
  const auto largest = [](const std::vector<float>& logits) {
    Logit best;
    return largest_logits(logits, {&best, 1}) ? best.id : -1;
  };
  for (const size_t size : {size_t{1}, size_t{15}, size_t{16}, size_t{1024}, size_t{1025}, size_t{5000}}) {
    for (size_t at = 0; at<size; at += size> 100 ? 61 : 1) {
      std::vector<float> logits(size, -3.5f);
      logits[at] = -1;
      CHECK(largest(logits) == static_cast<int32_t>(at));
      logits.back() = -1;  // a tie
      CHECK(largest(logits) == static_cast<int32_t>(at));
      logits[at] = kNanF;
      CHECK(largest(logits) == -1);
      logits[at] = kInfF;
      CHECK(largest(logits) == -1);
      logits[at] = -kInfF;
      CHECK(largest(logits) ==
            (at + 1 == size ? size > 1 ? 0 : static_cast<int32_t>(at) : static_cast<int32_t>(size) - 1));
    }
  }
  CHECK(largest(std::vector<float>(40, -kInfF)) == 0);
  CHECK(largest({-0.0f, 0.0f}) == 0);
}

TEST_CASE("the_largest_logits_are_those_of_a_sorted_row") {
  for (const size_t size : {size_t{1}, size_t{40}, size_t{1024}, size_t{3000}}) {
    for (const size_t count : {size_t{1}, size_t{2}, size_t{32}, size}) {
      if (count > size) continue;
      CAPTURE(size);
      CAPTURE(count);
      const std::vector<float> logits = random_row(size, size + count);
      std::vector<Logit> sorted, best(count);
      for (size_t i = 0; i < size; ++i) sorted.push_back({static_cast<int32_t>(i), logits[i]});
      std::sort(sorted.begin(), sorted.end(), [](const Logit& a, const Logit& b) { return comes_first(a, b); });
      REQUIRE(largest_logits(logits, best));
      for (size_t i = 0; i < count; ++i) {
        REQUIRE(best[i].id == sorted[i].id);
        REQUIRE(best[i].value == sorted[i].value);
        REQUIRE(!std::signbit(best[i].value + 0 == 0 ? best[i].value : 1));
      }
    }
  }
}

TEST_CASE("the_largest_logits_decide_as_the_whole_row_does_or_say_that_they_do_not") {
  constexpr size_t kSize = 300;
  const SamplingOptions all_options[] = {{.temperature = 0},
                                         {.temperature = 0, .top_k = 5, .top_p = 0.1, .min_p = 0.9},
                                         {.top_k = 1},
                                         {.temperature = 0.8, .top_k = 20},
                                         {.temperature = 0.8, .top_k = 20, .top_p = 0.95},
                                         {.temperature = 1.5, .top_k = 20, .min_p = 0.05},
                                         {.temperature = 3, .top_k = 7, .top_p = 0.5, .min_p = 0.01},
                                         {.temperature = 1e-300, .top_k = 20},
                                         {.top_k = 200}};
  const auto mask = [](size_t size, const auto& allows) {
    std::vector<bool> allowed(size);
    for (size_t i = 0; i < size; ++i) allowed[i] = allows(i);
    return allowed;
  };
  const std::vector<bool> masks[] = {{},
                                     mask(280, [](size_t) { return true; }),
                                     mask(kSize, [](size_t i) { return i % 3 != 0; }),
                                     mask(kSize, [](size_t i) { return i % 15 == 0; })};  // 20
  int decided = 0, undecided = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const std::vector<float> row = random_row(kSize, seed);
    for (SamplingOptions options : all_options) {
      options.seed = seed;
      for (const std::vector<bool>& allowed : masks) {
        for (const size_t count : {static_cast<size_t>(Sampler(options).largest_wanted()), size_t{21}, kSize}) {
          Sampler of_row(options, allowed), of_largest(options, allowed);
          std::vector<Logit> largest(count);
          REQUIRE(largest_logits(row, largest));
          for (int i = 0; i < 3; ++i) {
            const auto found = of_largest.distribution(largest);
            const std::vector<Sampler::Candidate> choices(found.begin(), found.end());
            const auto drawn = of_largest.sample(largest);
            REQUIRE(drawn.has_value() == !choices.empty());
            REQUIRE(of_largest.draws() == i + (drawn ? 1 : 0));
            const auto expected = of_row.distribution(row);
            REQUIRE((choices.empty() || choices.size() == expected.size()));
            for (size_t c = 0; c < choices.size(); ++c) {
              REQUIRE(choices[c].id == expected[c].id);
              REQUIRE(std::bit_cast<uint64_t>(choices[c].probability) ==
                      std::bit_cast<uint64_t>(expected[c].probability));
            }
            REQUIRE((drawn ? *drawn : of_largest.sample(row)) == of_row.sample(row));
            ++(drawn ? decided : undecided);
          }
        }
      }
    }
  }
  CHECK(decided > 5000);
  CHECK(undecided > 2000);
}

TEST_CASE("rows_that_their_largest_logits_cannot_decide_are_asked_for_whole") {
  std::vector<Logit> largest(5);
  REQUIRE(largest_logits(kLogits, largest));
  for (const SamplingOptions& options :
       {SamplingOptions{}, SamplingOptions{.top_p = 0.5}, SamplingOptions{.temperature = 0, .repetition_penalty = 2},
        SamplingOptions{.top_k = 2, .repetition_penalty = 1.1}}) {
    Sampler sampler(options);
    CHECK(sampler.largest_wanted() == 0);
    CHECK(!sampler.sample(largest));
  }
  CHECK(Sampler({.temperature = 0, .top_k = 20}).largest_wanted() == 1);
  Sampler sampler({.top_k = 4});
  CHECK(sampler.largest_wanted() > 4);
  CHECK(sampler.sample(largest));
  CHECK(!sampler.sample(std::span(largest).first(4)));  // whether there is a fifth decides the order
  CHECK(!sampler.sample(std::span<const Logit>()));     // of a row with a NaN
  largest[4].value = -kInfF;
  CHECK(!sampler.sample(largest));
  CHECK(sampler.draws() == 1);
  Sampler greedy({.temperature = 0}, {true, false, true});
  CHECK(!greedy.sample(std::span(largest).first(1)));
  CHECK(greedy.sample(std::span(largest).first(2)) == 2);
}

TEST_CASE("masked_ids_and_ids_past_the_mask_are_never_drawn") {
  const std::vector<float> logits = {1, 9, 2, 50, 60};
  check_distribution(candidates({}, logits, {true, false, true}), softmax({{0, 1}, {2, 2}}));
  CHECK(Sampler({.temperature = 0}, {true, false, true}).sample(logits) == 2);
}

TEST_CASE("extreme_temperatures_and_penalties_stay_finite") {
  check_distribution(candidates({.temperature = 1e-300}, {3e38f, -3e38f, 1}), {{0, 1.0}, {1, 0.0}, {2, 0.0}});
  check_distribution(candidates({.temperature = 5e-324}, {1, 1, 0}), {{0, 0.5}, {1, 0.5}, {2, 0.0}});
  check_distribution(candidates({.temperature = 1e300}, {3e38f, -3e38f}), {{0, 0.5}, {1, 0.5}});
  check_distribution(candidates({.repetition_penalty = 1e308}, {-3e38f, -3e38f}, {}, {0, 1}), {{0, 0.5}, {1, 0.5}});
  check_distribution(candidates({.repetition_penalty = 1e-308}, {3e38f, -3e38f}, {}, {0, 1}), {{0, 1.0}, {1, 0.0}});
}

TEST_CASE("every_draw_falls_where_the_cumulative_probabilities_say") {
  const std::vector<float> logits = {0.3f, -0.7f, 1.9f, 0.0f};
  for (const SamplingOptions& filter : {SamplingOptions{}, SamplingOptions{.top_k = 3}, SamplingOptions{.top_p = 0.8},
                                        SamplingOptions{.temperature = 0.3, .min_p = 0.05}}) {
    SamplingOptions options = filter;
    options.seed = 41;
    Sampler sampler(options);
    const auto choices = candidates(options, logits);
    std::map<int32_t, int> counts;
    for (uint64_t i = 0; i < 2000; ++i) {
      const double draw = uniform_draw(41, i);
      double below = 0;
      int32_t expected = choices.back().id;
      for (const auto& choice : choices) {
        if (draw >= below && draw < below + choice.probability) {
          expected = choice.id;
          break;
        }
        below += choice.probability;
      }
      const int32_t found = sampler.sample(logits);
      REQUIRE(found == expected);
      ++counts[found];
    }
    for (const auto& choice : choices)  // 5 standard deviations of a binomial of 2000
      CHECK(std::abs(counts[choice.id] - 2000 * choice.probability) <=
            5 * std::sqrt(2000 * choice.probability * (1 - choice.probability)) + 1);
  }
}

TEST_CASE("the_same_seed_draws_the_same_and_another_seed_does_not") {
  const std::vector<float> logits(64, 0.0f);
  const auto run = [&](uint64_t seed) {
    Sampler sampler({.seed = seed});
    std::vector<int32_t> ids;
    for (int i = 0; i < 32; ++i) ids.push_back(sampler.sample(logits));
    return ids;
  };
  CHECK(run(7) == run(7));
  CHECK(run(7) != run(8));
  CHECK(run(0) != run(~uint64_t{0}));
}

TEST_CASE("draws_are_those_of_splitmix64") {
  // The published generator from state 0 gives e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f.
  CHECK(uniform_draw(0, 0) == static_cast<double>(0xE220A8397B1DCDAFu >> 11) * 0x1p-53);
  CHECK(uniform_draw(0, 1) == static_cast<double>(0x6E789E6AA1B965F4u >> 11) * 0x1p-53);
  CHECK(uniform_draw(0, 2) == static_cast<double>(0x06C45D188009454Fu >> 11) * 0x1p-53);
}

TEST_CASE("logits_that_are_not_numbers_are_an_error_that_names_the_step_and_never_a_token") {
  for (const double temperature : {0.0, 1.0}) {
    Sampler sampler({.temperature = temperature});
    sampler.sample(kLogits);
    sampler.sample(kLogits);
    for (const std::vector<float>& bad :
         {std::vector<float>{1, 2, kNanF}, std::vector<float>(5, kNanF), std::vector<float>{1, kInfF}}) {
      const std::string message = sampling_failure(sampler, bad);
      CHECK(message.find("step 2") != std::string::npos);
    }
    CHECK(sampling_failure(sampler, {1, 2, kNanF}).find("nan at id 2") != std::string::npos);
    CHECK(sampling_failure(sampler, {-kInfF, -kInfF}).find("no token") != std::string::npos);
    CHECK(sampling_failure(sampler, {}).find("no token") != std::string::npos);
    CHECK(sampler.sample(std::vector<float>{-kInfF, 2}) == 1);
  }
  Sampler masked({}, {true, true});
  CHECK(sampling_failure(masked, {1, 2, kNanF}).find("nan at id 2") != std::string::npos);
  Sampler none({}, {false, false});
  CHECK(sampling_failure(none, {1, 2}).find("no token") != std::string::npos);
}

TEST_CASE("options_out_of_range_are_named_as_field_and_as_flag_with_their_range") {
  const auto holds = [](const SamplingOptions& options, std::string_view flag, std::string_view value) {
    const std::string message = message_of(options, OptionSpelling::flag);
    CAPTURE(message);
    CHECK(message.find(flag) == 0);
    CHECK(message.find(value) != std::string::npos);
    CHECK(message.find("expected ") != std::string::npos);
  };
  for (const double bad : {-1.0, kNan, kInf, -kInf}) {
    const std::string value = fmt::format("is {};", bad);
    holds({.temperature = bad}, "--temperature", value);
    holds({.top_p = bad}, "--top-p", value);
    holds({.min_p = bad}, "--min-p", value);
    holds({.repetition_penalty = bad}, "--repetition-penalty", value);
  }
  holds({.top_k = -1}, "--top-k", "is -1;");
  holds({.top_k = int64_t{1} << 40}, "--top-k", "is 1099511627776;");
  holds({.top_p = 0}, "--top-p", "is 0;");
  holds({.top_p = 1.5}, "--top-p", "is 1.5;");
  holds({.min_p = 1.5}, "--min-p", "is 1.5;");
  holds({.repetition_penalty = 0}, "--repetition-penalty", "is 0;");
  CHECK(message_of({.top_p = 2}, OptionSpelling::field).find("top_p is 2") == 0);
  CHECK(message_of({}, OptionSpelling::flag).empty());
  CHECK(message_of({.temperature = 0, .top_k = 20, .top_p = 0.95, .min_p = 1, .repetition_penalty = 1.3},
                   OptionSpelling::flag)
            .empty());
}

}  // namespace offload::sampler_test
