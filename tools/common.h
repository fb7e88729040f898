// What all programs of this project share: their common flags, how flags become settings, and how a main ends.
//
// Flags that have no effect yet are accepted at their neutral value and refused otherwise, by name. Throws Error{usage}
// for flags; prints nothing but the one line of run_tool.
#ifndef OFFLOAD_TOOLS_COMMON_H_
#define OFFLOAD_TOOLS_COMMON_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/arm.h"
#include "core/step.h"
#include "offload/engine.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace offload::tools {

// As typed; empty: not given.
struct SharedFlags {
  std::string model, device = "auto", tp = "1", context, chunk, prefill_group, vram_budget, ram_budget, expert_slots,
                     look_ahead = "1";
  std::string gpus, shard = "auto";
  std::string arm = "bf16", cpu_experts = "auto", zero_copy_experts = "auto", threads, load_format = "auto", force_sm,
              seed = "0", trace;
  bool dry_run = false, json = false, verbose = false;
};
// An option whose value may be empty text and is then still given. `value` outlives the parse.
CLI::Option* add_text_option(CLI::App& app, const char* name, std::optional<std::string>& value, const char* type,
                             const char* help);
// `flags` outlives the parse.
void add_shared_flags(CLI::App& app, SharedFlags& flags);
// Shared flags that a program refuses with a word of its own: its help does not list them.
void hide_flags(CLI::App& app, std::initializer_list<const char*> names);

struct Settings {
  std::string model_dir;
  bool is_bundled_demo = false;  // --model was not given
  std::string device;
  std::string arm;
  bool dummy_weights = false;
  int threads = 1;
  uint64_t seed = 0;
  int64_t context = 0, chunk = 0, prefill_group = 0;  // 0: the engine's choice
  int tp = 1;
  std::vector<int> gpus = {};  // visible ones that ranks are dealt over in turn; empty: one for each rank
  ShardForm shard = ShardForm::expert;
  int64_t expert_slots = 0;                       // of each rank's cache; 0: none on the CPU, as many as fit on a GPU
  int look_ahead = 1;                             // layers
  int64_t cpu_permille = 0;                       // of the decode experts that miss it
  int64_t zero_copy_permille = 0;                 // of the same
  std::optional<int64_t> ram_budget_bytes = {};   // nothing: what the system has
  std::optional<int64_t> vram_budget_bytes = {};  // of each rank; nothing: what its device has
  std::optional<int> force_sm = {};               // plan for this generation of GPUs
  std::string device_note = {};                   // why the device is not what "auto" prefers, for a log
  std::optional<std::string> trace = {};          // the file of a time line
  Arithmetic arithmetic;

  EngineOptions engine_options() const;
};
// Of --device, --tp, --threads, --vram-budget and --force-sm alone, for a program that takes no model. Throws Error.
Settings device_settings_of(const SharedFlags& flags);
// Checks every flag, then that the model is a folder with a config.json. Throws Error.
Settings settings_of(const SharedFlags& flags);

// A file or folder of this tree, as in "models/demo-qwen4-exp": beside the build tree of this executable, else where it
// was built from.
std::string bundled_path(std::string_view name);
// The arms of configs/arms.json. Throws Error{input}.
std::vector<Arm> bundled_arms();

// "a,b,c" at its commas; one empty item for "".
std::vector<std::string> split_list(std::string_view list);
// argv as a shell would take it.
std::string command_line(int argc, char** argv);

// `text` as a whole number in [least, most]. Throws Error{usage} naming the flag, the text and the range.
int64_t parse_integer(std::string_view flag, std::string_view text, int64_t least,
                      int64_t most = std::numeric_limits<int64_t>::max());
uint64_t parse_seed(std::string_view flag, std::string_view text);
// `text` as a number, NaN and infinities included: their refusal belongs to who knows the range.
double parse_number(std::string_view flag, std::string_view text);

// Parses argv. Returns false after having printed the help or version that was asked for. Throws Error{usage}.
bool parse_flags(CLI::App& app, int argc, char** argv);

// Runs a main's body and turns what it throws into one line on standard error and an exit code.
int run_tool(std::string_view program, const std::function<int()>& body);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_COMMON_H_
