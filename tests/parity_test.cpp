// Parity: what counts as a changed decision, the built-in prompts, and offload-parity and offload-stress as their users
// meet them.
#include "offload/parity.h"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/tokenizer.h"
#include "golden.h"
#include "offload/arm_evidence.h"
#include "stored_model.h"
#include "tool_run.h"

namespace offload::parity_test {
namespace fs = std::filesystem;

namespace {

using Arguments = std::vector<std::string>;

const std::string kParity = OFFLOAD_PARITY;
const std::string kSource = OFFLOAD_SOURCE_DIR;

Run run(Arguments arguments, const std::string& program = kParity) {
  arguments.insert(arguments.begin(), {"--threads", "1"});
  return run_program(program, arguments);
}

Json run_json(Arguments arguments, const std::string& program = kParity) {
  arguments.push_back("--json");
  return json_of(run(arguments, program));
}

void refuses(const Arguments& arguments, std::string_view part, int exit_code = 2) {
  check_refused(run(arguments), part, exit_code);
}

const Json& arm_of(const Json& report, std::string_view name) {
  for (const Json& arm : report.at("arms"))
    if (arm.at("arm") == name) return arm;
  FAIL("no arm ", std::string(name));
  return report;
}

// offload-parity with these arms: a program takes the configs beside its build tree, so a copy elsewhere takes others.
std::string parity_with_arms(const StoredFolder& folder, std::string_view arms) {
  fs::create_directories(folder.file("build/tools"));
  fs::create_directories(folder.file("configs"));
  const std::string program = folder.file("build/tools/offload-parity");
  fs::copy_file(kParity, program);
  folder.write("configs/arms.json", arms);
  return program;
}

int64_t tokens_of(const Tokenizer& tokenizer, const std::string& prompt) {
  return static_cast<int64_t>(
      tokenizer.encode(read_text_file(kSource + "/configs/prompts/" + prompt + ".txt", 1 << 20)).size());
}

}  // namespace

TEST_CASE("help_lists_what_the_program_takes_and_not_what_it_refuses") {
  const Run help = run({"--help"});
  CHECK(help.exit_code == 0);
  CHECK(help.out.find("--oracle") != std::string::npos);
  for (const char* flag : {"--dry-run", "--trace"}) {
    CHECK(help.out.find(flag) == std::string::npos);
    const Run refused = run(std::string_view(flag) == "--trace" ? Arguments{flag, "t.json"} : Arguments{flag});
    CHECK(refused.exit_code == 2);
    CHECK(refused.err.find("belong to offload-run") != std::string::npos);
  }
}

TEST_CASE("a_changed_decision_is_a_tie_only_where_the_baseline_cannot_choose") {
  LogitComparison c;
  c.add(0, std::vector<float>{1, 3, 2}, std::vector<float>{1, 2, 3});        // margin 1
  c.add(1, std::vector<float>{2, 2, 1}, std::vector<float>{2, 2.5f, 1});     // a tie, decided the other way
  c.add(2, std::vector<float>{2, 2, 1}, std::vector<float>{2, 2, 3});        // two were equal, a third was taken
  c.add(3, std::vector<float>{0, 5, 4.5f}, std::vector<float>{0, 4, 4.5f});  // margin 0.5
  c.add(4, std::vector<float>{0, 5, 4}, std::vector<float>{0, 6, 4});        // the same decision
  CHECK(c.rows() == 5);
  CHECK(c.ties() == 1);
  CHECK(c.flips() == 3);
  CHECK(c.largest_margin() == 1.0);
  CHECK(c.max_difference() == 2.0);
  CHECK(c.mean_difference() == doctest::Approx((1 + 1 + 0.5 + 2 + 1 + 1) / 15.0));
  REQUIRE(c.changed().size() == 4);
  CHECK(c.changed()[1].is_tie);
  CHECK(c.changed()[2].margin() == 0);
  CHECK(!c.changed()[2].is_tie);
  CHECK(c.changed()[3].baseline.ids == std::array<int32_t, 2>{1, 2});
  CHECK(c.changed()[3].candidate.ids == std::array<int32_t, 2>{2, 1});
}

TEST_CASE("rows_that_are_not_finite_are_counted_and_spoil_no_mean") {
  LogitComparison c;
  c.add(0, std::vector<float>{1, 0}, std::vector<float>{NAN, 0});
  c.add(1, std::vector<float>{1, 0}, std::vector<float>{INFINITY, 0});
  c.add(2, std::vector<float>{1, 0}, std::vector<float>{1, 0});
  CHECK(c.rows_not_finite() == 2);
  CHECK(c.flips() == 0);
  CHECK(c.mean_kl() == 0);
  LogitComparison sum;
  sum.add(c);
  sum.add(c);
  CHECK(sum.rows() == 6);
  CHECK(sum.rows_not_finite() == 4);
}

TEST_CASE("kl_is_that_of_the_distributions") {
  // p = (1/2, 1/2), q = (1/4, 3/4): ln(2)/2 + ln(2/3)/2.
  const double expected = 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3.0);
  CHECK(kl_divergence(std::vector<float>{7, 7}, std::vector<float>{0, std::log(3.0f)}) == doctest::Approx(expected));
  CHECK(kl_divergence(std::vector<float>{1, 2, 3}, std::vector<float>{101, 102, 103}) == doctest::Approx(0));
  LogitComparison c;
  for (const float shift : {0.0f, 1.0f, 5.0f}) c.add(0, std::vector<float>{3, 0}, std::vector<float>{3 + shift, 0});
  CHECK(c.median_kl() == doctest::Approx(kl_divergence(std::vector<float>{3, 0}, std::vector<float>{4, 0})));
  CHECK(c.mean_kl() > c.median_kl());
}

TEST_CASE("the_built_in_prompts_have_512_tokens_under_the_published_tokenizer_and_the_demos") {
  const Tokenizer published = Tokenizer::load(OFFLOAD_PUBLISHED_TOKENIZERS "/qwen3");
  const Tokenizer demo = Tokenizer::load(Golden::model_dir());
  for (const char* prompt : {"zh", "en", "code"}) {
    CAPTURE(prompt);
    MESSAGE(std::string(prompt), ": ", tokens_of(published, prompt), " and ", tokens_of(demo, prompt), " tokens");
    CHECK(tokens_of(published, prompt) >= 512);
    CHECK(tokens_of(demo, prompt) >= 512);
  }
}

TEST_CASE("each_arm_is_reported_beside_the_controls_and_the_report_repeats_itself") {
  const Arguments arguments{"--arms", "scaled_fp16,fp16_dense", "--prompts", "en,zh",   "--prompt-tokens",
                            "140",    "--decode-tokens",        "3",         "--oracle"};
  Json first = run_json(arguments), second = run_json(arguments);
  CHECK(first.at("device") == "cpu");
  CHECK(first.at("baseline") == "bf16");
  CHECK(first.at("oracle") == "fp32");
  REQUIRE(first.at("prompts").size() == 2);
  CHECK(first.at("prompts")[0] == Json{{"name", "en"}, {"prompt_tokens", 140}, {"decode_tokens", 3}});
  CHECK(first.at("controls").at("arms").size() == 4);
  for (size_t i = 0; i < 2; ++i) {
    int64_t most = 0;
    for (const Json& control : first.at("controls").at("arms"))
      most = std::max(most, arm_of(first, control.get<std::string>()).at("prompts")[i].at("flips").get<int64_t>());
    CHECK(first.at("controls").at("prompt_flips")[i] == most);
    for (const Json& arm : first.at("arms")) CHECK(arm.at("prompts")[i].at("controls_flips") == most);
  }
  for (const Json& arm : first.at("arms")) CHECK(arm.at("total").at("rows") == 2 * 143);
  CHECK(arm_of(first, "bf16").at("total").at("flips") == 0);
  CHECK(arm_of(first, "bf16").at("oracle").at("mean_kl").get<double>() > 0);
  CHECK(arm_of(first, "scaled_fp16").at("total").at("max_difference") == 0.0);  // exact in the CPU's order
  const Json& plain = arm_of(first, "fp16_dense");
  CHECK(plain.at("total").at("max_difference").get<double>() > 0);
  int64_t changed = 0;
  for (const Json& prompt : plain.at("prompts"))
    for (const Json& decision : prompt.at("changed")) {
      ++changed;
      CHECK(decision.at("baseline")[0] != decision.at("candidate")[0]);
      CHECK(decision.at("margin").get<double>() >= 0);
    }
  CHECK(changed == plain.at("total").at("flips").get<int64_t>() + plain.at("total").at("ties").get<int64_t>());
  first.erase("seconds");
  second.erase("seconds");
  CHECK(first == second);
}

TEST_CASE("the_table_names_the_arms_and_the_yardstick") {
  const Run result = run({"--arms", "scaled_hc", "--prompts", "code", "--prompt-tokens", "20", "--decode-tokens", "1"});
  CHECK(result.exit_code == 0);
  for (const char* part : {"demo-qwen4-exp", "code 20 + 1", "control_moe", "scaled_hc", "flips controls",
                           "A control changes up to", "decisions (code "})
    CHECK_MESSAGE(result.out.find(part) != std::string::npos, part);
}

TEST_CASE("ids_take_the_place_of_text_and_a_reference_is_the_judge") {
  const StoredFolder folder;
  folder.write("prompts.json",
               R"([{"name": "a", "ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}, {"name": "b", "text": "x"}])");
  const Json report = run_json({"--arms", "control", "--prompts", folder.file("prompts.json"), "--decode-tokens", "2"});
  CHECK(report.at("prompts")[0].at("prompt_tokens") == 10);
  CHECK(report.at("prompts")[1].at("name") == "b");

  const std::string logits = folder.file("logits.safetensors");
  const Run reference = run({"--prompt-ids", "5,6,7,8,9,10,11,12,13,14,15", "--max-tokens", "4", "--ignore-eos",
                             "--greedy", "--arm", "fp32", "--logits-out", logits},
                            OFFLOAD_RUN);
  INFO(reference.err);
  REQUIRE(reference.exit_code == 0);
  const Json judged = run_json({"--arms", "fp32", "--reference", logits});
  CHECK(judged.at("oracle") == "reference");
  {
    std::fstream file(logits, std::ios::binary | std::ios::in | std::ios::out);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    file.seekp(256 + 4 * 7);  // behind the header
    file.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  }
  refuses({"--reference", logits}, "logit 7 of row 0 is nan; expected finite numbers");
  CHECK(judged.at("prompts")[0].at("prompt_tokens") == 14);
  CHECK(arm_of(judged, "fp32").at("oracle").at("max_difference").get<double>() < 1e-4);
  CHECK(arm_of(judged, "bf16").at("oracle").at("max_difference").get<double>() > 1e-4);
}

TEST_CASE("bad_usage_is_refused_by_name") {
  refuses({"--arms", "fp4"}, "--arm \"fp4\" is unknown; the arms are bf16, bf16-reference, fp32, control");
  refuses({"--prompts", "de"}, "--prompts \"de\" is unknown; give zh,en,code, or a file");
  refuses({"--decode-tokens", "-1"}, "--decode-tokens is \"-1\"");
  refuses({"--evidence", "."}, "--evidence needs --oracle");
  refuses({"--evidence", "/nonexistent", "--oracle"}, "is no folder");
  refuses({"--reference", "/nonexistent", "--oracle"}, "--reference brings its own tokens");
  refuses({"--reference", kSource + "/models/demo-qwen4-exp"}, "tensor logits is missing", 1);
  refuses({"--context", "20", "--decode-tokens", "20"}, "leaves no room for a prompt");
  refuses({"--dry-run"}, "belong to offload-run");
  const StoredFolder folder;
  folder.write("ids.json", R"([{"name": "a", "ids": [5000]}])");
  refuses({"--prompts", folder.file("ids.json")}, "prompt a: token 5000 is outside the vocabulary");
  for (const char* id : {"4294967301", "1.9", "true", "1e300", "-1", "\"1\""}) {
    folder.write("no_id.json", fmt::format(R"([{{"name": "a", "ids": [{}]}}])", id));
    refuses({"--prompts", folder.file("no_id.json")}, "is no token id", 1);
  }
  folder.write("bad.json", R"({"name": "a"})");
  refuses({"--prompts", folder.file("bad.json")}, "expected an array", 1);
  refuses({"--model", kSource + "/configs/models/qwen3.8-flash-next-cpu.json", "--load-format", "dummy"},
          "the model has no tokenizer; give --prompts FILE.json");
}

TEST_CASE("an_arm_that_is_called_strict_and_is_not_fails_the_run") {
  const StoredFolder folder;
  const std::string program = parity_with_arms(
      folder, R"({"arms": [{"name": "bold", "status": "strict", "evidence": ["x.json"], "description": "",
                  "rules": [{"site": "dense", "phase": "any", "rows_min": 9, "math": "fp16_out"}]}]})");
  const Arguments arguments{"--prompts", "zh", "--decode-tokens", "1"};
  const Run result = run(arguments, program);
  CHECK(result.exit_code == 1);
  CHECK(result.err.find("bold is marked strict: ") != std::string::npos);
  CHECK(result.out.find("bold") != std::string::npos);
  CHECK(result.out.find("No control ran: a strict arm changes no decision.") != std::string::npos);
  folder.write("configs/arms.json", R"({"arms": [{"name": "bold"}]})");
  const Run broken = run(arguments, program);
  CHECK(broken.exit_code == 1);
  CHECK(broken.err.find("arms.json: arm \"bold\": field \"status\" is missing") != std::string::npos);
}

TEST_CASE("a_flip_on_a_prompt_on_which_no_control_flips_fails_the_run_however_many_a_control_has_elsewhere") {
  // The control acts from 50 rows on, the arm below: each on prompts that the other leaves alone. FP16 sums change
  // decisions in any order of summation, so that no instruction set spares the short prompt.
  Json control_rules = Json::array(), rules = Json::array();
  for (const char* site : {"dense", "hyper_connection", "experts"}) {
    control_rules.push_back({{"site", site}, {"rows_min", 50}, {"math", "fp16_out"}});
    rules.push_back({{"site", site}, {"rows_min", 50}, {"math", "native"}});
    rules.push_back({{"site", site}, {"rows_min", 9}, {"math", "fp16_out"}});
  }
  const auto arm = [](const char* name, const char* status, const Json& its_rules) {
    return Json{{"name", name},
                {"status", status},
                {"evidence", Json::array({"x.json"})},
                {"description", ""},
                {"rules", its_rules}};
  };
  const Json arms{{"arms", {arm("wild", "control", control_rules), arm("bold", "strict", rules)}}};
  const StoredFolder folder;
  const std::string program = parity_with_arms(folder, arms.dump());
  const std::vector<int32_t> ids = Golden().prompts().back().ids;
  const auto part = [&](size_t first, size_t count) {
    return std::vector<int32_t>(ids.begin() + static_cast<std::ptrdiff_t>(first),
                                ids.begin() + static_cast<std::ptrdiff_t>(first + count));
  };
  folder.write("prompts.json", Json{{{"name", "short"}, {"ids", part(0, 48)}},
                                    {{"name", "few"}, {"ids", part(0, 8)}},
                                    {{"name", "long"}, {"ids", part(0, 128)}},
                                    {{"name", "next"}, {"ids", part(128, 128)}},
                                    {{"name", "last"}, {"ids", part(256, 128)}}}
                                   .dump());
  const Run result = run({"--prompts", folder.file("prompts.json"), "--decode-tokens", "1", "--json"}, program);
  INFO(result.err);
  REQUIRE(result.exit_code == 1);
  const Json report = parse_json(result.out, "standard output");
  const Json &control = arm_of(report, "wild"), &bold = arm_of(report, "bold");
  const auto flips = [](const Json& counts) { return counts.at("flips").get<int64_t>(); };
  const int64_t short_flips = flips(bold.at("prompts")[0]);
  REQUIRE(short_flips > 0);
  REQUIRE(flips(control.at("prompts")[0]) == 0);
  REQUIRE(flips(control.at("total")) >= flips(bold.at("total")));
  for (size_t i = 0; i < 5; ++i) CHECK(bold.at("prompts")[i].at("controls_flips") == flips(control.at("prompts")[i]));
  const std::string fault = fmt::format("prompt short: {} flips where no control has one", short_flips);
  CHECK(bold.at("strict_faults") == Json::array({fault}));
  CHECK(result.err.find("bold is marked strict: " + fault) != std::string::npos);
}

TEST_CASE("evidence_is_one_file_for_each_arm_named_after_model_and_device") {
  const StoredFolder folder;
  const auto arguments = [&](const char* prompt_tokens) {
    return Arguments{"--arms",          "scaled_moe", "--prompts", "en",         "--prompt-tokens", prompt_tokens,
                     "--decode-tokens", "1",          "--oracle",  "--evidence", folder.path()};
  };
  refuses(arguments("127"), "scaled_moe begins at 128 rows, and no prompt computes more than 127 at once");
  CHECK(fs::is_empty(folder.path()));
  run_json(arguments("128"));
  for (const char* arm : {"bf16", "control", "control_dense", "control_hc", "control_moe", "scaled_moe"}) {
    const std::string path = folder.file(fmt::format("demo-qwen4-exp-cpu-{}.json", arm));
    REQUIRE_MESSAGE(fs::exists(path), path);
    const ArmEvidence evidence = parse_evidence(read_text_file(path, 1 << 16), path);
    CHECK(evidence.arm == arm);
    CHECK(evidence.yardstick.prompt_flips == std::vector<int64_t>{evidence.yardstick.flips});  // of the one prompt
  }
}

TEST_CASE("offload_stress_writes_a_new_folder_and_touches_no_other") {
  const StoredFolder folder;
  const std::string program = OFFLOAD_STRESS, out = folder.file("twin");
  const Run result = run_program(program, {"--out", out, "--seed", "3", "--json"});
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  const Json json = parse_json(result.out, "standard output");
  CHECK(json.at("channels") == 8 * 33 * 32 + 2 * 128);
  CHECK(json.at("channels_kept") == 0);
  for (const char* file : {"config.json", "tokenizer.json", "model.safetensors.index.json"})
    CHECK(read_text_file(out + "/" + file, 1 << 26) == read_text_file(Golden::model_dir() + "/" + file, 1 << 26));
  CHECK(fs::directory_iterator(folder.path()) != fs::directory_iterator());
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);  // nothing partial

  const auto refused = [&](const Arguments& arguments, std::string_view part) {
    const Run run = run_program(program, arguments);
    CAPTURE(run.err);
    CHECK(run.exit_code == 2);
    CHECK(run.err.find(part) != std::string::npos);
  };
  refused({"--out", out}, "exists already; give a new folder");
  refused({}, "--out is missing");
  refused({"--out", folder.file("x"), "--model", folder.path()}, "has no config.json");
  refused({"--out", folder.file("x"), "--exponent-max", "101"}, "--exponent-max is \"101\"");
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 1);
}

}  // namespace offload::parity_test
