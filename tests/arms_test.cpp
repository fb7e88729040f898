// Arms: their file, their rules, that few rows are native under all of them, and that evidence backs each verdict.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "cpu/cpu_ops.h"
#include "golden.h"
#include "model_runner.h"
#include "offload/arm_evidence.h"
#include "op_values.h"

namespace offload::arms_test {

namespace {

const std::string kConfigs = OFFLOAD_SOURCE_DIR "/configs/";
constexpr Math kMaths[] = {Math::native, Math::scaled_fp16, Math::fp16, Math::fp16_out, Math::reordered};
constexpr Site kSites[] = {Site::dense, Site::hyper_connection, Site::experts};

std::vector<Arm> shipped_arms() {
  return parse_arms(read_text_file(kConfigs + "arms.json", 1 << 20), "configs/arms.json");
}

ArmEvidence shipped_evidence(const std::string& path) {
  return parse_evidence(read_text_file(kConfigs + path, 1 << 20), path);
}

// One arm in a file, with these fields in place of what is right.
Json arm_with(const Json& changes = Json::object()) {
  Json arm = {{"name", "x"},
              {"status", "experimental"},
              {"evidence", Json::array()},
              {"description", "d"},
              {"rules", {{{"site", "dense"}, {"phase", "any"}, {"rows_min", 9}, {"math", "fp16"}}}}};
  arm.update(changes);
  return arm;
}

void refuses(const std::vector<Json>& arms, std::string_view part) {
  CAPTURE(std::string(part));
  try {
    static_cast<void>(parse_arms(Json{{"arms", arms}}.dump(), "arms.json"));
    FAIL_CHECK("was accepted");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    CHECK_MESSAGE(error.message().find(part) != std::string::npos, error.message());
    CHECK(error.message().starts_with("arms.json"));
  }
}

MathRules everywhere(Math math) {
  MathRules rules;
  for (const Site site : kSites) rules.add({.site = site, .math = math});
  return rules;
}

}  // namespace

TEST_CASE("the_first_rule_that_matches_decides_and_without_one_a_product_is_native") {
  MathRules rules;
  rules.add({.site = Site::dense, .rows_min = 512, .math = Math::fp16});
  rules.add({.site = Site::dense, .phase = Phase::prefill, .rows_min = 100, .math = Math::reordered});
  rules.add({.site = Site::dense, .rows_min = 9, .math = Math::scaled_fp16});
  CHECK(rules.math_of(Site::dense, Phase::prefill, 512) == Math::fp16);
  CHECK(rules.math_of(Site::dense, Phase::prefill, 511) == Math::reordered);
  CHECK(rules.math_of(Site::dense, Phase::prefill, 99) == Math::scaled_fp16);
  CHECK(rules.math_of(Site::experts, Phase::prefill, 512) == Math::native);
  CHECK(MathRules().math_of(Site::dense, Phase::prefill, 512) == Math::native);
}

TEST_CASE("up_to_8_rows_and_decode_are_native_whatever_an_arm_says") {
  for (const Math math : kMaths) {
    MathRules rules;
    for (const Site site : kSites)
      for (const Phase phase : {Phase::prefill, Phase::decode})
        rules.add({.site = site, .phase = phase, .rows_min = 1, .math = math});
    for (const Site site : kSites) {
      for (int64_t rows = 0; rows <= kCanonicalRowsMax; ++rows)
        CHECK(rules.math_of(site, Phase::prefill, rows) == Math::native);
      CHECK(rules.math_of(site, Phase::prefill, kCanonicalRowsMax + 1) == math);
      for (const int64_t rows : {1, 8, 9, 1000}) CHECK(rules.math_of(site, Phase::decode, rows) == Math::native);
    }
  }
}

TEST_CASE("a_product_of_up_to_8_rows_has_the_same_bits_in_every_math") {
  constexpr int64_t kColumns = 7, kDepth = 200;
  CaseRandom random("few rows");
  std::vector<double> x_values, w_values;
  for (int64_t i = 0; i < 9 * kDepth; ++i) x_values.push_back(1e5 * random.normal());  // beyond FP16
  for (int64_t i = 0; i < kColumns * kDepth; ++i) w_values.push_back(random.normal());
  cpu::CpuOps ops({.threads = 1});
  HostMirror mirror;
  OpValues v(ops, mirror);
  const Tensor x = v.put(DType::bf16, {9, kDepth}, x_values), w = v.put(DType::bf16, {kColumns, kDepth}, w_values);
  const auto product = [&](int64_t rows, Math math) {
    const Tensor out = v.blank(DType::f32, {rows, kColumns});
    v.run(LinearArgs{.x = x.narrow(0, 0, rows), .w = w, .out = out, .math = math});
    return v.take(out);
  };
  for (const Math math : kMaths) {
    for (int64_t rows = 1; rows <= kCanonicalRowsMax; ++rows) CHECK(product(rows, math) == product(rows, Math::native));
    if (math == Math::fp16 || math == Math::reordered) CHECK(product(9, math) != product(9, Math::native));
  }
}

TEST_CASE("a_model_decodes_with_the_same_bits_under_every_arm") {
  const std::vector<int32_t> prompt = Golden().prompts().front().ids;
  const std::span<const int32_t> few = std::span(prompt).first(8);
  ModelRunner plain(Golden::model_dir(), {DType::bf16, Rounding::fused});
  const std::vector<float> expected = plain.logits(few, {8, 1}), all = plain.logits(prompt);
  for (const Math math : {Math::fp16_out, Math::reordered}) {
    ModelRunner runner(Golden::model_dir(), {DType::bf16, Rounding::fused, everywhere(math)});
    CHECK(runner.logits(few, {8, 1}) == expected);
    CHECK(runner.logits(few, {1}) == plain.logits(few, {1}));
    CHECK(runner.logits(prompt) != all);  // the arm does something to a prompt
  }
}

TEST_CASE("fp32_activations_ignore_the_rules") {
  const std::vector<int32_t> prompt = Golden().prompts().front().ids;
  ModelRunner plain(Golden::model_dir(), kFp32Arithmetic);
  ModelRunner ruled(Golden::model_dir(), {DType::f32, Rounding::fused, everywhere(Math::fp16_out)});
  CHECK(ruled.logits(prompt) == plain.logits(prompt));
}

TEST_CASE("what_is_wrong_with_a_file_of_arms_is_named") {
  CHECK(parse_arms(Json{{"arms", {arm_with()}}}.dump(), "arms.json").front().rules.rules().front() ==
        MathRule{.site = Site::dense, .rows_min = 9, .math = Math::fp16});
  const auto rule = [](const Json& changes) {
    Json one = {{"site", "dense"}, {"math", "fp16"}};
    one.update(changes);
    return arm_with({{"rules", Json::array({one})}});
  };
  refuses({rule({{"site", "router"}})}, "arm \"x\": rule 0: site \"router\" is unknown; expected one of dense");
  refuses({rule({{"math", "int8"}})}, "math \"int8\" is unknown; expected one of native, scaled_fp16");
  refuses({rule({{"phase", "warmup"}})}, "phase \"warmup\" is unknown; expected one of prefill, decode, any");
  refuses({rule({{"rows_min", 0}})}, "\"rows_min\" must be a whole number of at least 1");
  refuses({rule({{"rows_max", 4}})}, "field \"rows_max\" is unknown; the fields are site, phase, rows_min, math");
  refuses({arm_with({{"status", "fast"}})}, "status \"fast\" is unknown; expected one of strict");
  refuses({arm_with({{"speed", 1}})}, "field \"speed\" is unknown");
  refuses({arm_with({{"name", ""}})}, "arm 0: the name is empty");
  refuses({arm_with({{"name", 3}})}, "\"name\" must be text");
  refuses({arm_with(), arm_with()}, "two arms have the name \"x\"");
  refuses({arm_with({{"name", "bf16"}})}, "the baseline has no rules");
  for (const char* status : {"strict", "rejected"})
    refuses({arm_with({{"status", status}})}, "without evidence; name files of offload-parity --evidence");
  for (const char* path : {"", "/etc/x.json", "../x.json", "evidence/x.txt"})
    refuses({arm_with({{"evidence", Json::array({path})}})}, "must be a .json file below the folder of this one");
  Json without = arm_with();
  without.erase("evidence");
  refuses({without}, "field \"evidence\" is missing");
  refuses({arm_with({{"rules", Json::array_t(13, {{"site", "dense"}, {"math", "fp16"}})}})}, "13 rules; at most 12");
}

TEST_CASE("rules_survive_being_written_and_read") {
  for (const Arm& arm : shipped_arms()) CHECK(parse_rules(rules_json(arm.rules), "rules") == arm.rules);
}

TEST_CASE("the_shipped_arms_are_the_baseline_a_control_and_the_candidates") {
  const std::vector<Arm> arms = shipped_arms();
  const auto find = [&](std::string_view name) {
    const auto found = std::find_if(arms.begin(), arms.end(), [&](const Arm& arm) { return arm.name == name; });
    REQUIRE_MESSAGE(found != arms.end(), std::string(name));
    return *found;
  };
  CHECK(arms.front().name == kBaselineArm);
  CHECK(find("control").status == ArmStatus::control);
  for (const char* name : {"scaled_fp16", "scaled_fp16_dense", "scaled_hc", "scaled_moe", "fp16_dense",
                           "fp32_out_dense", "hc_fused", "fp16_moe"})
    CHECK(!find(name).rules.rules().empty());
  // A control is plain BF16 in another order and nothing else.
  for (const Arm& arm : arms)
    for (const MathRule& rule : arm.rules.rules())
      CHECK((rule.math == Math::reordered) == (arm.status == ArmStatus::control));
}

TEST_CASE("a_strict_arm_has_evidence_that_it_cannot_be_told_from_a_control") {
  int64_t strict = 0;
  for (const Arm& arm : shipped_arms()) {
    CAPTURE(arm.name);
    bool was_beaten = false;
    for (const std::string& path : arm.evidence) {
      const ArmEvidence evidence = shipped_evidence(path);
      INFO(path);
      CHECK(evidence_faults(arm, evidence) == std::vector<std::string>{});
      const std::vector<std::string> faults = strict_faults(evidence.score, evidence.yardstick);
      was_beaten = was_beaten || !faults.empty();
      if (arm.status == ArmStatus::strict) CHECK(faults == std::vector<std::string>{});
    }
    if (arm.status == ArmStatus::rejected) CHECK(was_beaten);
    strict += arm.status == ArmStatus::strict;
  }
  CHECK(strict > 1);  // the baseline is not the only one
}

TEST_CASE("the_yardstick_in_evidence_is_what_the_controls_evidence_says") {
  const std::vector<Arm> arms = shipped_arms();
  std::map<std::string, Yardstick> expected;  // by model and device
  const auto machine = [](const ArmEvidence& evidence) { return evidence.model + " on " + evidence.device; };
  for (const Arm& arm : arms)
    for (const std::string& path : arm.evidence) {
      if (arm.status != ArmStatus::control) continue;
      const ArmEvidence evidence = shipped_evidence(path);
      Yardstick& most = expected[machine(evidence)];
      most.flips = std::max(most.flips, evidence.score.flips);
      most.largest_margin = std::max(most.largest_margin, evidence.score.largest_margin);
      most.prompt_flips.resize(evidence.prompts.size());
      for (size_t i = 0; i < evidence.prompts.size(); ++i)
        most.prompt_flips[i] = std::max(most.prompt_flips[i], evidence.score.prompts[i].flips);
    }
  for (const Arm& arm : arms)
    for (const std::string& path : arm.evidence) {
      CAPTURE(path);
      const ArmEvidence evidence = shipped_evidence(path);
      const Yardstick& most = expected.at(machine(evidence));
      CHECK(evidence.yardstick.flips == most.flips);
      CHECK(evidence.yardstick.largest_margin == most.largest_margin);
      CHECK(evidence.yardstick.prompt_flips == most.prompt_flips);
    }
}

TEST_CASE("evidence_that_does_not_match_is_found_out") {
  const auto arms = shipped_arms();
  const Arm& arm = *std::find_if(arms.begin(), arms.end(), [](const Arm& a) { return a.name == "scaled_fp16"; });
  const ArmEvidence good = shipped_evidence(arm.evidence.front());
  REQUIRE(evidence_faults(arm, good).empty());
  const auto faults_of = [&](const std::function<void(ArmEvidence&)>& change) {
    ArmEvidence changed = good;
    change(changed);
    return evidence_faults(arm, changed);
  };
  CHECK(faults_of([](ArmEvidence& e) { e.arm = "other"; }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.rules = {}; }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.baseline = "fp32"; }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.prompts.pop_back(); }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.prompts[0].prompt_tokens = 511; }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.prompts[0].decode_tokens = 31; }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { e.score.oracle.reset(); }).size() == 1);
  CHECK(faults_of([](ArmEvidence& e) { ++e.score.prompts[1].flips; }).size() == 1);
  CHECK_THROWS_WITH_AS(parse_evidence("{}", "e.json"), doctest::Contains("e.json: no evidence of offload-parity"),
                       Error);
}

TEST_CASE("evidence_has_the_controls_flips_of_each_of_its_prompts") {
  const std::string path = "evidence/demo-qwen4-exp-cpu-scaled_fp16.json";
  const Json good = parse_json(read_text_file(kConfigs + path, 1 << 20), path);
  const auto refused = [&](const std::function<void(Json&)>& change, const char* part) {
    Json changed = good;
    change(changed);
    CHECK_THROWS_WITH_AS(parse_evidence(changed.dump(), "e.json"), doctest::Contains(part), Error);
  };
  refused([](Json& e) { e["controls"].erase("prompt_flips"); }, "prompt_flips");
  refused([](Json& e) { e["controls"]["prompt_flips"] = 3; }, "e.json: no evidence of offload-parity");
  refused([](Json& e) { e["prompts"][0].erase("flips"); }, "flips");
  for (const Json& counts : {Json::array(), Json::array({22, 14}), Json::array({22, 14, 10, 0})})
    refused([&](Json& e) { e["controls"]["prompt_flips"] = counts; }, "e.json: controls.prompt_flips has");
  Json without = good;
  without["controls"].update({{"arms", Json::array()}, {"prompt_flips", Json::array()}});
  CHECK(parse_evidence(without.dump(), "e.json").yardstick.prompt_flips.empty());
}

TEST_CASE("an_arm_is_strict_up_to_the_controls_figures_and_not_beyond") {
  const Yardstick yardstick{.flips = 3, .largest_margin = 0.25, .baseline = OracleKl{0.01, 0.001}};
  const ArmScore equal{.flips = 3, .largest_margin = 0.25, .oracle = OracleKl{0.0125, 0.00115}};
  CHECK(strict_faults(equal, yardstick).empty());
  const auto fault = [&](const std::function<void(ArmScore&)>& change) {
    ArmScore score = equal;
    change(score);
    const std::vector<std::string> faults = strict_faults(score, yardstick);
    REQUIRE(faults.size() == 1);
    return faults.front();
  };
  CHECK(fault([](ArmScore& s) { s.flips = 4; }) == "4 flips, the controls' most is 3");
  CHECK(fault([](ArmScore& s) { s.largest_margin = 0.26; }).starts_with("a flip at margin 0.26"));
  CHECK(fault([](ArmScore& s) { s.rows_not_finite = 1; }) == "1 rows are not finite");
  CHECK(fault([](ArmScore& s) { s.oracle->mean = 0.0126; }).starts_with("mean KL 0.0126 to the oracle"));
  CHECK(fault([](ArmScore& s) { s.oracle->median = 0.0012; }).starts_with("median KL 0.0012 to the oracle"));
}

TEST_CASE("where_no_control_flips_a_strict_arm_flips_neither") {
  const Yardstick yardstick{.flips = 3, .largest_margin = 0.25, .prompt_flips = {3, 0, 0}};
  const auto faults = [&](int64_t zh, int64_t en, int64_t code) {
    const ArmScore arm{
        .flips = zh + en + code, .largest_margin = 0.125, .prompts = {{"zh", zh}, {"en", en}, {"code", code}}};
    return strict_faults(arm, yardstick);
  };
  using Faults = std::vector<std::string>;
  CHECK(faults(0, 0, 0) == Faults{});
  CHECK(faults(3, 0, 0) == Faults{});
  CHECK(faults(0, 2, 0) == Faults{"prompt en: 2 flips where no control has one"});
  CHECK(faults(1, 1, 1) ==
        Faults{"prompt en: 1 flips where no control has one", "prompt code: 1 flips where no control has one"});
  CHECK(faults(3, 1, 0) == Faults{"4 flips, the controls' most is 3", "prompt en: 1 flips where no control has one"});
}

TEST_CASE("without_a_control_the_pooled_count_faults_a_flip_and_no_prompt_is_named") {
  const ArmScore arm{.flips = 2, .prompts = {{"zh", 2}, {"en", 0}}};
  CHECK(strict_faults(arm, {}) == std::vector<std::string>{"2 flips, the controls' most is 0"});
  CHECK(strict_faults({.prompts = {{"zh", 0}}}, {}).empty());
}

}  // namespace offload::arms_test
