#include "offload/planner.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "child_process.h"
#include "simulation_cases.h"

namespace offload::planner_test {

namespace {

// The published model with fewer layers and experts: the same blocks, quick to simulate.
ModelSpec small_model() {
  ModelSpec spec = published_model();
  spec.layers.resize(4);
  for (LayerSpec& layer : spec.layers) {
    layer.moe.experts = 64;
    layer.moe.top_k = 4;
  }
  return spec;
}

RoutingShape shape_of(const ModelSpec& spec) {
  const MoeSpec& moe = spec.layers.front().moe;
  return {static_cast<int64_t>(spec.layers.size()), moe.experts, moe.top_k};
}

constexpr int64_t kPrompt = 1024;

const RoutingTrace& small_trace() {
  static const RoutingTrace trace = draw_planning_trace(shape_of(small_model()), kPrompt, 1);
  return trace;
}

PlanRequest small_request(int64_t world, double vram_gib = 0) {
  return {
      .world = world, .vram_bytes = std::llround(vram_gib * kGibibyte), .prompt_tokens = kPrompt, .decode_tokens = 256};
}

Plan small_plan(const Machine& machine, const PlanRequest& request) {
  return plan_serving(machine, small_model(), request, small_trace());
}

template <typename Call>
std::string refusal(ErrorCode code, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.message();
  }
  return "";
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

TEST_CASE("a_plan_fills_the_budget_with_slots_and_never_exceeds_it") {
  for (const double gib : {3.0, 3.1, 3.4, 11.0}) {
    const Plan plan = small_plan(published_machine(), small_request(4, gib));
    CHECK(plan.memory.total() <= plan.memory.budget);
    CHECK(plan.memory.slots == plan.options.policy.slots * plan.slot_bytes);
    const bool is_full = plan.memory.total() + plan.slot_bytes > plan.memory.budget;
    CHECK((is_full || plan.options.policy.slots == plan.experts_per_rank));
  }
}

TEST_CASE("more_memory_never_predicts_a_slower_request") {
  double before = 1e9;
  for (const double gib : {3.0, 3.1, 3.4, 8.0}) {
    const Plan plan = small_plan(published_machine(), small_request(4, gib));
    CHECK(plan.request_s <= before * 1.02);  // a policy is no oracle: a slot more may lose a hit
    before = plan.request_s;
  }
}

TEST_CASE("the_shard_form_follows_the_phase_that_matters") {
  // docs/simulation.md: slices win decode; whole experts win prefill where copies do not bound it.
  PlanRequest request = small_request(4, 3.1);
  request.decode_tokens = 4096;
  CHECK(small_plan(published_machine(), request).options.shard == ShardForm::slice);
  request.decode_tokens = 0;
  Machine fast_link = published_machine();
  fast_link.link.h2d_bytes_per_s *= 10;
  CHECK(small_plan(fast_link, request).options.shard == ShardForm::expert);
}

TEST_CASE("a_fast_host_takes_a_share_of_the_missed_experts_and_an_unknown_one_none") {
  Machine machine = published_machine();
  const Plan without = small_plan(machine, small_request(1, 3.5));
  CHECK(without.options.policy.host_permille == 0);
  REQUIRE(without.notes.size() >= 1);
  CHECK(contains(without.notes.front(), "host.dram_gib_s"));
  machine.host.dram_bytes_per_s = 100 * kGibibyte;
  const Plan with = small_plan(machine, small_request(1, 3.5));
  CHECK(with.options.policy.host_permille > 0);
  CHECK(with.predicted.decode.tokens_per_s() > without.predicted.decode.tokens_per_s());
}

TEST_CASE("a_machine_without_a_link_keeps_all_experts_where_they_are") {
  Machine machine = published_machine();
  machine.link = {};
  machine.device.memory_bytes = int64_t{64} << 30;
  const Plan plan = small_plan(machine, small_request(1));
  CHECK(plan.options.policy.slots == plan.experts_per_rank);
  CHECK(plan.predicted.prefill.copied_bytes == 0);
  CHECK(contains(plan.notes.front(), "no link"));
  CHECK(contains(plan_text(plan, machine, small_model(), small_request(1)), "--expert-slots 0 "));
  for (const Lever& lever : plan.levers) CHECK(lever.input != "link.h2d_gib_s");
}

TEST_CASE("levers_come_by_gain_and_name_what_bounds") {
  // Ten slots and a slow link: nothing but fewer copies or faster ones matters.
  Machine machine = published_machine();
  machine.link.h2d_bytes_per_s = 0.5 * kGibibyte;
  const Plan slow_link = small_plan(machine, small_request(1, 3.4));
  REQUIRE(slow_link.levers.size() >= 2);
  CHECK(slow_link.levers[0].input == "vram");
  CHECK(slow_link.levers[1].input == "link.h2d_gib_s");
  CHECK(slow_link.predicted.decode.bound() == SimLane::copy);
  // All resident: the link is worth nothing in decode.
  const Plan resident = small_plan(published_machine(), small_request(4, 11));
  for (const Lever& lever : resident.levers) {
    if (lever.input == "link.h2d_gib_s") CHECK(lever.decode_gain < 0.01);
    if (lever.input == "device.memory_gib_s") CHECK(lever.decode_gain > 0.01);
    CHECK(lever.input != "vram");
  }
  for (size_t i = 1; i < resident.levers.size(); ++i)
    CHECK(resident.levers[i - 1].request_gain >= resident.levers[i].request_gain);
}

TEST_CASE("the_same_request_gives_the_same_plan_and_reports_are_complete") {
  const PlanRequest request = small_request(2, 5);
  const Plan a = small_plan(published_machine(), request), b = small_plan(published_machine(), request);
  CHECK(plan_json(a, request) == plan_json(b, request));
  const std::string text = plan_text(a, published_machine(), small_model(), request);
  for (const char* part : {"--chunk", "--shard", "--expert-slots", "--cpu-experts", "prefill", "decode", "next lever"})
    CHECK(contains(text, part));
}

TEST_CASE("requests_that_nothing_can_meet_are_refused_with_the_sum") {
  const auto refused = [&](ErrorCode code, const PlanRequest& request) {
    return refusal(code, [&] { small_plan(published_machine(), request); });
  };
  const std::string sum = refused(ErrorCode::resource, small_request(4, 1));
  CHECK(contains(sum, "nothing fits: weights"));
  CHECK(contains(sum, "of 1.000 per rank"));
  CHECK(contains(refused(ErrorCode::usage, small_request(4, 12)), "has 11.00"));
  CHECK(contains(refused(ErrorCode::usage, small_request(8)), "has 4 device(s)"));
  CHECK(contains(refused(ErrorCode::usage, small_request(3)), "do not divide"));
  PlanRequest request = small_request(1);
  request.decode_tokens = int64_t{1} << 30;
  CHECK(contains(refused(ErrorCode::usage, request), "positions are needed"));
  CHECK(contains(refusal(ErrorCode::usage,
                         [&] {
                           plan_serving(published_machine(), small_model(), small_request(1),
                                        RoutingTrace(shape_of(small_model())));
                         }),
                 "the routing trace is empty"));
  CHECK(contains(
      refusal(
          ErrorCode::input,
          [&] {
            plan_serving(published_machine(), small_model(), small_request(1), draw_planning_trace({4, 32, 4}, 64, 1));
          }),
      "use a trace of this model"));
}

TEST_CASE("offload_plan_prints_a_plan_replays_traces_and_refuses_in_one_line") {
  namespace fs = std::filesystem;
  const std::string machine = OFFLOAD_SOURCE_DIR "/configs/machines/rtx2080ti_x4.json";
  const std::string model = OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp";
  const std::string folder = (fs::temp_directory_path() / fmt::format("offload_plan_{}", getpid())).string();
  fs::create_directory(folder);
  const RoutingShape shape{8, 32, 4};
  write_trace(draw_planning_trace(shape, 300, 3), folder + "/routing");
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"--machine", machine, "--model-config", model, "--tp", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(OFFLOAD_PLAN, arguments, "");
  };
  const auto replayed =
      run({"--replay", folder + "/routing", "--prompt-tokens", "300", "--json", "--trace", folder + "/trace.json"});
  REQUIRE(replayed.exit_code == 0);
  const Json json = parse_json(replayed.out, "plan");
  CHECK(json["choice"]["tp"] == 2);
  CHECK(json["predicted"]["decode"]["tok_s"].get<double>() > 0);
  CHECK(parse_json(read_text_file(folder + "/trace.json", 1 << 28), "trace")["traceEvents"].size() > 100);
  CHECK(!contains(replayed.out, "longer chunks were not tried"));
  CHECK(contains(run({"--replay", folder + "/routing", "--prompt-tokens", "301"}).out,
                 "prompts of up to 300 tokens, not 301: longer chunks were not tried"));
  const std::string text = run({"--prompt-tokens", "500"}).out;
  CHECK(contains(text, "next lever"));
  // What it advises, offload-run takes.
  std::vector<std::string> advised{"--model", model, "--dry-run", "--tp", "2"};
  for (size_t at = text.find("\n  --"); at != std::string::npos; at = text.find("\n  --", at + 1)) {
    const size_t flag = at + 3, value = text.find(' ', flag) + 1;
    advised.push_back(text.substr(flag, value - 1 - flag));
    advised.push_back(text.substr(value, text.find_first_of(" \n", value) - value));
  }
  REQUIRE(advised.size() == 5 + 2 * 7);
  const auto planned = run_program(OFFLOAD_RUN, advised, "");
  INFO(planned.err);
  CHECK(planned.exit_code == 0);
  CHECK(run_program(OFFLOAD_PLAN, {"--version"}, "").out.starts_with("offload-plan 0."));

  const auto refuses = [&](std::vector<std::string> more, int code, std::string_view part) {
    const auto result = run(std::move(more));
    INFO(result.err);
    CHECK(result.exit_code == code);
    CHECK(contains(result.err, part));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
    CHECK(result.out.empty());
  };
  CHECK(run({}).out == run({"--math", "fp16"}).out);  // the machine multiplies FP16 faster
  CHECK(run({"--math", "bf16"}).out != run({}).out);
  Json wide = parse_json(read_text_file(model + "/config.json", 1 << 20), "config.json");
  (wide.contains("text_config") ? wide["text_config"] : wide)["num_experts"] = 70000;
  const std::string wide_file = folder + "/wide.json";
  std::ofstream(wide_file) << wide.dump();
  refuses({"--model-config", wide_file}, 1, "70000 experts a layer");
  refuses({"--prompt-tokens", "1000000"}, 2, "--prompt-tokens 1000000");
  refuses({"--tp", "0"}, 2, "--tp is \"0\"");
  refuses({"--tp", "8"}, 2, "do not divide");
  refuses({"--math", "fp8"}, 2, "expected auto, bf16 or fp16");
  refuses({"--vram-budget", "nan"}, 2, "--vram-budget");
  refuses({"--machine", "/nonexistent"}, 1, "/nonexistent: No such file");
  refuses({"--machine", model + "/config.json"}, 1, "name is missing");
  refuses({"--replay", machine}, 1, "rtx2080ti_x4.json");
  // Found before anything is simulated: nothing is printed.
  refuses({"--trace", "/nonexistent/t.json"}, 2, "--trace /nonexistent/t.json: No such file");
  refuses({"--trace", folder}, 2, "exists and is no regular file");
  refuses({"--trace", ""}, 2, "--trace : the name is empty");
  refuses({"--nonsense"}, 2, "--help lists the flags");
  fs::remove_all(folder);
}

}  // namespace offload::planner_test
