// offload-run: one prompt, or a conversation, answered by a model.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>

#include "backends.h"
#include "chat.h"
#include "common.h"
#include "core/models/registry.h"
#include "core/unicode.h"
#include "logits_file.h"
#include "prompt.h"
#include "run_report.h"
#include "terminal.h"
#include "trace_file.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = "offload-run";

struct RunFlags {
  SharedFlags shared;
  PromptFlags prompt;
  std::optional<std::string> max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, logits_out;
  std::vector<std::string> stops;
  bool ignore_eos = false, greedy = false;
};

void add_flags(CLI::App& app, RunFlags& flags) {
  const auto text = [&](const char* group) {
    return [&app, group](const char* name, std::optional<std::string>& value, const char* type, const char* help) {
      add_text_option(app, name, value, type, help)->group(group);
    };
  };
  const auto prompt = text("Prompt (one of the first four; else standard input, or a chat on a terminal)");
  prompt("-p,--prompt", flags.prompt.text, "TEXT", "a user's message");
  prompt("--prompt-file", flags.prompt.file, "FILE", "a user's message, without one final newline");
  prompt("--prompt-ids", flags.prompt.ids, "1,2,3", "token ids, as they are");
  prompt("--messages", flags.prompt.messages, "FILE.json",
         "an array of messages, or an object {messages, tools, documents, chat_template_kwargs}");
  prompt("--system", flags.prompt.system, "TEXT", "the system message");
  prompt("--template-kwargs", flags.prompt.template_kwargs, "JSON",
         "variables of the chat template, as in {\"enable_thinking\": true}");
  app.add_flag("--raw", flags.prompt.raw,
               "no chat template: the text is the whole prompt, control tokens written out in it count, BOS is added "
               "where the tokenizer adds one")
      ->group("Prompt (one of the first four; else standard input, or a chat on a terminal)");

  const auto sampling = text("Answer (defaults from the model's generation_config.json)");
  sampling("--max-tokens", flags.max_tokens, "N", "length at most; default: until the context is full");
  sampling("--temperature", flags.temperature, "T", "0: greedy");
  sampling("--top-k", flags.top_k, "K", "0: off; exactly K are kept, ties to the lower id");
  sampling("--top-p", flags.top_p, "P", "1: off");
  sampling("--min-p", flags.min_p, "P", "0: off");
  sampling("--repetition-penalty", flags.repetition_penalty, "R", "1: off");
  const char* group = "Answer (defaults from the model's generation_config.json)";
  app.add_flag("--greedy", flags.greedy, "the same as --temperature 0")->group(group);
  app.add_option("--stop", flags.stops, "ends the text before this; may be repeated")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group(group);
  app.add_flag("--ignore-eos", flags.ignore_eos, "do not end at the model's end-of-text tokens")->group(group);
  text("Output")(
      "--logits-out", flags.logits_out, "FILE.safetensors",
      "logits F32 [rows, vocab] of the prompt's tokens and of each sampled one but the last, ids I32 [rows]");
  add_shared_flags(app, flags.shared);
}

GenerationOptions generation_options(const RunFlags& flags, const GenerationDefaults& defaults, uint64_t seed) {
  GenerationOptions options;
  SamplingOptions& sampling = options.sampling;
  sampling = {.temperature = defaults.do_sample ? defaults.temperature : 0,
              .top_k = defaults.top_k,
              .top_p = defaults.top_p,
              .min_p = defaults.min_p,
              .repetition_penalty = defaults.repetition_penalty,
              .seed = seed};
  if (flags.greedy && flags.temperature)
    throw_error(ErrorCode::usage, "--greedy and --temperature exclude one another; give one");
  if (flags.greedy) sampling.temperature = 0;
  const auto number = [](const char* flag, const std::optional<std::string>& text, double& value) {
    if (text) value = parse_number(flag, *text);
  };
  number("--temperature", flags.temperature, sampling.temperature);
  number("--top-p", flags.top_p, sampling.top_p);
  number("--min-p", flags.min_p, sampling.min_p);
  number("--repetition-penalty", flags.repetition_penalty, sampling.repetition_penalty);
  if (flags.top_k) sampling.top_k = parse_integer("--top-k", *flags.top_k, 0);
  options.max_tokens = defaults.max_new_tokens;
  if (flags.max_tokens) options.max_tokens = parse_integer("--max-tokens", *flags.max_tokens, 0);
  options.stop_ids = defaults.eos_ids;
  options.stop_strings = flags.stops;
  options.ignore_eos = flags.ignore_eos;
  return options;
}

struct LoadedEngine {
  std::unique_ptr<DeviceSet> devices;
  std::unique_ptr<Engine> engine;
  double load_s = 0;
};

LoadedEngine load_engine(const Settings& settings, bool plan_only) {
  const auto start = std::chrono::steady_clock::now();
  LoadedEngine loaded;
  loaded.devices = std::make_unique<DeviceSet>(settings);
  for (const std::string& line : loaded.devices->banner()) say(kProgram, line);
  for (const std::string& line : loaded.devices->warnings()) say(kProgram, fmt::format("warning: {}", line));
  LoadProgress progress(std::string(kProgram), printable(settings.model_dir, 4096));
  EngineOptions options = settings.engine_options();
  options.plan_only = plan_only;
  options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
    stop_if_interrupted();
    progress.update(done_bytes, total_bytes);
  };
  loaded.engine = std::make_unique<Engine>(options, loaded.devices->devices());
  if (!plan_only) progress.finish();
  for (const std::string& warning : loaded.engine->warnings()) say(kProgram, fmt::format("warning: {}", warning));
  loaded.load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return loaded;
}

int dry_run(const Settings& settings, bool json) {
  const LoadedEngine loaded = load_engine(settings, true);
  if (!json) {
    write_output(plan_table(settings, *loaded.engine));
    return 0;
  }
  OrderedJson document = OrderedJson::object();
  document["plan"] = plan_json(settings, *loaded.engine);
  write_output(json_text(document));
  return 0;
}

// Streams text, or ids where there is no text, and ends the last line.
class AnswerPrinter {
 public:
  AnswerPrinter(bool has_text, bool is_silent) : has_text_(has_text), is_silent_(is_silent) {}

  void text(std::string_view delta) { print(delta); }
  void token(int32_t id) {
    if (!has_text_) print(fmt::format("{}{}", last_ == '\n' ? "" : ",", id));
  }
  void finish() {
    if (last_ != '\n') print("\n");
  }

 private:
  void print(std::string_view text) {
    if (is_silent_) return;
    write_output(text);
    last_ = text.back();
  }

  bool has_text_, is_silent_;
  char last_ = '\n';
};

int answer_once(const Settings& settings, const RunFlags& flags, const TextModel& model, std::span<const int32_t> ids,
                const GenerationOptions& options, int64_t vocab) {
  std::optional<LogitsFile> logits_file;
  if (flags.logits_out) logits_file.emplace(*flags.logits_out, vocab);
  TraceFile trace(kProgram, settings.trace);
  const LoadedEngine loaded = load_engine(settings, false);
  if (flags.shared.verbose) write_error(plan_table(settings, *loaded.engine));
  Session session(*loaded.engine);
  AnswerPrinter printer(model.tokenizer() != nullptr, flags.shared.json);
  GenerationCallbacks callbacks;
  callbacks.on_text = [&](std::string_view delta) { printer.text(delta); };
  callbacks.on_token = [&](int32_t id) { printer.token(id); };
  callbacks.should_stop = interrupted;
  if (logits_file)
    callbacks.on_logits = [&](int32_t id, std::span<const float> logits) { logits_file->add(id, logits); };

  RunReport report{.result = generate(session, ids, options, model.tokenizer(), callbacks),
                   .has_text = model.tokenizer() != nullptr,
                   .load_s = loaded.load_s};
  printer.finish();
  if (flags.shared.json) write_output(json_text(run_json(report, settings, *loaded.engine)));
  say(kProgram, run_summary(report.result));
  trace.write(loaded.engine->trace());
  if (report.result.finish_reason == FinishReason::interrupted) return interrupted_exit();
  if (logits_file) logits_file->finish();
  return 0;
}

int chat_on_terminal(const Settings& settings, const RunFlags& flags, const TextModel& model,
                     const GenerationOptions& options) {
  if (flags.shared.json || flags.logits_out || flags.prompt.raw)
    throw_error(ErrorCode::usage, "{} needs a prompt: give -p, --prompt-file, --prompt-ids or --messages",
                flags.shared.json  ? "--json"
                : flags.logits_out ? "--logits-out"
                                   : "--raw");
  Conversation conversation = start_conversation(flags.prompt);
  Conversation probe = conversation;  // a model that cannot chat is refused before it is loaded
  add_message(probe, "user", "?");
  static_cast<void>(model.encode(probe));
  TraceFile trace(kProgram, settings.trace);
  const LoadedEngine loaded = load_engine(settings, false);
  if (flags.shared.verbose) write_error(plan_table(settings, *loaded.engine));
  Session session(*loaded.engine);
  try {
    chat(kProgram, session, model, std::move(conversation), {options, flags.shared.verbose});
  } catch (const Error& error) {
    if (error.code() == ErrorCode::interrupted) trace.write(loaded.engine->trace());
    throw;
  }
  trace.write(loaded.engine->trace());
  return 0;
}

int run(const RunFlags& flags) {
  const PromptSource asked = prompt_source(flags.prompt);
  if (flags.logits_out) check_output_path("--logits-out", *flags.logits_out);
  const Settings settings = settings_of(flags.shared);
  if (settings.is_bundled_demo)
    say(kProgram, fmt::format("no --model given; using the bundled demo {}", printable(settings.model_dir, 4096)));
  if (!settings.device_note.empty()) say(kProgram, settings.device_note);
  if (flags.shared.dry_run) return dry_run(settings, flags.shared.json);

  const ModelSpec spec = load_model_spec(settings.model_dir);
  const int64_t context = Engine::context_of(settings.engine_options(), spec);
  const TextModel model = TextModel::load(settings.model_dir, spec.vocab);
  const GenerationOptions options = generation_options(flags, model.defaults(), settings.seed);
  check_generation(options, model.tokenizer());
  const bool reads_stdin = asked == PromptSource::none && isatty(STDIN_FILENO) != 1;
  if (asked == PromptSource::none && !reads_stdin) return chat_on_terminal(settings, flags, model, options);

  std::string text;
  if (reads_stdin) text = read_prompt("");
  if (flags.prompt.file) text = read_prompt(*flags.prompt.file);
  if (flags.prompt.text) text = *flags.prompt.text;
  if (!is_valid_utf8(text)) say(kProgram, "warning: the prompt is no valid UTF-8; what is wrong becomes U+FFFD");
  const std::vector<int32_t> ids = prompt_ids(flags.prompt, reads_stdin ? PromptSource::text : asked, text, model);
  check_prompt(ids, context, spec.vocab);
  return answer_once(settings, flags, model, ids, options, spec.vocab);
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Answers a prompt with a mixture-of-experts model. Text goes to standard output, all else to standard "
      "error. Exit codes: 0 done, 1 failed, 2 bad usage, "
      "130 interrupted, 129 and 143 by SIGHUP and SIGTERM, 141 where its reader has gone.",
      std::string(kProgram));
  RunFlags flags;
  add_flags(app, flags);
  if (!parse_flags(app, argc, argv)) return 0;
  return run(flags);
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
