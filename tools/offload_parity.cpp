// offload-parity: whether an arm decides as plain BF16 does, and how far its logits are.
#include <CLI/CLI.hpp>
#include <filesystem>

#include "backends.h"
#include "common.h"
#include "core/models/registry.h"
#include "logits_file.h"
#include "output_file.h"
#include "parity_prompts.h"
#include "parity_report.h"
#include "parity_run.h"
#include "run_report.h"
#include "terminal.h"
#include "version.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = kParityProgram;

struct ParityFlags {
  SharedFlags shared;
  std::string arms, prompts, prompt_tokens, decode_tokens;
  std::optional<std::string> reference, evidence;
  bool oracle = false;
};

void add_flags(CLI::App& app, ParityFlags& flags) {
  const auto text = [&](const char* name, std::string& value, const char* type, const char* help) {
    app.add_option(name, value, help)->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text("--arms", flags.arms, "A,B",
       "arms to compare with the baseline, --arm; the controls are always among them; "
       "default: all of configs/arms.json");
  text("--prompts", flags.prompts, "FILE.json|zh,en,code",
       "built-in texts, or a file of texts or ids; default all "
       "three");
  text("--prompt-tokens", flags.prompt_tokens, "N", "tokens of each prompt, at most; default 512");
  text("--decode-tokens", flags.decode_tokens, "N", "tokens that the baseline decodes behind it; default 32");
  add_text_option(app, "--reference", flags.reference, "F.safetensors",
                  "logits and ids in the layout of --logits-out: these tokens in place of prompts, and the judge");
  app.add_flag("--oracle", flags.oracle, "compares each arm, and the baseline, with the arm fp32 too");
  add_text_option(app, "--evidence", flags.evidence, "DIR",
                  "writes DIR/MODEL-DEVICE-ARM.json for each arm, for configs/arms.json; needs --oracle");
  add_shared_flags(app, flags.shared);
  hide_flags(app, {"--dry-run", "--trace"});
}

Settings settings_of_arm(const ParityFlags& flags, const std::string& arm) {
  SharedFlags shared = flags.shared;
  shared.arm = arm;
  return settings_of(shared);
}

// What was asked for, then the controls that were not; never the baseline.
std::vector<Settings> arms_of(const ParityFlags& flags) {
  std::vector<std::string> names;
  if (!flags.arms.empty()) names = split_list(flags.arms);
  for (const Arm& arm : bundled_arms()) {
    const bool wanted = flags.arms.empty() || arm.status == ArmStatus::control;
    if (wanted && std::find(names.begin(), names.end(), arm.name) == names.end()) names.push_back(arm.name);
  }
  std::vector<Settings> arms;
  for (const std::string& name : names) {
    const bool known = std::any_of(arms.begin(), arms.end(), [&](const Settings& other) { return other.arm == name; });
    if (name != flags.shared.arm && !known) arms.push_back(settings_of_arm(flags, name));
  }
  return arms;
}

ParityJob job_of(const ParityFlags& flags, Settings baseline) {
  ParityJob job{.baseline = std::move(baseline), .arms = arms_of(flags), .prompts = {}};
  const ModelSpec spec = load_model_spec(job.baseline.model_dir);
  if (flags.oracle) job.oracle = settings_of_arm(flags, "fp32");
  if (flags.reference) {
    if (!flags.prompts.empty() || !flags.prompt_tokens.empty() || !flags.decode_tokens.empty() || flags.oracle)
      throw_error(ErrorCode::usage,
                  "--reference brings its own tokens and is the judge; leave --prompts, --prompt-tokens, "
                  "--decode-tokens and --oracle out");
    ReferenceLogits reference = read_logits_file("--reference", *flags.reference, spec.vocab);
    const auto rows = static_cast<int64_t>(reference.ids.size());
    job.reference = ForcedRows{std::move(reference.ids), rows, std::move(reference.logits)};
    return job;
  }
  const auto count = [](std::string_view flag, const std::string& given, std::string_view fallback, int64_t least) {
    return parse_integer(flag, given.empty() ? fallback : given, least, int64_t{1} << 30);
  };
  job.decode_tokens = count("--decode-tokens", flags.decode_tokens, "32", 0);
  const int64_t context = Engine::context_of(job.baseline.engine_options(), spec);
  if (job.decode_tokens >= context)
    throw_error(ErrorCode::usage, "--decode-tokens {} leaves no room for a prompt in a context of {}",
                job.decode_tokens, context);
  const int64_t tokens_max = count("--prompt-tokens", flags.prompt_tokens, "512", 1);
  const std::string given = flags.prompts.empty() ? std::string(kBuiltInPrompts) : flags.prompts;
  job.prompts = parity_prompts(given, std::min(tokens_max, context - job.decode_tokens), spec.vocab,
                               TextModel::load(job.baseline.model_dir, spec.vocab));
  return job;
}

// "cuda forced sm_75" -> "cuda_forced_sm_75".
std::string file_word(std::string text) {
  for (char& c : text)
    if (c == ' ' || c == '/') c = '_';
  return text;
}

void write_evidence(const std::string& folder, const ParityResult& result, const ParityContext& context) {
  std::vector<const ArmResult*> arms{&result.baseline};
  for (const ArmResult& arm : result.arms) arms.push_back(&arm);
  for (const ArmResult* arm : arms) {
    OutputFile file("--evidence",
                    fmt::format("{}/{}-{}-{}.json", folder, context.model, file_word(context.device), arm->arm));
    file.write(evidence_json(result, *arm, context).dump(2) + "\n");
    file.finish();
  }
}

void refuse_unused(const ParityFlags& flags) {
  if (flags.shared.dry_run || !flags.shared.trace.empty())
    throw_error(ErrorCode::usage, "--dry-run and --trace belong to offload-run; leave them out");
  if (flags.evidence && !flags.oracle)
    throw_error(ErrorCode::usage, "--evidence needs --oracle: a verdict rests on the oracle too");
  std::error_code error;
  if (flags.evidence && !std::filesystem::is_directory(*flags.evidence, error))
    throw_error(ErrorCode::usage, "--evidence {}: is no folder", printable(*flags.evidence, 4096));
}

// An arm whose rules begin at more rows than any prompt has computes the baseline's numbers and proves nothing.
std::vector<std::string> idle_arms(const ParityJob& job) {
  int64_t rows = job.reference ? job.reference->prompt_tokens : 0;
  for (const ParityPrompt& prompt : job.prompts) rows = std::max(rows, std::ssize(prompt.ids));
  if (job.baseline.chunk > 0) rows = std::min(rows, job.baseline.chunk);
  std::vector<std::string> idle;
  for (const Settings& arm : job.arms) {
    const auto rules = arm.arithmetic.rules.rules();
    const auto least = std::min_element(rules.begin(), rules.end(),
                                        [](const MathRule& a, const MathRule& b) { return a.rows_min < b.rows_min; });
    if (least != rules.end() && least->rows_min > rows)
      idle.push_back(fmt::format(
          "{} begins at {} rows, and no prompt computes more than {} at once: it proves nothing; give longer prompts "
          "(--prompt-tokens, --chunk)",
          arm.arm, least->rows_min, rows));
  }
  return idle;
}

int run(const ParityFlags& flags, const std::string& command) {
  refuse_unused(flags);
  Settings baseline = settings_of(flags.shared);
  if (baseline.is_bundled_demo)
    say(kProgram, fmt::format("no --model given; using the bundled demo {}", printable(baseline.model_dir, 4096)));
  if (!baseline.device_note.empty()) say(kProgram, baseline.device_note);
  std::filesystem::path folder = baseline.model_dir;
  if (!folder.has_filename()) folder = folder.parent_path();
  const ParityContext context{.command = command,
                              .commit = std::string(built_commit()),
                              .device = device_plan(baseline),
                              .instruction_set = instruction_set(baseline),
                              .model = printable(folder.filename().string(), 200),
                              .threads = baseline.threads,
                              .chunk = baseline.chunk};
  const ParityJob job = job_of(flags, std::move(baseline));
  for (const std::string& idle : idle_arms(job)) {
    if (flags.evidence) throw_error(ErrorCode::usage, "--evidence: {}", idle);
    say(kProgram, fmt::format("warning: {}", idle));
  }
  const ParityResult result = run_parity(job);
  if (flags.evidence) write_evidence(*flags.evidence, result, context);
  write_output(flags.shared.json ? json_text(parity_json(result, context)) : parity_table(result, context));
  const std::vector<std::string> broken = result.broken_promises();
  for (const std::string& line : broken) say(kProgram, line);
  return broken.empty() ? 0 : 1;
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Has the baseline (--arm, bf16) decode behind each prompt, forces these tokens on each arm and compares all "
      "logits. Exit codes: 0 done, 1 failed, or an arm marked strict can be told from the controls, 2 bad usage, "
      "130 interrupted, 129 and 143 by SIGHUP and SIGTERM, 141 where its reader has gone.",
      std::string(kProgram));
  ParityFlags flags;
  add_flags(app, flags);
  if (!parse_flags(app, argc, argv)) return 0;
  return run(flags, command_line(argc, argv));
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
