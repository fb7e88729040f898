// offload-probe: measures this machine and writes the file that offload-plan reads.
#include <CLI/CLI.hpp>
#include <ctime>
#include <optional>
#include <thread>

#include "backends.h"
#include "common.h"
#include "output_file.h"
#include "terminal.h"

namespace offload::tools {
namespace {

constexpr std::string_view kProgram = "offload-probe";

struct ProbeFlags {
  std::optional<std::string> out;
  std::string threads, disk_file, name;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

int run(const ProbeFlags& flags) {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const auto threads =
      static_cast<int>(flags.threads.empty() ? cores : parse_integer("--threads", flags.threads, 1, 4096));
  const ProbeOptions options{.name = flags.name.empty() ? fmt::format("this machine, {} threads", threads) : flags.name,
                             .when = fmt::format("{} by {} --threads {}", today(), kProgram, threads),
                             .disk_file = flags.disk_file};
  for (const std::string& line : describe_gpus()) say(kProgram, line);
  std::optional<OutputFile> file;
  if (flags.out) file.emplace("-o", *flags.out);
  const Machine machine = probe_machine(host_probe(threads), options, [](std::string_view what) {
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
      "Measures this machine's memory, cores and disk for some ten seconds and writes a machine file. Run it while the "
      "machine is idle. Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted.",
      std::string(kProgram));
  ProbeFlags flags;
  add_text_option(app, "-o", flags.out, "FILE.json", "the machine file; default: standard output");
  app.add_option("--threads", flags.threads, "cores to use; default: all")->type_name("N");
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
