#include "offload/routing_trace.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <set>

#include "core/base.h"
#include "offload/policy_replay.h"

namespace offload::routing_trace_test {

namespace {

const RoutingShape kSmall{3, 16, 2};

std::vector<DrawnStep> mixed_steps() {
  return {{Phase::prefill, 5}, {Phase::decode, 1}, {Phase::decode, 2}};
}

std::string refusal(std::string_view bytes) {
  try {
    parse_trace(bytes, "t");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.message().starts_with("t: "));
    return error.message();
  }
  return "";
}

std::string with(std::string bytes, size_t at, std::string_view what) {
  return bytes.replace(at, what.size(), what);
}

double lru_hit_rate(const RoutingTrace& trace, double resident, int64_t begin) {
  PolicyOptions options{.kind = PolicyKind::lru, .shape = trace.shape(), .lookahead_layers = 0};
  options.slots = static_cast<int64_t>(resident * static_cast<double>(trace.shape().layers * trace.shape().experts));
  ExpertPolicy policy(options);
  replay(policy, trace, 0, begin);
  return 100 * replay(policy, trace, begin, trace.steps()).decode.hit_rate();
}

}  // namespace

TEST_CASE("a_trace_survives_the_file_unchanged") {
  const RoutingTrace trace = draw_trace(kSmall, SkewedRouting{}, mixed_steps(), 1);
  CHECK(parse_trace(serialize_trace(trace), "t") == trace);
  const std::string path = "routing_trace_test.bin";
  write_trace(trace, path);
  CHECK(read_trace(path) == trace);
  std::remove(path.c_str());
  CHECK(parse_trace(serialize_trace(RoutingTrace(kSmall)), "t").steps() == 0);
}

TEST_CASE("a_file_that_is_missing_is_refused_by_name") {
  CHECK_THROWS_WITH_AS(read_trace("no_such_trace.bin"), doctest::Contains("no_such_trace.bin: cannot read"), Error);
  CHECK_THROWS_WITH_AS(write_trace(RoutingTrace(kSmall), "no_such_directory/t"), doctest::Contains("cannot write"),
                       Error);
}

TEST_CASE("every_shorter_or_longer_file_is_refused") {
  const std::string good = serialize_trace(draw_trace(kSmall, UniformRouting{}, mixed_steps(), 2));
  for (size_t size = 0; size < good.size(); ++size)
    CHECK_FALSE(refusal(std::string_view(good).substr(0, size)).empty());
  CHECK(refusal(good + "x").find("1 bytes follow the last of 3 steps") != std::string::npos);
}

TEST_CASE("header_fields_out_of_range_are_refused_before_any_memory_is_taken") {
  using namespace std::string_literals;
  const std::string good = serialize_trace(draw_trace(kSmall, UniformRouting{}, mixed_steps(), 2));
  CHECK(refusal(with(good, 0, "X")).find("no routing trace") != std::string::npos);
  CHECK(refusal(with(good, 8, "\2")).find("version 2, expected 1") != std::string::npos);
  CHECK(refusal(with(good, 12, "\0"s)).find("layers is 0") != std::string::npos);
  CHECK(refusal(with(good, 12, "\xFF\xFF\xFF\xFF")).find("layers is 4294967295, expected 1 to 4096") !=
        std::string::npos);
  CHECK(refusal(with(good, 16, "\0"s)).find("experts is 0") != std::string::npos);
  CHECK(refusal(with(good, 20, "\x11")).find("top_k is 17, expected 1 to 16") != std::string::npos);
  CHECK(refusal(with(good, 24, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF")).find("cut short") != std::string::npos);
  CHECK(refusal(with(good, 32, "\2")).find("step 0: phase 2") != std::string::npos);
  CHECK(refusal(with(good, 36, "\0"s)).find("rows of step 0 is 0") != std::string::npos);
  CHECK(refusal(with(good, 36, "\xFF\xFF\x0F")).find("step 0 needs 6291450 ids") != std::string::npos);
  CHECK(refusal(with(good, 40, "\x10")).find("step 0, layer 0: expert id 16, expected less than 16") !=
        std::string::npos);
}

TEST_CASE("any_single_changed_byte_is_read_or_refused_but_never_more") {
  const std::string good = serialize_trace(draw_trace(kSmall, UniformRouting{}, mixed_steps(), 2));
  int refused = 0;
  for (size_t at = 0; at < good.size(); ++at)
    for (const int bit : {0, 3, 7}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1 << bit);
      refused += refusal(bad).empty() ? 0 : 1;
    }
  CHECK(refused > 100);
}

TEST_CASE("the_recorder_gives_the_trace_back_and_stops_when_full") {
  const RoutingTrace trace = draw_trace(kSmall, SkewedRouting{}, mixed_steps(), 3);
  const auto record = [&](RoutingRecorder& recorder) {
    for (int64_t s = 0; s < trace.steps(); ++s)
      for (int64_t l = 0; l < kSmall.layers; ++l) {
        const auto ids = trace.ids(s, l);
        recorder.record(l, trace.phase(s), std::vector<int32_t>(ids.begin(), ids.end()));
      }
  };
  RoutingRecorder recorder(kSmall, 3, 5, 8);
  record(recorder);
  CHECK(recorder.trace() == trace);
  CHECK_FALSE(recorder.full());
  RoutingRecorder short_of_rows(kSmall, 3, 5, 7), short_of_steps(kSmall, 1, 5, 8), narrow(kSmall, 3, 4, 8);
  record(short_of_rows);
  CHECK(short_of_rows.full());
  CHECK(short_of_rows.trace() == trace.slice(0, 2));
  record(short_of_steps);
  CHECK(short_of_steps.trace() == trace.slice(0, 1));
  record(narrow);
  CHECK(narrow.full());
  CHECK(narrow.trace().steps() == 0);
}

TEST_CASE("a_drawn_trace_is_a_function_of_its_seed_and_chooses_distinct_experts") {
  const std::vector<DrawnStep> steps(40);
  const RoutingTrace skewed = draw_trace(kSmall, SkewedRouting{}, steps, 7);
  CHECK(skewed == draw_trace(kSmall, SkewedRouting{}, steps, 7));
  CHECK(skewed != draw_trace(kSmall, SkewedRouting{}, steps, 8));
  const RoutingTrace all = draw_trace({2, 4, 4}, SkewedRouting{}, steps, 7);  // top_k = experts
  for (const RoutingTrace& trace : {skewed, draw_trace(kSmall, UniformRouting{}, steps, 7), all})
    for (int64_t s = 0; s < trace.steps(); ++s)
      for (int64_t l = 0; l < trace.shape().layers; ++l) {
        const auto ids = trace.ids(s, l);
        CHECK(std::set<uint16_t>(ids.begin(), ids.end()).size() == static_cast<size_t>(trace.shape().top_k));
      }
}

TEST_CASE("uniform_routing_chooses_every_expert_equally_often") {
  const RoutingTrace trace = draw_trace({1, 16, 4}, UniformRouting{}, std::vector<DrawnStep>(4000), 5);
  std::vector<int> counts(16);
  for (int64_t s = 0; s < trace.steps(); ++s)
    for (const uint16_t id : trace.ids(s, 0)) ++counts[id];
  for (const int count : counts) CHECK(count == doctest::Approx(1000).epsilon(0.12));  // 4 sigma
}

// The published curve: 12.5 % of the experts resident under LRU hit 67 %, 25 % hit 81 %.
TEST_CASE("lru_over_skewed_routing_follows_the_published_curve_within_two_points") {
  struct Case {
    RoutingShape shape;
    uint64_t seed;
  };
  // The second has the same top_k / experts at a size that tests afford.
  for (const Case& one : {Case{{48, 512, 10}, 1}, Case{{12, 256, 5}, 1}}) {
    const RoutingTrace trace = draw_trace(one.shape, SkewedRouting{}, std::vector<DrawnStep>(400), one.seed);
    CAPTURE(one.shape.layers);
    CAPTURE(one.seed);
    const double eighth = lru_hit_rate(trace, 0.125, 150), quarter = lru_hit_rate(trace, 0.25, 150);
    MESSAGE("layers " << one.shape.layers << ": " << eighth << " % and " << quarter << " %");
    CHECK(eighth == doctest::Approx(67).epsilon(2.0 / 67));
    CHECK(quarter == doctest::Approx(81).epsilon(2.0 / 81));
  }
}

}  // namespace offload::routing_trace_test
