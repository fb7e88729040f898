// offload-stress: writes a checkpoint's twin, which computes the same with very different magnitudes.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "common.h"
#include "offload/range_stress.h"
#include "run_report.h"
#include "terminal.h"

namespace offload::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kProgram = "offload-stress";

struct StressFlags {
  std::string model, out, seed = "0", exponent_max = "12";
  bool json = false;
};

[[noreturn]] void refuse(std::string_view flag, const std::string& path, std::string_view why) {
  throw_error(ErrorCode::usage, "{} {}: {}", flag, printable(path, 4096), why);
}

// The folder that is filled before it takes the name of --out; gone at the end otherwise.
class PartialFolder {
 public:
  explicit PartialFolder(const std::string& out) : path_(fmt::format("{}.{}.partial", out, getpid())), out_(out) {
    std::error_code error;
    if (!fs::create_directory(path_, error)) refuse("--out", path_, error ? error.message() : "exists");
  }
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;
  ~PartialFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  void finish() {
    std::error_code error;
    fs::rename(path_, out_, error);
    if (error) refuse("--out", out_, error.message());
  }

 private:
  std::string path_, out_;
};

// The files of the folder itself; links are followed, as weights often are links.
void copy_files(const std::string& from, const std::string& to) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
    stop_if_interrupted();
    const fs::path target = fs::path(to) / entry.path().filename();
    if (!entry.is_regular_file(error)) continue;
    fs::copy_file(entry.path(), target, error);
    if (!error) fs::permissions(target, fs::perms::owner_write, fs::perm_options::add, error);
    if (error) throw_error(ErrorCode::resource, "{}: {}", printable(target.string(), 4096), error.message());
  }
  if (error) refuse("--model", from, error.message());
}

int run(const StressFlags& flags) {
  const RangeStressOptions options{
      .exponent_max = static_cast<int>(parse_integer("--exponent-max", flags.exponent_max, 0, 100)),
      .seed = parse_seed("--seed", flags.seed)};
  std::string out = flags.out;
  while (out.size() > 1 && out.ends_with('/')) out.pop_back();
  std::error_code error;
  if (out.empty()) throw_error(ErrorCode::usage, "--out is missing; give the folder to write");
  if (fs::exists(out, error)) refuse("--out", out, "exists already; give a new folder");
  const std::string model = flags.model.empty() ? bundled_path("models/demo-qwen4-exp") : flags.model;
  if (!fs::is_directory(model, error)) refuse("--model", model, "is no folder");
  if (!fs::exists(model + "/config.json", error)) refuse("--model", model, "has no config.json");
  PartialFolder folder(out);
  copy_files(model, folder.path());
  const RangeStressCounts counts =
      stress_in_place(folder.path(), options, [](const RangeStressCounts&) { stop_if_interrupted(); });
  folder.finish();
  if (flags.json)
    write_output(json_text(OrderedJson::object({{"model", printable(model, 4096)},
                                                {"out", printable(out, 4096)},
                                                {"seed", options.seed},
                                                {"exponent_max", options.exponent_max},
                                                {"channels", counts.channels},
                                                {"channels_kept", counts.channels_kept}})));
  else
    write_output(fmt::format("{}: {} channels times powers of two from 2^-{} to 2^{}, {} of them left as they were\n",
                             printable(out, 4096), counts.channels, options.exponent_max, options.exponent_max,
                             counts.channels_kept));
  return 0;
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Writes a copy of a checkpoint folder that computes the same function with very different magnitudes: BF16 gives "
      "the same bits on both, FP16 without scaling does not. Exit codes: 0 done, 1 failed, 2 bad usage, "
      "130 interrupted, 129 and 143 by SIGHUP and SIGTERM, 141 where its reader has gone.",
      std::string(kProgram));
  StressFlags flags;
  const auto text = [&](const char* name, std::string& value, const char* type, const char* help) {
    app.add_option(name, value, help)->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  text("--model", flags.model, "DIR", "checkpoint folder (safetensors, BF16); default: the bundled demo");
  text("--out", flags.out, "DIR", "folder to write; must not exist");
  text("--exponent-max", flags.exponent_max, "N", "powers of two are drawn from -N to N; default 12");
  text("--seed", flags.seed, "N", "seed of the powers of two; default 0");
  app.add_flag("--json", flags.json, "print one JSON object instead of text");
  if (!parse_flags(app, argc, argv)) return 0;
  return run(flags);
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
