#include "offload/gpu_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "core/base.h"
#include "offload/budget.h"

namespace offload {
namespace {

constexpr std::string_view kVariable = "CUDA_VISIBLE_DEVICES";

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// -1: it names none, or more than one.
int index_of(std::span<const GpuIdentity> all, std::string_view name) {
  int found = -1;
  if (name.starts_with("GPU-")) {
    for (size_t i = 0; i < all.size(); ++i) {
      if (!all[i].uuid.starts_with(name)) continue;
      if (found >= 0) return -1;
      found = static_cast<int>(i);
    }
    return found;
  }
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), found);
  const bool whole = parsed.ec == std::errc() && parsed.ptr == name.data() + name.size();
  return whole && found >= 0 && found < std::ssize(all) ? found : -1;
}

std::string variable_text(std::string_view value) {
  return fmt::format("{} is \"{}\"", kVariable, printable(value));
}

}  // namespace

std::vector<GpuIdentity> read_gpus(const std::string& root) {
  constexpr std::string_view kUuid = "GPU UUID:";
  std::vector<GpuIdentity> gpus;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/proc/driver/nvidia/gpus", error)) {
    GpuIdentity gpu{entry.path().filename().string(), ""};
    std::ifstream file(entry.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with(kUuid)) continue;
      const size_t begin = line.find_first_not_of(" \t", kUuid.size());
      if (begin != std::string::npos) gpu.uuid = line.substr(begin);
    }
    gpus.push_back(std::move(gpu));
  }
  std::sort(gpus.begin(), gpus.end(), [](const GpuIdentity& a, const GpuIdentity& b) { return a.pci < b.pci; });
  return gpus;
}

std::vector<int> visible_gpus(std::span<const GpuIdentity> all, std::optional<std::string_view> visible_devices) {
  std::vector<int> visible;
  if (!visible_devices) {
    for (int i = 0; i < std::ssize(all); ++i) visible.push_back(i);
    return visible;
  }
  for (size_t begin = 0; begin <= visible_devices->size();) {
    const size_t end = std::min(visible_devices->find(',', begin), visible_devices->size());
    const int index = index_of(all, trimmed(visible_devices->substr(begin, end - begin)));
    if (index < 0) break;
    if (std::find(visible.begin(), visible.end(), index) != visible.end()) return {};
    visible.push_back(index);
    begin = end + 1;
  }
  return visible;
}

std::string why_none_visible(std::span<const GpuIdentity> all, std::optional<std::string_view> visible_devices) {
  if (!visible_devices || all.empty() || visible_devices->find("MIG-") != std::string_view::npos) return "";
  if (!visible_gpus(all, visible_devices).empty()) return "";
  return fmt::format("{}, which leaves no GPU of this machine's {}; unset it or name some of 0 to {}",
                     variable_text(*visible_devices), all.size(), all.size() - 1);
}

std::vector<int> VisibleGpus::usable() const {
  std::vector<int> found;
  for (int gpu = 0; gpu < count(); ++gpu)
    if (is_usable(gpu)) found.push_back(gpu);
  return found;
}

std::string VisibleGpus::left_out() const {
  std::vector<std::string> names;
  for (int gpu = 0; gpu < count(); ++gpu)
    if (!is_usable(gpu)) names.push_back(fmt::format("{} (sm_{})", gpu, sms[static_cast<size_t>(gpu)]));
  if (names.empty()) return "";
  return fmt::format("GPU{} {} {} older than sm_{} and not used", names.size() == 1 ? "" : "s", fmt::join(names, ", "),
                     names.size() == 1 ? "is" : "are", sm_min);
}

std::vector<int> gpus_of_ranks(int ranks, const VisibleGpus& visible, std::span<const int> gpus,
                               std::optional<std::string_view> visible_devices) {
  const std::string origin = visible_devices ? fmt::format(" ({})", variable_text(*visible_devices)) : "";
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (gpus[i] < 0 || gpus[i] >= visible.count())
      throw_error(ErrorCode::usage, "--gpus names GPU {}, but the visible ones are 0 to {}{}", gpus[i],
                  visible.count() - 1, origin);
    if (!visible.is_usable(gpus[i]))
      throw_error(ErrorCode::usage, "--gpus names GPU {}, which is of sm_{}; sm_{} is the oldest supported", gpus[i],
                  visible.sms[static_cast<size_t>(gpus[i])], visible.sm_min);
    if (std::find(gpus.begin(), gpus.begin() + static_cast<std::ptrdiff_t>(i), gpus[i]) !=
        gpus.begin() + static_cast<std::ptrdiff_t>(i))
      throw_error(ErrorCode::usage, "--gpus names GPU {} twice; ranks are dealt over the GPUs in turn", gpus[i]);
  }
  const std::vector<int> usable = visible.usable();
  if (gpus.empty() && ranks > std::ssize(usable)) {
    const std::string left_out = visible.left_out();
    throw_error(ErrorCode::usage, "--tp {}: {} ranks asked, {} device{} visible{}{}{}; {}--device cpu needs none",
                ranks, ranks, usable.size(), usable.size() == 1 ? "" : "s", origin, left_out.empty() ? "" : ", ",
                left_out,
                usable.empty() ? "" : fmt::format("--gpus {} has ranks share a GPU, ", fmt::join(usable, ",")));
  }
  const std::span<const int> dealt = gpus.empty() ? std::span<const int>(usable) : gpus;
  std::vector<int> of_ranks;
  for (int rank = 0; rank < ranks; ++rank) of_ranks.push_back(dealt[static_cast<size_t>(rank) % dealt.size()]);
  return of_ranks;
}

std::vector<std::string> uneven_gpu_notes(std::span<const GpuTraits> of_ranks) {
  std::vector<std::string> notes;
  const auto differ = [&](auto member) {
    return std::any_of(of_ranks.begin(), of_ranks.end(),
                       [&](const GpuTraits& gpu) { return gpu.*member != of_ranks.front().*member; });
  };
  const auto list = [&](auto&& text_of) {
    std::vector<std::string> texts;
    for (const GpuTraits& gpu : of_ranks) texts.push_back(text_of(gpu));
    return fmt::format("{}", fmt::join(texts, ", "));
  };
  // A card reports a little less than its label says, and not always as little.
  constexpr double kEvenWithin = 0.05;
  const auto [least, most] =
      std::minmax_element(of_ranks.begin(), of_ranks.end(),
                          [](const GpuTraits& a, const GpuTraits& b) { return a.memory_bytes < b.memory_bytes; });
  if (static_cast<double>(least->memory_bytes) < (1 - kEvenWithin) * static_cast<double>(most->memory_bytes))
    notes.push_back(fmt::format(
        "the ranks' GPUs have {}: each gets as many expert slots as it has room for; --context and --chunk must fit "
        "the smallest",
        list([](const GpuTraits& gpu) { return bytes_text(gpu.memory_bytes); })));
  if (differ(&GpuTraits::sm))
    notes.push_back(fmt::format(
        "the ranks' GPUs are of generations {}: kernels are chosen for each; should their last bits make ranks route "
        "differently, the run ends and says so",
        list([](const GpuTraits& gpu) { return fmt::format("sm_{}", gpu.sm); })));
  return notes;
}

}  // namespace offload
