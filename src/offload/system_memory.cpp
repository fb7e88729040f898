#include "offload/system_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <string_view>

#include "core/base.h"

namespace offload {
namespace {

constexpr size_t kFileBytesMax = 1 << 20;  // /proc/self/cgroup and memory.stat have a few KiB

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  std::string text(kFileBytesMax, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad() || (in.fail() && !in.eof())) return std::nullopt;
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string_view take_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  const size_t end = std::min(line.find_first_of(" \t"), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end);
  return word;
}

// A whole decimal number from 0 on; one too large for int64 is as good as no limit.
std::optional<int64_t> parse_count(std::string_view word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (end != word.data() + word.size() || word.empty() || word.front() == '-') return std::nullopt;
  if (error == std::errc::result_out_of_range) return std::numeric_limits<int64_t>::max();
  return error == std::errc{} ? std::optional(value) : std::nullopt;
}

std::optional<int64_t> read_count(const std::string& path) {
  const auto text = read_file(path);
  if (!text) return std::nullopt;
  std::string_view rest = *text;
  std::string_view line = take_line(rest);
  return parse_count(take_word(line));
}

// The number after `key` at the start of a line.
std::optional<int64_t> field(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    std::string_view line = take_line(text);
    if (take_word(line) == key) return parse_count(take_word(line));
  }
  return std::nullopt;
}

std::optional<int64_t> kib_field(std::string_view text, std::string_view key) {
  const auto kib = field(text, key);
  if (!kib || *kib > std::numeric_limits<int64_t>::max() / 1024) return std::nullopt;
  return *kib * 1024;
}

struct Limits {
  SystemMemory& memory;
  const std::string& root;

  // The cgroup at `folder` (below the root) may hold `limit` bytes in all.
  void apply(const std::string& file, std::optional<int64_t> limit, int64_t usage, int64_t reclaimable) {
    if (!limit || *limit == std::numeric_limits<int64_t>::max()) return;
    const int64_t held = std::max<int64_t>(0, usage - std::min(usage, reclaimable));
    const int64_t left = std::max<int64_t>(0, *limit - held);
    if (left >= memory.available_bytes) return;
    memory.available_bytes = left;
    memory.decided_by = file;
  }

  void apply_v2(const std::string& folder) {
    const int64_t usage = read_count(root + folder + "/memory.current").value_or(0);
    const std::string stat = read_file(root + folder + "/memory.stat").value_or("");
    const int64_t reclaimable = field(stat, "inactive_file").value_or(0);
    for (const char* name : {"/memory.max", "/memory.high"})
      apply(folder + name, read_count(root + folder + name), usage, reclaimable);
  }

  void apply_v1(const std::string& folder) {
    const int64_t usage = read_count(root + folder + "/memory.usage_in_bytes").value_or(0);
    const std::string stat = read_file(root + folder + "/memory.stat").value_or("");
    const int64_t reclaimable = field(stat, "total_inactive_file").value_or(0);
    apply(folder + "/memory.limit_in_bytes", read_count(root + folder + "/memory.limit_in_bytes"), usage, reclaimable);
    // Also counts ancestors outside a container's view.
    apply(folder + "/memory.stat", field(stat, "hierarchical_memory_limit"), usage, reclaimable);
  }
};

bool names_memory(std::string_view controllers) {
  while (!controllers.empty()) {
    const size_t end = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, end) == "memory") return true;
    controllers.remove_prefix(std::min(end + 1, controllers.size()));
  }
  return false;
}

// Calls visit(folder) for the cgroup `path` below `mount` and all above it. A path seen from outside the container does
// not exist inside; the walk then meets only the mount, which is the container's own group.
template <typename Visit>
void walk_up(const std::string& mount, std::string path, const Visit& visit) {
  if (path.find("..") != std::string::npos) path.clear();
  while (!path.empty() && path != "/") {
    visit(mount + path);
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
  visit(mount);
}

void apply_cgroups(Limits limits, std::string_view groups) {
  while (!groups.empty()) {
    // hierarchy-id:controllers:path; v2 has id 0 and no controllers
    const std::string_view line = take_line(groups);
    const size_t first = line.find(':');
    const size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string path(line.substr(second + 1));
    if (line.substr(0, first) == "0" && controllers.empty())
      walk_up("sys/fs/cgroup", path, [&](const std::string& folder) { limits.apply_v2(folder); });
    if (names_memory(controllers))
      walk_up("sys/fs/cgroup/memory", path, [&](const std::string& folder) { limits.apply_v1(folder); });
  }
}

std::optional<int64_t> memlock_limit(std::string_view limits) {
  constexpr std::string_view kKey = "Max locked memory";
  while (!limits.empty()) {
    std::string_view line = take_line(limits);
    if (!line.starts_with(kKey)) continue;
    line.remove_prefix(kKey.size());
    return parse_count(take_word(line));  // "unlimited" is no number
  }
  return std::nullopt;
}

}  // namespace

SystemMemory read_system_memory(const std::string& root) {
  const std::string base = root.ends_with('/') ? root : root + '/';
  const std::string meminfo = read_file(base + "proc/meminfo").value_or("");
  SystemMemory memory;
  memory.decided_by = "proc/meminfo";
  std::optional<int64_t> available = kib_field(meminfo, "MemAvailable:");
  if (!available) {  // kernels before 3.14
    const auto free = kib_field(meminfo, "MemFree:"), cached = kib_field(meminfo, "Cached:");
    if (free) available = *free + std::min(cached.value_or(0), std::numeric_limits<int64_t>::max() - *free);
  }
  if (!available)
    throw_error(ErrorCode::resource,
                "{}proc/meminfo: MemAvailable is missing; say how much memory may be used with "
                "--ram-budget",
                printable(base, 4096));
  memory.available_bytes = *available;
  memory.total_bytes = kib_field(meminfo, "MemTotal:").value_or(*available);
  apply_cgroups({memory, base}, read_file(base + "proc/self/cgroup").value_or(""));
  memory.decided_by.insert(0, 1, '/');
  memory.memlock_bytes = memlock_limit(read_file(base + "proc/self/limits").value_or(""));
  return memory;
}

}  // namespace offload
