#include "parity_report.h"

#include <fmt/format.h>
#include <algorithm>

namespace offload::tools {
namespace {

OrderedJson counts_json(const LogitComparison& counts) {
  return OrderedJson::object({{"rows", counts.rows()},
                              {"rows_not_finite", counts.rows_not_finite()},
                              {"ties", counts.ties()},
                              {"flips", counts.flips()},
                              {"largest_margin", counts.largest_margin()},
                              {"max_difference", counts.max_difference()},
                              {"mean_difference", counts.mean_difference()},
                              {"mean_kl", counts.mean_kl()},
                              {"median_kl", counts.median_kl()}});
}

OrderedJson optional_counts(const std::optional<LogitComparison>& counts) {
  return counts ? counts_json(*counts) : OrderedJson();
}

OrderedJson changed_json(const LogitComparison& counts) {
  OrderedJson changed = OrderedJson::array();
  for (const ChangedDecision& decision : counts.changed())
    changed.push_back(
        OrderedJson::object({{"row", decision.row},
                             {"baseline", decision.baseline.ids},
                             {"candidate", decision.candidate.ids},
                             {"logits", OrderedJson::array({decision.baseline.logits, decision.candidate.logits})},
                             {"margin", decision.margin()},
                             {"tie", decision.is_tie}}));
  return changed;
}

OrderedJson named(const ParityResult::Prompt& prompt) {
  return OrderedJson::object(
      {{"name", prompt.name}, {"prompt_tokens", prompt.prompt_tokens}, {"decode_tokens", prompt.decode_tokens}});
}

OrderedJson status_json(const ArmResult& arm) {
  return arm.status ? OrderedJson(status_name(*arm.status)) : OrderedJson();
}

OrderedJson arm_json(const ParityResult& result, const ArmResult& arm) {
  const std::vector<int64_t> controls_flips = result.yardstick().prompt_flips;
  OrderedJson prompts = OrderedJson::array();
  for (size_t i = 0; i < arm.prompts.size(); ++i) {
    OrderedJson prompt = OrderedJson::object({{"name", result.prompts[i].name}});
    prompt.update(counts_json(arm.prompts[i].against_baseline));
    prompt["controls_flips"] = controls_flips.empty() ? OrderedJson() : OrderedJson(controls_flips[i]);
    prompt["oracle"] = optional_counts(arm.prompts[i].against_oracle);
    prompt["changed"] = changed_json(arm.prompts[i].against_baseline);
    prompts.push_back(std::move(prompt));
  }
  return OrderedJson::object({{"arm", arm.arm},
                              {"status", status_json(arm)},
                              {"rules", rules_json(arm.rules)},
                              {"total", counts_json(arm.total)},
                              {"prompts", prompts},
                              {"oracle", optional_counts(arm.oracle_total)},
                              {"strict_faults", result.faults(arm)}});
}

OrderedJson controls_json(const ParityResult& result) {
  OrderedJson arms = OrderedJson::array();
  for (const ArmResult& arm : result.arms)
    if (arm.status == ArmStatus::control) arms.push_back(arm.arm);
  const Yardstick yardstick = result.yardstick();
  return OrderedJson::object({{"arms", arms},
                              {"flips", yardstick.flips},
                              {"largest_margin", yardstick.largest_margin},
                              {"prompt_flips", yardstick.prompt_flips}});
}

// A command as its program and its flags, each with its value: lines that stay short in a file.
OrderedJson flags_json(std::string_view command) {
  OrderedJson flags = OrderedJson::array();
  while (!command.empty()) {
    const size_t end = std::min(command.find(" -", 1), command.size());
    flags.push_back(std::string(command.substr(0, end)));
    command.remove_prefix(std::min(end + 1, command.size()));
  }
  return flags;
}

std::string table_line(std::string_view name, std::string_view status, std::string_view controls,
                       const LogitComparison& counts, const std::optional<LogitComparison>& oracle) {
  std::string line =
      fmt::format("{:<20} {:<12} {:>5} {:>5} {:>5} {:>8} {:>8.4f} {:>9.4f} {:>9.2e} {:>9.2e} {:>9.2e}", name, status,
                  counts.rows(), counts.ties(), counts.flips(), controls, counts.largest_margin(),
                  counts.max_difference(), counts.mean_difference(), counts.mean_kl(), counts.median_kl());
  if (oracle)
    line += fmt::format(" | {:>5} {:>9.2e} {:>9.2e}", oracle->flips(), oracle->mean_kl(), oracle->median_kl());
  if (counts.rows_not_finite() > 0) line += fmt::format("  {} rows not finite", counts.rows_not_finite());
  return line + "\n";
}

// The most flips of a control for the lines of an arm, on all prompts and on each; "-" without a control.
std::vector<std::string> controls_column(const ParityResult& result, const Yardstick& yardstick) {
  std::vector<std::string> column(result.prompts.size() + 1, "-");
  if (yardstick.prompt_flips.empty()) return column;
  column[0] = std::to_string(yardstick.flips);
  for (size_t i = 0; i < result.prompts.size(); ++i) column[i + 1] = std::to_string(yardstick.prompt_flips[i]);
  return column;
}

std::string controls_line(const ParityResult& result, const Yardstick& yardstick) {
  if (yardstick.prompt_flips.empty()) return "No control ran: a strict arm changes no decision.\n";
  std::vector<std::string> prompts;
  for (size_t i = 0; i < result.prompts.size(); ++i)
    prompts.push_back(fmt::format("{} {}", result.prompts[i].name, yardstick.prompt_flips[i]));
  return fmt::format("A control changes up to {} decisions ({}), at a margin of up to {:.4f}.\n", yardstick.flips,
                     fmt::join(prompts, ", "), yardstick.largest_margin);
}

}  // namespace

OrderedJson parity_json(const ParityResult& result, const ParityContext& context) {
  OrderedJson prompts = OrderedJson::array(), seconds = OrderedJson::object();
  for (const ParityResult::Prompt& prompt : result.prompts) prompts.push_back(named(prompt));
  OrderedJson arms = OrderedJson::array({arm_json(result, result.baseline)});
  seconds[result.baseline.arm] = result.baseline.seconds;
  for (const ArmResult& arm : result.arms) {
    arms.push_back(arm_json(result, arm));
    seconds[arm.arm] = arm.seconds;
  }
  return OrderedJson::object({{"command", context.command},
                              {"commit", context.commit},
                              {"device", context.device},
                              {"instruction_set", context.instruction_set},
                              {"model", context.model},
                              {"threads", context.threads},
                              {"chunk", context.chunk},
                              {"prompts", prompts},
                              {"baseline", result.baseline.arm},
                              {"oracle", result.oracle ? OrderedJson(*result.oracle) : OrderedJson()},
                              {"controls", controls_json(result)},
                              {"arms", arms},
                              {"seconds", seconds}});
}

std::string parity_table(const ParityResult& result, const ParityContext& context) {
  std::string table =
      fmt::format("model    {}\ndevice   {}, {}\nprompts ", context.model, context.device, context.instruction_set);
  for (const ParityResult::Prompt& prompt : result.prompts)
    table += fmt::format(" {} {} + {}", prompt.name, prompt.prompt_tokens, prompt.decode_tokens);
  table += fmt::format("\n\n{:<20} {:<12} {:>5} {:>5} {:>5} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9}", "arm", "status",
                       "rows", "ties", "flips", "controls", "margin", "max diff", "mean diff", "mean KL", "median");
  if (result.oracle) table += fmt::format(" | {} flips, mean KL, median", *result.oracle);
  table += "\n";
  const Yardstick yardstick = result.yardstick();
  const std::vector<std::string> controls = controls_column(result, yardstick);
  const auto add = [&](const ArmResult& arm, std::string_view status) {
    table += table_line(arm.arm, status, controls[0], arm.total, arm.oracle_total);
    for (size_t i = 0; i < arm.prompts.size(); ++i)
      table += table_line("  " + result.prompts[i].name, "", controls[i + 1], arm.prompts[i].against_baseline,
                          arm.prompts[i].against_oracle);
  };
  add(result.baseline, "baseline");
  for (const ArmResult& arm : result.arms) add(arm, arm.status ? status_name(*arm.status) : "");
  table += "\n" + controls_line(result, yardstick);
  for (const ArmResult& arm : result.arms) {
    if (arm.status == ArmStatus::control) continue;
    const std::vector<std::string> faults = result.faults(arm);
    table += fmt::format("{}: {}\n", arm.arm,
                         faults.empty() ? "cannot be told from a control" : fmt::format("{}", fmt::join(faults, "; ")));
  }
  return table;
}

OrderedJson evidence_json(const ParityResult& result, const ArmResult& arm, const ParityContext& context) {
  OrderedJson prompts = OrderedJson::array(), oracle;
  for (size_t i = 0; i < arm.prompts.size(); ++i) {
    OrderedJson prompt = named(result.prompts[i]);
    prompt.update(counts_json(arm.prompts[i].against_baseline));
    prompts.push_back(std::move(prompt));
  }
  if (result.oracle) {
    const LogitComparison& baseline = *result.baseline.oracle_total;
    oracle = OrderedJson::object(
        {{"arm", *result.oracle},
         {"total", counts_json(*arm.oracle_total)},
         {"baseline", OrderedJson::object({{"mean_kl", baseline.mean_kl()}, {"median_kl", baseline.median_kl()}})}});
  }
  return OrderedJson::object({{"arm", arm.arm},
                              {"rules", rules_json(arm.rules)},
                              {"baseline", result.baseline.arm},
                              {"model", context.model},
                              {"device", context.device},
                              {"instruction_set", context.instruction_set},
                              {"command", flags_json(context.command)},
                              {"commit", context.commit},
                              {"prompts", prompts},
                              {"total", counts_json(arm.total)},
                              {"oracle", oracle},
                              {"controls", controls_json(result)},
                              {"strict_faults", result.faults(arm)}});
}

}  // namespace offload::tools
