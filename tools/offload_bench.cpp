// offload-bench: how fast a model, or each op, runs here, beside what this machine allows at best.
#include <CLI/CLI.hpp>

#include "bench_model.h"
#include "bench_ops.h"
#include "bench_report.h"
#include "common.h"
#include "run_report.h"
#include "terminal.h"
#include "trace_file.h"
#include "version.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = kBenchProgram;
constexpr int64_t kRepeatMax = 1'000'000;

struct BenchFlags {
  SharedFlags shared;
  std::string prompt_tokens = "512", decode_tokens = "32", repeat, warmup = "1", arms, commit;
  std::vector<std::string> compare;
  std::optional<std::string> trace_routing;
  bool profile = false, cold_cache = false;
  bool runs_ops = false, runs_all_reduce = false;
  std::string op, name_glob;
};

void add_flags(CLI::App& app, BenchFlags& flags) {
  const auto text = [](CLI::App& to, const char* name, std::string& value, const char* type, const char* help) {
    to.add_option(name, value, help)->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text(app, "--prompt-tokens", flags.prompt_tokens, "N[,N...]",
       "length of the prompt, made up; several: each in turn, and decoding behind each; default 512");
  text(app, "--decode-tokens", flags.decode_tokens, "N", "tokens decoded behind it; default 32");
  text(app, "--repeat", flags.repeat, "N", "samples per arm (default 3) or op case (default 5)");
  text(app, "--warmup", flags.warmup, "N", "runs of each arm before; default 1");
  text(app, "--arms", flags.arms, "A,B,A", "arms to run in turn; the first is measured again last; default: --arm");
  text(app, "--commit", flags.commit, "HASH", "reported as the commit; default: the one this was built from");
  app.add_flag("--cold-cache", flags.cold_cache, "empty the expert slots before each prompt");
  app.add_flag("--profile", flags.profile, "time per op, in a run of its own; not for quoting");
  add_text_option(app, "--trace-routing", flags.trace_routing, "FILE",
                  "records which experts one run of the first arm chose, for offload-plan --replay");
  app.add_option("--compare", flags.compare, "two outputs of --json; runs nothing")
      ->type_name("A.json B.json")
      ->expected(2);
  add_shared_flags(app, flags.shared);
  hide_flags(app, {"--dry-run"});

  CLI::App* ops = app.add_subcommand("ops", "each op on the cases of the tests and on published shapes");
  ops->callback([&flags] { flags.runs_ops = true; });
  text(*ops, "--op", flags.op, "NAME", "this op alone");
  text(*ops, "--case", flags.name_glob, "GLOB", "cases of this name alone, as in 'published/*'");
  ops->fallthrough();
  CLI::App* all_reduce = app.add_subcommand("all-reduce", "sums over --tp ranks on GPUs, in every way that they have");
  all_reduce->callback([&flags] { flags.runs_all_reduce = true; });
  all_reduce->fallthrough();
}

BenchReport start_report(std::string_view kind, const BenchFlags& flags, const Settings& settings,
                         const std::string& command) {
  BenchReport report;
  report.kind = kind;
  report.command = command;
  report.commit = flags.commit.empty() ? built_commit() : flags.commit;
  report.instruction_set = instruction_set(settings);
  report.link = link_text(settings);
  report.threads = settings.threads;
  report.before = machine_state();
  report.roofs_before = measure_roofs(settings);
  if (!flags.shared.json) write_output(bench_head(report));
  return report;
}

int finish_report(BenchReport& report, const BenchFlags& flags, const Settings& settings) {
  report.roofs_after = measure_roofs(settings);
  report.after = machine_state();
  write_output(flags.shared.json ? json_text(bench_json(report)) : bench_foot(report));
  return 0;
}

int run_ops(const BenchFlags& flags, const std::string& command) {
  if (!flags.arms.empty() || flags.profile || flags.cold_cache || !flags.shared.trace.empty() || flags.trace_routing)
    throw_error(ErrorCode::usage, "--arms, --profile, --cold-cache, --trace and --trace-routing are for models");
  const int64_t repeat = parse_integer("--repeat", flags.repeat.empty() ? "5" : flags.repeat, 1, kRepeatMax);
  const std::vector<BenchCase> cases = chosen_cases({flags.op, flags.name_glob});
  const Settings settings = settings_of(flags.shared);
  BenchReport report = start_report("ops", flags, settings, command);
  for (const BenchCase& bench : cases) {
    report.rows.push_back(measure_case(bench, repeat, settings));
    if (!flags.shared.json) write_output(bench_line(report.rows.back(), report.roofs()) + "\n");
  }
  return finish_report(report, flags, settings);
}

int run_all_reduce(const BenchFlags& flags, const std::string& command) {
  const int64_t repeat = parse_integer("--repeat", flags.repeat.empty() ? "5" : flags.repeat, 1, kRepeatMax);
  const Settings settings = settings_of(flags.shared);
  if (flags.cold_cache) throw_error(ErrorCode::usage, "--cold-cache is for models");
  if (settings.device != "cuda" || settings.tp == 1)
    throw_error(ErrorCode::usage, "all-reduce is for ranks on GPUs: give --tp 2 or more{}",
                settings.device == "cuda" ? "" : ", on a machine that has one");
  BenchReport report = start_report("all_reduce", flags, settings, command);
  for (const AllReduceTiming& timing : measure_all_reduce(settings, repeat)) {
    // A rank's tensor is read and written once, whatever the way.
    report.rows.push_back({.name = timing.name,
                           .cost = {.bytes_read = timing.bytes, .bytes_written = timing.bytes},
                           .seconds = timing.seconds});
    if (!flags.shared.json) write_output(bench_line(report.rows.back(), report.roofs()) + "\n");
  }
  return finish_report(report, flags, settings);
}

// The arms in turn; the first also last.
std::vector<Settings> arms_of(const BenchFlags& flags) {
  std::vector<Settings> arms;
  for (const std::string& arm : split_list(flags.arms.empty() ? flags.shared.arm : flags.arms)) {
    SharedFlags shared = flags.shared;
    shared.arm = arm;
    arms.push_back(settings_of(shared));
  }
  if (arms.size() == 1 || arms.back().arm != arms.front().arm) arms.push_back(arms.front());
  return arms;
}

int profile_model(const BenchFlags& flags, const std::vector<Settings>& arms, const ModelBenchOptions& options) {
  const Roofs roofs = measure_roofs(arms.front());
  const ModelBench::Profile profile = ModelBench({arms.front()}, options).profile();
  if (flags.shared.json) {
    const OrderedJson phases = OrderedJson::array({profile.prefill.json("prefill", profile.prefill_s, roofs),
                                                   profile.decode.json("decode", profile.decode_s, roofs)});
    write_output(json_text(OrderedJson::object({{"kind", "profile"}, {"phases", phases}})));
    return 0;
  }
  write_output(profile.prefill.table("prefill", profile.prefill_s, roofs) + "\n" +
               profile.decode.table("decode", profile.decode_s, roofs));
  return 0;
}

int trace_model(const std::vector<Settings>& arms, const ModelBenchOptions& options) {
  TraceFile file(kProgram, arms.front().trace);
  ModelBench bench({arms.front()}, options);
  file.write(bench.trace().trace());
  say(kProgram, fmt::format("wrote {}; for attribution, not a speed", printable(*arms.front().trace, 4096)));
  return 0;
}

int run_model(const BenchFlags& flags, const std::string& command) {
  if (flags.profile + !flags.shared.trace.empty() + flags.trace_routing.has_value() > 1)
    throw_error(ErrorCode::usage, "--profile, --trace and --trace-routing exclude one another; give one");
  if (flags.shared.dry_run)
    throw_error(ErrorCode::usage, "--dry-run belongs to offload-run, which prints the same plan");
  std::vector<int64_t> prompt_tokens;
  for (const std::string& length : split_list(flags.prompt_tokens))
    prompt_tokens.push_back(parse_integer("--prompt-tokens", length, 1, int64_t{1} << 30));
  if (prompt_tokens.size() > 1 && (flags.profile || !flags.shared.trace.empty() || flags.trace_routing))
    throw_error(ErrorCode::usage, "--prompt-tokens {}: --profile, --trace and --trace-routing take one length",
                printable(flags.prompt_tokens));
  const ModelBenchOptions options{
      .prompt_tokens = std::move(prompt_tokens),
      .decode_tokens = parse_integer("--decode-tokens", flags.decode_tokens, 0, int64_t{1} << 30),
      .repeat = parse_integer("--repeat", flags.repeat.empty() ? "3" : flags.repeat, 1, kRepeatMax),
      .warmup = parse_integer("--warmup", flags.warmup, 0, kRepeatMax),
      .cold_cache = flags.cold_cache,
      .records_routing = flags.trace_routing.has_value()};
  const std::vector<Settings> arms = arms_of(flags);
  if (flags.cold_cache && arms.front().device == "cpu" && arms.front().expert_slots == 0)
    throw_error(ErrorCode::usage, "--cold-cache: on the CPU there is no cache without --expert-slots");
  if (arms.front().is_bundled_demo)
    say(kProgram, fmt::format("no --model given; using the bundled demo {}", printable(arms.front().model_dir, 4096)));
  if (flags.profile) return profile_model(flags, arms, options);
  if (arms.front().trace) return trace_model(arms, options);
  std::optional<OutputFile> routing;
  if (flags.trace_routing) routing.emplace("--trace-routing", *flags.trace_routing);
  ModelBench bench(arms, options);
  if (routing) {
    routing->write(serialize_trace(bench.record_routing()));
    routing->finish();
  }
  BenchReport report = start_report("model", flags, arms.front(), command);
  ModelBenchResult result = bench.run();
  report.rows = std::move(result.rows);
  report.baseline_drift = result.baseline_drift;
  report.plan = std::move(result.plan);
  if (!flags.shared.json)
    for (const BenchRow& row : report.rows) write_output(bench_line(row, report.roofs()) + "\n");
  return finish_report(report, flags, arms.front());
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Measures the speed of a model, or of single ops, beside what the memory and the FMA units of this machine "
      "allow, measured in the same run. Exit codes: 0 done, 1 failed, 2 bad usage, "
      "130 interrupted, 129 and 143 by SIGHUP and SIGTERM, 141 where its reader has gone.",
      std::string(kProgram));
  BenchFlags flags;
  add_flags(app, flags);
  if (!parse_flags(app, argc, argv)) return 0;
  if (!flags.compare.empty()) {
    const std::string &a = flags.compare[0], &b = flags.compare[1];
    write_output(flags.shared.json ? json_text(compare_json(a, b)) : compare_reports(a, b));
    return 0;
  }
  const std::string command = command_line(argc, argv);
  if (flags.runs_all_reduce) return run_all_reduce(flags, command);
  return flags.runs_ops ? run_ops(flags, command) : run_model(flags, command);
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
