// offload-bench as its user meets it: what it prints, what it refuses, what it compares. No speed is asserted.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "offload/roofs.h"
#include "offload/routing_trace.h"
#include "tool_run.h"
#include "trace_checks.h"

namespace offload::bench_test {
namespace fs = std::filesystem;

namespace {

using Arguments = std::vector<std::string>;

const std::string kProgram = OFFLOAD_BENCH;
const std::string kShapes = OFFLOAD_SOURCE_DIR "/configs/models/";

Run run(const Arguments& arguments) {
  return run_program(kProgram, arguments);
}

Json run_json(const Arguments& arguments) {
  return json_of(run(arguments));
}

void refuses(const Arguments& arguments, std::string_view part, int exit_code = 2) {
  check_refused(run(arguments), part, exit_code);
}

class ReportFile {
 public:
  explicit ReportFile(std::string_view text) {
    std::string pattern = (fs::temp_directory_path() / "offload_bench_XXXXXX").string();
    const int fd = mkstemp(pattern.data());
    REQUIRE(fd >= 0);
    path_ = pattern;
    std::ofstream(path_, std::ios::binary) << text;
  }
  ReportFile(const ReportFile&) = delete;
  ~ReportFile() { fs::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string report(std::string_view kind, std::string_view rows) {
  return fmt::format(R"({{"kind": "{}", "rows": [{}]}})", kind, rows);
}

void check_report(const Json& json, std::string_view kind) {
  CHECK(json.at("kind") == kind);
  CHECK(json.at("command").get<std::string>().find("--json") != std::string::npos);
  CHECK(json.at("commit") == "0123abc");
  for (const char* key : {"cpu", "instruction_set", "link", "cores", "threads", "memory_bytes", "governor", "clock_mhz",
                          "load_before", "load_after"})
    CHECK(json.at("machine").contains(key));
  CHECK(json.at("machine").at("threads") == 1);
  for (const char* key : {"read_gib_s", "fma_gflop_s"}) {
    REQUIRE(json.at("roofs").at(key).size() == 2);
    CHECK(json.at("roofs").at(key)[1].get<double>() > 0);
  }
  CHECK(json.at("roofs").at("drift").is_number());
  CHECK(json.at("quotable").is_boolean());
  for (const Json& row : json.at("rows")) {
    CAPTURE(row.dump());
    CHECK(row.at("min_s").get<double>() > 0);
    CHECK(row.at("median_s") >= row.at("min_s"));
    CHECK(row.at("max_s") >= row.at("median_s"));
    CHECK(row.at("hash").get<std::string>().size() == 16);
    for (const char* key :
         {"name", "tokens", "n", "bytes", "flops", "gib_s", "gflop_s", "predicted_s", "bound", "fraction"})
      CHECK(row.contains(key));
  }
}

}  // namespace

TEST_CASE("the_drift_of_roofs_is_that_of_the_one_that_moved_most_either_way") {
  const Roofs before{.read_bytes_per_s = 100, .flops_per_s = 200, .link_bytes_per_s = 50, .m16n8k8_flops_per_s = 400};
  CHECK(drift(before, before) == 0);
  // Each of them alone, up and down.
  for (const auto roof :
       {&Roofs::read_bytes_per_s, &Roofs::flops_per_s, &Roofs::link_bytes_per_s, &Roofs::m16n8k8_flops_per_s})
    for (const double factor : {0.5, 1.25}) {
      Roofs after = before;
      after.*roof *= factor;
      CHECK(drift(before, after) == std::abs(factor - 1));
      CHECK(better_of(before, after).*roof == std::max(1.0, factor) * (before.*roof));
    }
  Roofs after = before;
  after.read_bytes_per_s = 75;
  after.flops_per_s = 210;
  CHECK(drift(before, after) == 0.25);
  // What a device has not been measured for does not drift.
  const Roofs cpu{.read_bytes_per_s = 100, .flops_per_s = 200};
  CHECK(drift(cpu, {.read_bytes_per_s = 100, .flops_per_s = 150}) == 0.25);
}

TEST_CASE("op_cases_are_reported_as_json_with_the_documented_keys") {
  const Arguments arguments{"ops", "--op",      "linear", "--case",   "linear/*", "--repeat",
                            "2",   "--threads", "1",      "--commit", "0123abc",  "--json"};
  const Json first = run_json(arguments);
  check_report(first, "ops");
  CHECK(first.at("rows").size() > 5);
  CHECK(first.at("baseline_drift").is_null());
  for (const Json& row : first.at("rows")) {
    CHECK(row.at("name").get<std::string>().starts_with("linear/"));
    CHECK(row.at("n") == 2);
  }

  const ReportFile file(first.dump());
  const Json compared = run_json({"--compare", file.path(), file.path(), "--json"});
  CHECK(compared.at("kind") == "comparison");
  REQUIRE(compared.at("rows").size() == first.at("rows").size());
  for (const Json& row : compared.at("rows")) {
    CHECK(row.at("speedup") == 1.0);
    CHECK(row.at("same_hash") == true);
  }
}

TEST_CASE("a_model_is_measured_with_arms_in_turn_and_the_first_again_last") {
  const Json json = run_json({"--prompt-tokens", "6", "--decode-tokens", "2", "--repeat", "1", "--warmup", "0",
                              "--arms", "bf16,fp32", "--threads", "1", "--commit", "0123abc", "--json"});
  check_report(json, "model");
  REQUIRE(json.at("rows").size() == 6);
  const char* names[] = {"prefill/bf16", "prefill/fp32", "prefill/bf16/2",
                         "decode/bf16",  "decode/fp32",  "decode/bf16/2"};
  for (size_t i = 0; i < 6; ++i) {
    const Json& row = json.at("rows")[i];
    CHECK(row.at("name") == names[i]);
    CHECK(row.at("tokens") == (i < 3 ? 6 : 2));
    for (const char* key : {"median_tok_s", "min_tok_s", "max_tok_s", "predicted_tok_s"}) CHECK(row.contains(key));
  }
  CHECK(json.at("rows")[0].at("hash") == json.at("rows")[2].at("hash"));
  CHECK(json.at("rows")[0].at("hash") != json.at("rows")[1].at("hash"));
  CHECK(json.at("baseline_drift").is_number());
  CHECK(json.at("plan").at("model_type") == "qwen4_exp");
}

TEST_CASE("several_prompt_lengths_are_rows_of_their_own") {
  const Json json = run_json({"--prompt-tokens", "4,9", "--decode-tokens", "2", "--repeat", "1", "--warmup", "0",
                              "--threads", "1", "--commit", "0123abc", "--json"});
  check_report(json, "model");
  const char* names[] = {"prefill/bf16@4", "prefill/bf16@9", "prefill/bf16/2@4", "prefill/bf16/2@9",
                         "decode/bf16@4",  "decode/bf16@9",  "decode/bf16/2@4",  "decode/bf16/2@9"};
  REQUIRE(json.at("rows").size() == std::size(names));
  for (size_t i = 0; i < std::size(names); ++i) {
    const Json& row = json.at("rows")[i];
    CHECK(row.at("name") == names[i]);
    CHECK(row.at("tokens") == (i >= 4 ? 2 : i % 2 == 0 ? 4 : 9));
    CHECK(row.at("hash") == json.at("rows")[i / 4 * 4 + i % 2].at("hash"));
  }
  CHECK(json.at("rows")[4].at("hash") != json.at("rows")[5].at("hash"));
  refuses({"--prompt-tokens", "4,9", "--profile"}, "take one length");
  refuses({"--prompt-tokens", "4,"}, "--prompt-tokens is \"\"");
}

TEST_CASE("a_bench_over_ranks_has_the_same_bits_wherever_the_experts_run") {
  const auto hashes = [&](const Arguments& more) {
    Arguments arguments{"--prompt-tokens", "24", "--decode-tokens", "4",  "--repeat", "1",
                        "--warmup",        "0",  "--chunk",         "12", "--tp",     "2",
                        "--threads",       "2",  "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Json json = run_json(arguments);
    CHECK(json.at("plan").at("tp") == 2);
    std::vector<std::string> out;
    for (const Json& row : json.at("rows")) out.push_back(row.at("hash"));
    return out;
  };
  const std::vector<std::string> in_place = hashes({});
  CHECK(in_place.size() == 4);
  CHECK(hashes({"--expert-slots", "8", "--cpu-experts", "50%"}) == in_place);
  CHECK(hashes({"--expert-slots", "8", "--zero-copy-experts", "50%"}) == in_place);
}

TEST_CASE("a_cold_cache_is_filled_anew_by_every_prompt_and_changes_no_bit") {
  const auto rows = [&](const Arguments& more) {
    Arguments arguments{"--prompt-tokens", "40",  "--decode-tokens", "0", "--repeat", "1",
                        "--expert-slots",  "256", "--warmup",        "1", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_json(arguments).at("rows");
  };
  const Json warm = rows({}), cold = rows({"--cold-cache"});
  REQUIRE(cold.size() == 2);
  for (size_t i = 0; i < cold.size(); ++i) {
    CHECK(cold[i].at("hash") == warm[i].at("hash"));
    CHECK(warm[i].at("link_bytes") == 0);  // all are there since the warm-up
    CHECK(cold[i].at("link_bytes").get<int64_t>() > 0);
  }
  refuses({"ops", "--cold-cache"}, "--cold-cache");
  refuses({"all-reduce", "--cold-cache"}, "--cold-cache");
  refuses({"--device", "cpu", "--cold-cache"}, "--expert-slots");
}

TEST_CASE("text_names_the_machine_the_command_and_each_case") {
  const Run result = run({"ops", "--case", "add/*", "--repeat", "1", "--threads", "1"});
  CHECK(result.exit_code == 0);
  for (const char* part :
       {"command    ", " ops --case 'add/*' --repeat 1", "machine    ", "roofs      ", "add/", "drift"})
    CHECK_MESSAGE(result.out.find(part) != std::string::npos, part);
}

TEST_CASE("a_profile_gives_time_per_op_and_no_speed") {
  const Json json = run_json({"--profile", "--prompt-tokens", "4", "--decode-tokens", "1", "--warmup", "0", "--json"});
  CHECK(json.at("kind") == "profile");
  REQUIRE(json.at("phases").size() == 2);
  for (const Json& phase : json.at("phases")) {
    double inside = 0;
    bool has_linear = false;
    for (const Json& op : phase.at("ops")) {
      inside += op.at("seconds").get<double>();
      has_linear = has_linear || op.at("op") == "linear";
      CHECK(op.at("calls").get<int64_t>() > 0);
    }
    CHECK(has_linear);
    CHECK(inside <= phase.at("wall_s").get<double>());
  }
}

TEST_CASE("a_trace_is_a_run_of_its_own_and_prints_no_speed") {
  const ReportFile file("");
  const Run result = run({"--trace", file.path(), "--prompt-tokens", "20", "--decode-tokens", "2", "--threads", "1"});
  CAPTURE(result.err);
  CHECK(result.exit_code == 0);
  CHECK(result.out.empty());
  const Json document = parse_json(read_text_file(file.path(), 1 << 28), file.path());
  check_lanes(document);
  int64_t steps = 0;
  for (const Json& event : document["traceEvents"]) steps += event["name"] == "step";
  CHECK(steps == 3);  // not those of the warm-up
}

TEST_CASE("version_names_the_program_and_its_commit") {
  const Run version = run({"--version"});
  CHECK(version.exit_code == 0);
  CHECK(version.out.starts_with("offload-bench 0."));
}

TEST_CASE("recorded_routing_has_every_step_and_offload_plan_replays_it") {
  const ReportFile file("");
  const Json json = run_json({"--trace-routing", file.path(), "--prompt-tokens", "40", "--chunk", "16",
                              "--decode-tokens", "3", "--repeat", "1", "--warmup", "0", "--threads", "1", "--json"});
  CHECK(json.at("rows").size() == 4);
  const RoutingTrace trace = read_trace(file.path());
  CHECK(trace.shape() == RoutingShape{8, 32, 4});
  REQUIRE(trace.steps() == 6);
  const int64_t rows[] = {16, 16, 8, 1, 1, 1};
  for (int64_t s = 0; s < 6; ++s) {
    CHECK(trace.rows(s) == rows[s]);
    CHECK(trace.phase(s) == (s < 3 ? Phase::prefill : Phase::decode));
  }
  const Run planned = run_program(OFFLOAD_PLAN, {"--machine", OFFLOAD_SOURCE_DIR "/configs/machines/rtx2080ti_x4.json",
                                                 "--model-config", OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp",
                                                 "--replay", file.path(), "--tp", "1", "--prompt-tokens", "64"});
  CAPTURE(planned.err);
  CHECK(planned.exit_code == 0);
  CHECK(planned.out.find("next lever") != std::string::npos);
}

TEST_CASE("bad_flags_are_refused_by_name_before_anything_is_measured") {
  refuses({"ops", "--op", "no_such_op"}, "no_such_op");
  refuses({"ops", "--op", "no_such_op"}, "swiglu_experts");
  refuses({"ops", "--repeat", "0"}, "--repeat is \"0\"");
  refuses({"ops", "--profile"}, "--profile");
  refuses({"ops", "--trace", "t.json"}, "--trace");
  refuses({"ops", "--trace-routing", "t"}, "--trace-routing");
  refuses({"--profile", "--trace-routing", "t"}, "--trace-routing");
  refuses({"--trace-routing", "/nonexistent/t"}, "--trace-routing /nonexistent/t: No such file");
  refuses({"--profile", "--trace", "t.json"}, "--trace");
  refuses({"--trace", "/nonexistent/t.json"}, "--trace /nonexistent/t.json");
  refuses({"ops", "--threads", "none"}, "--threads");
  refuses({"--prompt-tokens", "0"}, "--prompt-tokens is \"0\"");
  refuses({"--decode-tokens", "-1"}, "--decode-tokens is \"-1\"");
  refuses({"--warmup", "x"}, "--warmup");
  refuses({"--arms", "bf16,,bf16"}, "--arm \"\"");
  refuses({"--arms", "bf16,magic"}, "magic");
  refuses({"--prompt-tokens", "9", "--decode-tokens", "1", "--context", "9"}, "--context 9");
  refuses({"--prompt-tokens", "40000"}, "32768 positions");
  refuses({"--dry-run"}, "--dry-run");
  refuses({"--no-such-flag"}, "--no-such-flag");
  refuses({"--compare", "one.json"}, "--compare");
  refuses({"--model", kShapes + "qwen3.8-flash-next.json"}, "is a file", 1);
}

TEST_CASE("reports_that_cannot_be_compared_are_refused") {
  const std::string row = R"({"name": "a", "median_s": 1.5, "hash": "0"})";
  const ReportFile good(report("ops", row)), model(report("model", row));
  const auto refuses_text = [&](std::string_view text, std::string_view part) {
    const ReportFile bad(text);
    refuses({"--compare", good.path(), bad.path()}, part, 1);
  };
  refuses({"--compare", good.path(), "/nonexistent.json"}, "/nonexistent.json", 1);
  refuses({"--compare", good.path(), model.path()}, "different kinds", 1);
  refuses_text("", "");
  refuses_text("[]", "kind and rows");
  refuses_text(R"({"kind": "ops", "rows": 3})", "kind and rows");
  refuses_text(report("ops", "3"), "no object");
  refuses_text(report("ops", R"({"name": "a", "median_s": 0})"), "median_s");
  refuses_text(report("ops", R"({"name": "a", "median_s": "1"})"), "median_s");
  refuses_text(report("ops", R"({"median_s": 1})"), "name");
}

TEST_CASE("a_comparison_says_what_got_faster_and_what_changed_bits") {
  const ReportFile a(report("ops", R"({"name": "x", "median_s": 3, "hash": "1"}, {"name": "gone", "median_s": 1})"));
  const ReportFile b(report("ops", R"({"name": "x", "median_s": 2, "hash": "2"}, {"name": "new", "median_s": 1})"));
  const Run result = run({"--compare", a.path(), b.path()});
  CHECK(result.exit_code == 0);
  CHECK(result.out.find("1.500x  other bits") != std::string::npos);
  CHECK(result.out.find("only in " + a.path()) != std::string::npos);
  CHECK(result.out.find("only in " + b.path()) != std::string::npos);
}

TEST_CASE("a_comparison_repeats_which_report_is_not_to_be_quoted") {
  const std::string row = R"({"name": "x", "median_s": 3, "hash": "1"})";
  const auto with = [&](std::string_view quotable) {
    return fmt::format(R"({{"kind": "ops", "rows": [{}]{}}})", row, quotable);
  };
  const ReportFile good(with(R"(, "quotable": true)")), bad(with(R"(, "quotable": false)")), silent(with(""));
  const auto warnings = [&](const ReportFile& a, const ReportFile& b) {
    const Run result = run({"--compare", a.path(), b.path()});
    CHECK(result.exit_code == 0);
    std::string found;
    for (const ReportFile* file : {&a, &b})
      if (result.out.find("NOT TO BE QUOTED: " + file->path()) != std::string::npos) found += file == &a ? "a" : "b";
    return found;
  };
  CHECK(warnings(good, silent).empty());
  CHECK(warnings(bad, good) == "a");
  CHECK(warnings(good, bad) == "b");
  const Json compared = run_json({"--compare", good.path(), bad.path(), "--json"});
  CHECK(compared.at("quotable") == Json::array({true, false}));
  CHECK(run_json({"--compare", good.path(), silent.path(), "--json"}).at("quotable") == Json::array({true, nullptr}));
  const ReportFile wrong(with(R"(, "quotable": "no")"));
  refuses({"--compare", good.path(), wrong.path()}, "quotable", 1);
}

}  // namespace offload::bench_test
