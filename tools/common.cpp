#include "common.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <new>
#include <thread>

#include "backends.h"
#include "core/base.h"
#include "core/json.h"
#include "terminal.h"
#include "trace_file.h"
#include "version.h"

namespace offload::tools {
namespace {

constexpr int64_t kThreadsMax = 4096;
constexpr int64_t kArmsBytesMax = 1 << 20;

struct NamedArithmetic {
  std::string_view name;
  Arithmetic arithmetic;
};
constexpr int64_t kRanksMax = 64;
constexpr int64_t kGpuMost = 1023;
constexpr int64_t kSlotsMax = 1 << 24;

// What --arm names without configs/arms.json.
constexpr std::array<NamedArithmetic, 3> kArithmetics{{{kBaselineArm, {DType::bf16, Rounding::fused}},
                                                       {"bf16-reference", {DType::bf16, Rounding::reference}},
                                                       {"fp32", {DType::f32, Rounding::fused}}}};

// One of kArithmetics, or BF16 by the rules of an arm in configs/arms.json.
Arithmetic arithmetic_of(std::string_view name) {
  std::string known;
  for (const NamedArithmetic& each : kArithmetics) {
    if (each.name == name) return each.arithmetic;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", each.name);
  }
  for (const Arm& arm : bundled_arms()) {
    if (arm.name == name) return {DType::bf16, Rounding::fused, arm.rules};
    if (arm.name != kBaselineArm) known += fmt::format(", {}", arm.name);
  }
  throw_error(ErrorCode::usage, "--arm \"{}\" is unknown; the arms are {}", printable(name), known);
}

void require_choice(std::string_view flag, std::string_view value, std::initializer_list<std::string_view> choices) {
  for (const std::string_view choice : choices)
    if (value == choice) return;
  throw_error(ErrorCode::usage, "{} is \"{}\"; expected {}", flag, printable(value), fmt::join(choices, ", "));
}

int64_t parse_gib(std::string_view flag, std::string_view text) {
  const double value = parse_number(flag, text);
  if (!(value > 0 && value <= 1 << 20))
    throw_error(ErrorCode::usage, "{} is \"{}\"; expected GiB, above 0 and at most {}", flag, printable(text), 1 << 20);
  return std::max(int64_t{1}, static_cast<int64_t>(value * kGib));
}

// Which device "auto" means, and that what a device alone takes is given for one alone.
void choose_device(const SharedFlags& flags, Settings& settings) {
  require_choice("--device", flags.device, {"auto", "cpu", "cuda"});
  if (!flags.vram_budget.empty()) settings.vram_budget_bytes = parse_gib("--vram-budget", flags.vram_budget);
  if (!flags.force_sm.empty())
    settings.force_sm = static_cast<int>(parse_integer("--force-sm", flags.force_sm, 75, 999));
  for (const std::string& gpu : flags.gpus.empty() ? std::vector<std::string>() : split_list(flags.gpus))
    settings.gpus.push_back(static_cast<int>(parse_integer("--gpus", gpu, 0, kGpuMost)));
  std::string why_not = flags.device == "cpu" ? "--device is cpu" : why_no_cuda();
  settings.device = why_not.empty() ? "cuda" : "cpu";
  if (flags.device == "cuda" && !why_not.empty())
    throw_error(ErrorCode::usage, "--device cuda: {}; use --device cpu", why_not);
  if (flags.device == "auto" && !why_not.empty())
    settings.device_note = fmt::format("computing on the CPU: {}", why_not);
  if (settings.device == "cuda") return;
  for (const auto& [flag, value] :
       {std::pair{"--vram-budget", flags.vram_budget}, {"--force-sm", flags.force_sm}, {"--gpus", flags.gpus}})
    if (!value.empty()) throw_error(ErrorCode::usage, "{} is for a GPU, but {}; leave it out", flag, why_not);
}

std::string folder_of_executable() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::string() : path.parent_path().string();
}

[[noreturn]] void refuse_file(const std::string& path) {
  const std::string shown = printable(path, 4096);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw_error(ErrorCode::input, "--model {}: {}", shown, std::strerror(errno));
  std::array<char, 4> magic{};
  const ssize_t count = read(fd, magic.data(), magic.size());
  close(fd);
  const std::string_view start(magic.data(), count > 0 ? static_cast<size_t>(count) : 0);
  if (start == "GGUF")
    throw_error(ErrorCode::input, "--model {}: GGUF files are not supported yet; give a folder with safetensors",
                shown);
  if (path.ends_with(".gguf"))
    throw_error(ErrorCode::input, "--model {}: not a GGUF file: it begins with \"{}\"; fetch it again", shown,
                printable(start));
  throw_error(ErrorCode::input, "--model {}: is a file; give the folder that holds config.json and the weights", shown);
}

// A dummy needs shapes alone, so the file of a configuration will do for it.
void check_model(const std::string& path, bool dummy_weights) {
  const std::string shown = printable(path, 4096);
  struct stat status {};
  if (path.empty() || stat(path.c_str(), &status) != 0) {
    const int error = path.empty() ? ENOENT : errno;
    throw_error(ErrorCode::input, "--model {}: {}{}", shown, std::strerror(error),
                path.starts_with("~") ? "; a shell replaces ~ only at the start of a word: write --model ~/..." : "");
  }
  if (!S_ISDIR(status.st_mode)) {
    if (dummy_weights && path.ends_with(".json")) return;
    refuse_file(path);
  }
  if (path.ends_with(".json"))
    throw_error(ErrorCode::input, "--model {}: a folder must not be named like a .json file; rename it", shown);
  if (stat((path + "/config.json").c_str(), &status) != 0)
    throw_error(ErrorCode::input, "--model {}: config.json: {}; give the folder of a checkpoint", shown,
                std::strerror(errno));
}

// Share of the decode experts that miss the slots, in 1/1000. `auto` is none: see docs/policy.md.
int64_t parse_share(std::string_view flag, std::string_view text, const Settings& settings) {
  if (text == "auto") return 0;
  std::string_view percent = text;
  int64_t permille = 0;
  if (percent.ends_with('%')) {
    percent.remove_suffix(1);
    permille = 10 * parse_integer(flag, percent, 0, 100);
  } else {
    require_choice(flag, text, {"auto", "off", "a percentage as in 50%"});
  }
  if (settings.expert_slots == 0 && settings.device == "cpu")
    throw_error(ErrorCode::usage,
                "{0} {1}: without --expert-slots every expert runs where it lies, on the CPU; give --expert-slots or "
                "leave {0} out",
                flag, text);
  return permille;
}

void parse_shares(const SharedFlags& flags, Settings& settings) {
  settings.cpu_permille = parse_share("--cpu-experts", flags.cpu_experts, settings);
  settings.zero_copy_permille = parse_share("--zero-copy-experts", flags.zero_copy_experts, settings);
  if (settings.cpu_permille + settings.zero_copy_permille > 1000)
    throw_error(ErrorCode::usage, "--cpu-experts {} and --zero-copy-experts {} share what misses: at most 100% in all",
                flags.cpu_experts, flags.zero_copy_experts);
}

}  // namespace

std::string bundled_path(std::string_view name) {
  const std::string near = fmt::format("{}/../../{}", folder_of_executable(), name);
  std::error_code error;
  if (std::filesystem::exists(near, error)) {
    const auto clean = std::filesystem::canonical(near, error);
    return error ? near : clean.string();
  }
  return fmt::format("{}/{}", OFFLOAD_SOURCE_DIR, name);
}

std::vector<Arm> bundled_arms() {
  const std::string path = bundled_path("configs/arms.json");
  return parse_arms(read_text_file(path, kArmsBytesMax), printable(path, 4096));
}

CLI::Option* add_text_option(CLI::App& app, const char* name, std::optional<std::string>& value, const char* type,
                             const char* help) {
  // The library's own optional takes "" for an option that was not given.
  const auto set = [&value](const CLI::results_t& results) {
    value = results.back();
    return true;
  };
  return app.add_option(name, set, help)->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void add_shared_flags(CLI::App& app, SharedFlags& flags) {
  const auto text = [&](const char* name, std::string& value, const char* type, const char* help) {
    app.add_option(name, value, help)
        ->check([](const std::string& given) { return given.empty() ? "must not be empty" : ""; })
        ->type_name(type)
        ->group("Model and machine")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text("--model", flags.model, "DIR",
       "checkpoint folder (safetensors), or for a dummy its config.json; default: the bundled demo");
  text("--device", flags.device, "auto|cpu|cuda", "where to compute; auto: cuda where there is a GPU");
  text("--tp", flags.tp, "N", "ranks of tensor parallelism, as threads of this process; default 1");
  text("--gpus", flags.gpus, "0,2",
       "GPUs that the ranks are dealt over in turn, several on one where there are more ranks; default: one each");
  text("--context", flags.context, "N", "positions a sequence may have; default: the model's, at most 32768");
  text("--chunk", flags.chunk, "N", "prompt tokens computed at once; default: 512 on the CPU, 2048 on a GPU");
  text("--prefill-group", flags.prefill_group, "N",
       "prompt tokens that pass each layer together, in chunks, so that an expert is copied once for them; default: 4 "
       "chunks with an expert cache, else one");
  text("--vram-budget", flags.vram_budget, "GIB", "GPU memory of each rank; default: what the GPU has free");
  text("--ram-budget", flags.ram_budget, "GIB",
       "host memory to plan with, in place of what is available: a plan that needs more is refused");
  text("--expert-slots", flags.expert_slots, "N",
       "slots of each rank's expert cache; default: on a GPU as many as fit, on the CPU 0: experts run where they lie");
  text("--look-ahead", flags.look_ahead, "0|1|2",
       "layers whose experts are copied into slots ahead of them; default 1");
  text("--shard", flags.shard, "expert|slice|auto", "experts over ranks: whole, or a slice of each; auto: expert");
  text("--arm", flags.arm, "NAME", "arithmetic: bf16 (default), bf16-reference, fp32, or an arm of configs/arms.json");
  text("--cpu-experts", flags.cpu_experts, "auto|off|N%",
       "share of the experts missing from the slots in decode that the CPU computes where they lie, instead of a copy; "
       "auto: none");
  text("--zero-copy-experts", flags.zero_copy_experts, "auto|off|N%",
       "share of the same that the GPU computes with straight out of host memory, instead of a copy; auto: none");
  text("--threads", flags.threads, "N", "CPU threads; default: all cores");
  text("--load-format", flags.load_format, "auto|dummy", "dummy: weights made up from --seed; needs config.json alone");
  text("--force-sm", flags.force_sm, "N", "choose kernels as for an older GPU generation, e.g. 75 for Turing");
  text("--seed", flags.seed, "N", "seed of sampling and of dummy weights; default 0: a run repeats itself");
  text("--trace", flags.trace, "FILE.json", "writes what ran when to a trace for ui.perfetto.dev");
  app.add_flag("--dry-run", flags.dry_run, "print the memory plan and stop")->group("Model and machine");
  app.add_flag("--json", flags.json, "print one JSON object instead of text")->group("Output");
  app.add_flag("-v,--verbose", flags.verbose, "say more on standard error")->group("Output");
}

void hide_flags(CLI::App& app, std::initializer_list<const char*> names) {
  for (const char* name : names) app.get_option(name)->group("");
}

// For a rank that hangs: nothing can be destroyed behind its back.
[[noreturn]] void end_stuck_process(const std::exception_ptr& cause) {
  int code = 1;
  std::string message = "a rank failed";
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    code = exit_code(error.code());
    message = error.message();
  } catch (const std::exception& error) {
    message = error.what();
  }
  say("offload", fmt::format("error: {} (a rank hangs; the process ends)", message));
  _exit(code);
}

EngineOptions Settings::engine_options() const {
  EngineOptions options;
  options.on_stuck = end_stuck_process;
  options.model_dir = model_dir;
  options.dummy_weights = dummy_weights;
  options.seed = seed;
  options.context = context;
  options.chunk = chunk;
  options.prefill_group = prefill_group;
  options.load_threads = threads;
  options.ram_budget_bytes = ram_budget_bytes;
  options.vram_budget_bytes = vram_budget_bytes;
  options.shard = shard;
  options.cache.slots = expert_slots;
  options.cache.lookahead_layers = look_ahead;
  options.cache.host_permille = cpu_permille;
  options.cache.zero_copy_permille = zero_copy_permille;
  options.arithmetic = arithmetic;
  if (trace) options.trace_events = kTraceEvents / tp;
  return options;
}

Settings device_settings_of(const SharedFlags& flags) {
  Settings settings;
  settings.tp = static_cast<int>(parse_integer("--tp", flags.tp, 1, kRanksMax));
  choose_device(flags, settings);
  settings.threads = flags.threads.empty()
                         ? static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))
                         : static_cast<int>(parse_integer("--threads", flags.threads, 1, kThreadsMax));
  return settings;
}

Settings settings_of(const SharedFlags& flags) {
  require_choice("--load-format", flags.load_format, {"auto", "dummy"});
  Settings settings = device_settings_of(flags);
  settings.arm = flags.arm;
  settings.arithmetic = arithmetic_of(flags.arm);
  settings.dummy_weights = flags.load_format == "dummy";
  settings.seed = parse_seed("--seed", flags.seed);
  require_choice("--shard", flags.shard, {"auto", "expert", "slice"});
  if (flags.shard == "slice") settings.shard = ShardForm::slice;
  settings.look_ahead = static_cast<int>(parse_integer("--look-ahead", flags.look_ahead, 0, 2));
  if (!flags.expert_slots.empty())
    settings.expert_slots = parse_integer("--expert-slots", flags.expert_slots, 0, kSlotsMax);
  parse_shares(flags, settings);
  if (!flags.context.empty()) settings.context = parse_integer("--context", flags.context, 1);
  if (!flags.chunk.empty()) settings.chunk = parse_integer("--chunk", flags.chunk, 1);
  if (!flags.prefill_group.empty()) settings.prefill_group = parse_integer("--prefill-group", flags.prefill_group, 1);
  if (!flags.ram_budget.empty()) settings.ram_budget_bytes = parse_gib("--ram-budget", flags.ram_budget);
  if (!flags.trace.empty()) check_output_path("--trace", settings.trace.emplace(flags.trace));
  settings.is_bundled_demo = flags.model.empty();
  settings.model_dir = settings.is_bundled_demo ? bundled_path("models/demo-qwen4-exp") : flags.model;
  check_model(settings.model_dir, settings.dummy_weights);
  return settings;
}

int64_t parse_integer(std::string_view flag, std::string_view text, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && value >= least && value <= most)
    return value;
  const std::string range = most == std::numeric_limits<int64_t>::max() ? fmt::format("of at least {}", least)
                                                                        : fmt::format("from {} to {}", least, most);
  throw_error(ErrorCode::usage, "{} is \"{}\"; expected a whole number {}", flag, printable(text), range);
}

uint64_t parse_seed(std::string_view flag, std::string_view text) {
  uint64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size())
    throw_error(ErrorCode::usage, "{} is \"{}\"; expected a whole number from 0 to 2^64 - 1", flag, printable(text));
  return value;
}

double parse_number(std::string_view flag, std::string_view text) {
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size())
    throw_error(ErrorCode::usage, "{} is \"{}\"; expected a number", flag, printable(text));
  return value;
}

std::vector<std::string> split_list(std::string_view list) {
  std::vector<std::string> items;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    items.emplace_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

std::string command_line(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) {
    const std::string_view word = argv[i];
    const bool plain = !word.empty() && word.find_first_of(" \t\n\"'\\$`*?[](){}<>|&;#~!") == std::string_view::npos;
    std::string quoted;
    for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    command += fmt::format("{}{}", i > 0 ? " " : "", plain ? std::string(word) : "'" + quoted + "'");
  }
  return command;
}

bool parse_flags(CLI::App& app, int argc, char** argv) {
  app.set_version_flag("--version", version_text(app.get_name()));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    write_output(app.help());
    return false;
  } catch (const CLI::CallForVersion& version) {
    write_output(std::string(version.what()) + "\n");
    return false;
  } catch (const CLI::ParseError& error) {
    throw_error(ErrorCode::usage, "{}; --help lists the flags", printable(error.what(), 1000));
  }
  return true;
}

int run_tool(std::string_view program, const std::function<int()>& body) {
  const auto fail = [&](std::string_view message) { say(program, fmt::format("error: {}", message)); };
  try {
    prepare_process();
    return body();
  } catch (const OutputClosed&) {
    return kClosedOutputExit;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::interrupted) {
      say(program, error.message());
      return interrupted_exit();
    }
    fail(error.message());
    return exit_code(error.code());
  } catch (const std::bad_alloc&) {
    fail("out of host memory; use a smaller --context or --chunk");
  } catch (const std::exception& error) {
    fail(printable(json_error_text(error.what()), 1000));
  }
  return 1;
}

}  // namespace offload::tools
