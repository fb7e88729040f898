#include "tidy_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>

namespace offload::tidy {
namespace {

constexpr int64_t kLinesMax = 700;
constexpr int64_t kColumnsMax = 120;

// The layers of src/ and what each may include. A new layer is a new row.
struct Layer {
  std::string_view name;
  std::vector<std::string_view> may_include;
};

const std::vector<Layer>& layers() {
  static const std::vector<Layer> rows = {
      {"core", {"core"}},
      {"cpu", {"core", "cpu"}},
      {"cuda", {"core", "cuda"}},
      {"offload", {"core", "offload"}},
  };
  return rows;
}

bool contains(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_identifier(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

std::string at_line(std::string_view path, int64_t line, std::string_view what) {
  return fmt::format("{}:{}: {}", path, line, what);
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string_view trimmed(std::string_view line) {
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.front())) != 0) line.remove_prefix(1);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.remove_suffix(1);
  return line;
}

// Whether the ' at `at` stands within a number, as in 1'000.
bool is_digit_separator(std::string_view text, size_t at) {
  size_t start = at;
  while (start > 0 && (is_identifier(text[start - 1]) || text[start - 1] == '\'')) --start;
  return start < at && std::isdigit(static_cast<unsigned char>(text[start])) != 0;
}

// The end of the comment or literal that starts at `at`; `at` itself when none does.
size_t end_of_blank(std::string_view text, size_t at) {
  const std::string_view rest = text.substr(at);
  const auto end_of = [&](std::string_view closer, size_t from) {
    const size_t found = text.find(closer, from);
    return found == std::string_view::npos ? text.size() : found + closer.size();
  };
  if (rest.starts_with("//")) return std::min(text.find('\n', at), text.size());
  if (rest.starts_with("/*")) return end_of("*/", at + 2);
  if (rest.starts_with("R\"")) {
    const size_t open = text.find('(', at);
    if (open == std::string_view::npos) return text.size();
    return end_of(fmt::format("){}\"", text.substr(at + 2, open - at - 2)), open);
  }
  if (rest.front() != '"' && (rest.front() != '\'' || is_digit_separator(text, at))) return at;
  size_t end = at + 1;
  while (end < text.size() && text[end] != rest.front() && text[end] != '\n') end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size());
}

// The name in an #include line without its quotes or brackets, or "" for any other line.
std::string_view included_name(std::string_view line) {
  line = trimmed(line);
  if (!line.starts_with('#')) return {};
  line = trimmed(line.substr(1));
  if (!line.starts_with("include")) return {};
  line = trimmed(line.substr(7));
  if (line.size() < 2 || (line.front() != '"' && line.front() != '<')) return {};
  const size_t end = line.find(line.front() == '"' ? '"' : '>', 1);
  return end == std::string_view::npos ? std::string_view{} : line.substr(1, end - 1);
}

// Why a file of `path` may not include `name`, or "".
std::string include_fault(std::string_view path, std::string_view name, bool quoted) {
  const std::string_view target = name.substr(0, name.find('/'));
  const bool is_layer = name.find('/') != std::string_view::npos &&
                        std::any_of(layers().begin(), layers().end(), [&](const Layer& l) { return l.name == target; });
  if (name.find("..") != std::string_view::npos) return fmt::format("\"{}\" must be named from src/", name);
  if (path.starts_with("tests/") || path == "tools/backends.cpp") return "";
  if (path.starts_with("tools/")) {
    if (target != "cpu" && target != "cuda") return "";
    return fmt::format("\"{}\": only tools/backends.cpp names a backend", name);
  }
  const std::string_view below = path.substr(std::string_view("src/").size());
  const std::string_view own = below.substr(0, below.find('/'));
  for (const Layer& layer : layers()) {
    if (layer.name != own) continue;
    if (contains(layer.may_include, target) && is_layer) return "";
    if (!is_layer && !quoted) return "";
    return fmt::format("\"{}\": src/{} includes only {}, named from src/", name, own,
                       fmt::join(layer.may_include, ", "));
  }
  return fmt::format("src/{} is no layer; the layers are in tests/tidy_rules.cpp", own);
}

}  // namespace

bool is_cpp(std::string_view path) {
  return path.ends_with(".h") || path.ends_with(".cpp") || path.ends_with(".cu") || path.ends_with(".cuh");
}

std::string code_only(std::string_view text) {
  std::string code(text);
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = end_of_blank(text, at);
    if (end == at) {
      ++at;
      continue;
    }
    for (; at < end; ++at) {
      if (code[at] != '\n') code[at] = ' ';
    }
  }
  return code;
}

Findings check_includes(std::string_view path, std::string_view text) {
  Findings findings;
  const std::string code = code_only(text);
  const std::vector<std::string_view> code_lines = lines_of(code);
  const std::vector<std::string_view> lines = lines_of(text);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (!trimmed(code_lines[i]).starts_with('#')) continue;  // inside a comment or a raw string
    const std::string_view name = included_name(lines[i]);
    if (name.empty()) continue;
    const std::string fault = include_fault(path, name, lines[i].find('"') != std::string_view::npos);
    if (!fault.empty()) findings.push_back(at_line(path, static_cast<int64_t>(i) + 1, fault));
  }
  return findings;
}

Findings check_names(std::string_view path, std::string_view text) {
  struct Banned {
    std::string_view name;
    std::string_view instead;
  };
  constexpr std::string_view kPass = "pass the setting as an argument";
  constexpr std::string_view kReturn = "return it or throw; tools/ prints";
  constexpr std::string_view kOwn = "use a value, a unique_ptr or a view";
  static constexpr std::array kBanned = {
      Banned{"getenv", kPass},
      Banned{"secure_getenv", kPass},
      Banned{"environ", kPass},
      Banned{"setenv", kPass},
      Banned{"putenv", kPass},
      Banned{"printf", kReturn},
      Banned{"fprintf", kReturn},
      Banned{"vprintf", kReturn},
      Banned{"vfprintf", kReturn},
      Banned{"puts", kReturn},
      Banned{"putchar", kReturn},
      Banned{"perror", kReturn},
      Banned{"cout", kReturn},
      Banned{"cerr", kReturn},
      Banned{"clog", kReturn},
      Banned{"stdout", kReturn},
      Banned{"stderr", kReturn},
      Banned{"STDOUT_FILENO", kReturn},
      Banned{"STDERR_FILENO", kReturn},
      Banned{"shared_ptr", kOwn},
      Banned{"make_shared", kOwn},
      Banned{"weak_ptr", kOwn},
      Banned{"enable_shared_from_this", kOwn},
  };
  Findings findings;
  const std::string code = code_only(text);
  const std::string assertion = "std::fprintf(stderr";  // allowed once, where a failed assertion says so
  size_t allowed_at = path == "src/core/base.cpp" ? code.find(assertion) : std::string::npos;
  int64_t line = 1;
  for (size_t at = 0; at < code.size();) {
    if (at == allowed_at) at += assertion.size();
    if (code[at] == '\n') ++line;
    if (!is_identifier(code[at])) {
      ++at;
      continue;
    }
    const size_t start = at;
    while (at < code.size() && is_identifier(code[at])) ++at;
    const std::string_view name = std::string_view(code).substr(start, at - start);
    for (const Banned& banned : kBanned) {
      if (name == banned.name) findings.push_back(at_line(path, line, fmt::format("{}: {}", name, banned.instead)));
    }
    if (name == "print" && std::string_view(code).substr(0, start).ends_with("fmt::")) {
      findings.push_back(at_line(path, line, fmt::format("fmt::print: {}", kReturn)));
    }
  }
  return findings;
}

Findings check_guard(std::string_view path, std::string_view text) {
  std::string guard = "OFFLOAD_";
  for (const char c : path.starts_with("src/") ? path.substr(4) : path) {
    guard += is_identifier(c) ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : '_';
  }
  guard += '_';
  const std::string code = code_only(text);
  std::vector<std::string_view> code_lines;
  for (const std::string_view line : lines_of(code)) {
    if (!trimmed(line).empty()) code_lines.push_back(trimmed(line));
  }
  const bool opens =
      code_lines.size() >= 3 && code_lines[0] == "#ifndef " + guard && code_lines[1] == "#define " + guard;
  const bool closes = trimmed(text).ends_with("\n#endif  // " + guard);
  if (opens && closes) return {};
  return {at_line(path, 1, fmt::format("must be guarded by #ifndef, #define and #endif  // {}", guard))};
}

Findings check_length(std::string_view path, std::string_view text) {
  const auto lines = static_cast<int64_t>(lines_of(text).size());
  if (lines <= kLinesMax) return {};
  return {at_line(path, kLinesMax + 1, fmt::format("the file has {} lines, at most {}; split it", lines, kLinesMax))};
}

Findings check_lines(std::string_view path, std::string_view text) {
  // In halves, so that this file obeys its own rule.
  static const std::array<std::string, 2> markers = {std::string("TO") + "DO", std::string("FIX") + "ME"};
  Findings findings;
  int64_t number = 0;
  for (const std::string_view line : lines_of(text)) {
    ++number;
    // Characters, not bytes: every byte of UTF-8 but the continuing ones.
    const auto columns = std::count_if(line.begin(), line.end(),
                                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; });
    const bool table_row = path.ends_with(".md") && line.starts_with('|');
    if (columns > kColumnsMax && !table_row) {
      findings.push_back(at_line(path, number, fmt::format("{} columns, at most {}", columns, kColumnsMax)));
    }
    if (is_cpp(path) && line.find('\t') != std::string_view::npos) {
      findings.push_back(at_line(path, number, "a tab; use blanks, or \\t in a literal"));
    }
    for (const std::string& marker : markers) {
      const size_t found = line.find(marker);
      if (found == std::string_view::npos || (found > 0 && is_identifier(line[found - 1]))) continue;
      const size_t end = found + marker.size();
      if (end < line.size() && is_identifier(line[end])) continue;
      findings.push_back(at_line(path, number, marker + ": do it or state the limit in plain words"));
    }
  }
  return findings;
}

Findings check_machine_paths(std::string_view path, std::string_view text) {
  static const std::array<std::string, 3> roots = {std::string("/wo") + "rk/", std::string("/ro") + "ot/",
                                                   std::string("/tmp/bash") + "_jobs"};
  Findings findings;
  int64_t number = 0;
  for (const std::string_view line : lines_of(text)) {
    ++number;
    for (const std::string& root : roots) {
      for (size_t at = line.find(root); at != std::string_view::npos; at = line.find(root, at + 1)) {
        // "$new/root/usr" and "example.org/work/" are longer names that only end like one.
        const bool inside_a_name =
            at > 0 && (is_identifier(line[at - 1]) || line[at - 1] == '.' || line[at - 1] == '}');
        if (!inside_a_name) {
          findings.push_back(at_line(path, number, fmt::format("{} exists on one machine only", root)));
        }
      }
    }
  }
  return findings;
}

Findings check_file(std::string_view path, std::string_view text) {
  Findings findings;
  const auto add = [&](Findings more) { findings.insert(findings.end(), more.begin(), more.end()); };
  const bool in_src = path.starts_with("src/");
  const bool in_tools = path.starts_with("tools/");
  const bool is_test_input = path.starts_with("tests/data/") || path.starts_with("models/");
  add(check_machine_paths(path, text));
  if (in_src || in_tools) add(check_length(path, text));
  if (is_test_input) return findings;
  add(check_lines(path, text));
  if (!is_cpp(path)) return findings;
  if (in_src || in_tools || path.starts_with("tests/")) add(check_includes(path, text));
  if (in_src) add(check_names(path, text));
  if (path.ends_with(".h") || path.ends_with(".cuh")) add(check_guard(path, text));
  return findings;
}

}  // namespace offload::tidy
