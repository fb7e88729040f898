// offload-probe: measures this machine and writes the file that offload-plan reads.
#include <CLI/CLI.hpp>
#include <ctime>
#include <optional>

#include "backends.h"
#include "common.h"
#include "output_file.h"
#include "terminal.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = "offload-probe";

struct ProbeFlags {
  std::optional<std::string> out;
  SharedFlags shared;  // --device, --threads and --force-sm of them
  std::string disk_file, name, pin_gib = "4";
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

int run(const ProbeFlags& flags) {
  const Settings settings = device_settings_of(flags.shared);
  if (!settings.device_note.empty()) say(kProgram, settings.device_note);
  const double pin_gib = parse_number("--pin-gib", flags.pin_gib);
  if (!(pin_gib >= 0 && pin_gib <= 65536))
    throw_error(ErrorCode::usage, "--pin-gib is \"{}\"; expected 0 to 65536", printable(flags.pin_gib));
  const ProbeOptions options{
      .name = flags.name.empty() ? fmt::format("this machine, {}, {} threads", settings.device, settings.threads)
                                 : flags.name,
      .when = fmt::format("{} by {} --device {} --threads {}", today(), kProgram, settings.device, settings.threads),
      .disk_file = flags.disk_file,
      .pin_bytes = static_cast<int64_t>(pin_gib * static_cast<double>(int64_t{1} << 30))};
  if (settings.device == "cuda")
    for (const std::string& line : describe_gpus()) say(kProgram, line);
  std::optional<OutputFile> file;
  if (flags.out) file.emplace("-o", *flags.out);
  const Machine machine = probe_machine(probe_functions(settings), options, [](std::string_view what) {
    stop_if_interrupted();
    say(kProgram, fmt::format("measuring {}", what));
  });
  const std::string text = machine_text(machine);
  parse_machine(text, "the measured machine");  // what a reader would refuse is never written
  if (!file) {
    write_output(text);
  } else {
    file->write(text);
    file->finish();
    say(kProgram, fmt::format("wrote {}; use it with offload-plan --machine", printable(file->path(), 4096)));
  }
  return 0;
}

int run_main(int argc, char** argv) {
  CLI::App app(
      "Measures this machine for some ten seconds and writes a machine file: memory, cores, disk, and with a GPU its "
      "memory, matrix products, launches, link and the pinning of host memory. Run it while the machine is idle. Exit "
      "codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.",
      std::string(kProgram));
  ProbeFlags flags;
  add_text_option(app, "-o", flags.out, "FILE.json", "the machine file; default: standard output");
  app.add_option("--device", flags.shared.device, "what to measure; auto: the GPU where there is one")
      ->type_name("auto|cpu|cuda");
  app.add_option("--threads", flags.shared.threads, "cores to use; default: all")->type_name("N");
  app.add_option("--force-sm", flags.shared.force_sm, "choose kernels as for an older GPU generation")->type_name("N");
  app.add_option("--pin-gib", flags.pin_gib, "host memory to touch and pin for a GPU; default 4; 0: none")
      ->type_name("GIB");
  app.add_option("--disk-file", flags.disk_file, "a large file on the disk to measure; default: the disk is left out")
      ->type_name("FILE");
  app.add_option("--name", flags.name, "of the machine, for reports")->type_name("TEXT");
  if (!parse_flags(app, argc, argv)) return 0;
  return run(flags);
}

}  // namespace
}  // namespace offload::tools

int main(int argc, char** argv) {
  return offload::tools::run_tool(offload::tools::kProgram, [&] { return offload::tools::run_main(argc, argv); });
}
