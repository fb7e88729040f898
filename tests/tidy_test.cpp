// Holds the tree to the rules of tidy_rules.h, and shows for each rule that it bites.
#include <doctest/doctest.h>
#include <stdio.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>

#include "core/base.h"
#include "tidy_rules.h"

using namespace offload::tidy;
namespace fs = std::filesystem;

namespace {

// The project's own below the source root: beside it lie build trees, the repository and what its users write there.
constexpr std::array kProject{
    ".ci",       ".clang-format", ".gitignore", "CMakeLists.txt", "CMakePresets.json",     "LICENSE",
    "README.md", "cmake",         "configs",    "docs",           "models/demo-qwen4-exp", "src",
    "tests",     "tools"};

// Paths below the source root, with '/', sorted.
std::vector<std::string> source_files() {
  const fs::path root = OFFLOAD_SOURCE_DIR;
  std::vector<std::string> paths;
  const auto add = [&](const fs::directory_entry& entry) {
    if (entry.is_regular_file() && !entry.is_symlink())
      paths.push_back(entry.path().lexically_relative(root).generic_string());
  };
  for (const char* name : kProject) {
    const fs::directory_entry top(root / name);
    add(top);
    if (top.is_directory())
      for (const auto& entry : fs::recursive_directory_iterator(top)) add(entry);
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// The content of a text file; nothing for a binary one (a zero byte in its first 8 KiB).
std::optional<std::string> text_of(const std::string& path) {
  std::ifstream file(fs::path(OFFLOAD_SOURCE_DIR) / path, std::ios::binary);
  std::string text(8192, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.find('\0') != std::string::npos) return std::nullopt;
  text.append(std::istreambuf_iterator<char>(file), {});
  return text;
}

struct Output {
  std::string text;
  int status = -1;
};

Output run_shell(const std::string& command) {
  Output output;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) output.text.append(buffer.data(), n);
  output.status = pclose(pipe);
  return output;
}

std::string shell_quoted(const std::string& word) {
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Other versions lay out some lines differently, so only this one decides.
std::optional<std::string> clang_format_14() {
  for (const char* name : {"clang-format-14", "clang-format"}) {
    if (run_shell(std::string(name) + " --version").text.find("version 14.") != std::string::npos) return name;
  }
  return std::nullopt;
}

// The only finding's text, "" for none.
std::string only(const Findings& findings) {
  REQUIRE(findings.size() <= 1);
  return findings.empty() ? "" : findings.front();
}

std::string with_include(const char* path, const char* include) {
  return only(check_includes(path, fmt::format("int x;\n#include {}\n", include)));
}

}  // namespace

TEST_CASE("every_file_of_the_tree_obeys_the_rules") {
  const std::vector<std::string> paths = source_files();
  // The walk has found the tree, this file and the hidden folder of CI.
  for (const char* path : {"src/core/base.h", "tests/tidy_test.cpp", ".ci/run", "README.md"}) {
    CHECK_MESSAGE(std::binary_search(paths.begin(), paths.end(), path), path);
  }
  for (const std::string& path : paths) {
    CHECK_FALSE_MESSAGE((path.starts_with("build") || path.starts_with(".git/")), path);
    const std::optional<std::string> text = text_of(path);
    if (!text) continue;
    for (const std::string& finding : check_file(path, *text)) FAIL_CHECK(finding);
  }
}

TEST_CASE("sources_are_as_clang_format_14_leaves_them" * doctest::skip()) {
  const std::optional<std::string> program = clang_format_14();
  if (!program) {
    MESSAGE("skipped: clang-format 14 is not installed (Debian 12, Ubuntu 24.04: package clang-format-14)");
    return;
  }
  std::string command = "cd " + shell_quoted(OFFLOAD_SOURCE_DIR) + " && " + *program + " --dry-run -Werror";
  for (const std::string& path : source_files()) {
    if (is_cpp(path)) command += " " + shell_quoted(path);
  }
  const Output output = run_shell(command);
  INFO("run `" << *program << " -i` on the files named here");
  CHECK(output.text == "");
  CHECK(output.status == 0);
}

TEST_CASE("includes_go_downwards_only") {
  for (const char* path : {"src/core/moe.cpp", "src/cpu/ops.cpp", "src/cuda/gemm.cu", "src/offload/engine.h",
                           "tools/common.cpp", "tools/backends.cpp", "tests/ops_test.cpp"}) {
    CHECK(with_include(path, "\"core/base.h\"") == "");
    CHECK(with_include(path, "<vector>") == "");
    CHECK(with_include(path, "<nlohmann/json.hpp>") == "");
    CHECK(with_include(path, "\"../core/base.h\"").find("must be named from src/") != std::string::npos);
  }
  struct Case {
    const char* path;
    const char* include;
    bool allowed;
  };
  for (const Case& c : {
           Case{"src/core/a.h", "\"offload/engine.h\"", false},  Case{"src/core/a.h", "\"cpu/ops.h\"", false},
           Case{"src/core/a.h", "<cuda/gemm.h>", false},         Case{"src/core/a.h", "\"common.h\"", false},
           Case{"src/core/blocks/a.h", "\"blocks/b.h\"", false}, Case{"src/cpu/a.h", "\"cpu/b.h\"", true},
           Case{"src/cpu/a.h", "\"cuda/b.h\"", false},           Case{"src/cpu/a.h", "\"offload/b.h\"", false},
           Case{"src/cuda/a.cuh", "\"cuda/b.h\"", true},         Case{"src/cuda/a.cuh", "\"cpu/b.h\"", false},
           Case{"src/offload/a.h", "\"offload/b.h\"", true},     Case{"src/offload/a.h", "\"cpu/b.h\"", false},
           Case{"src/offload/a.h", "\"tools/b.h\"", false},      Case{"src/server/a.h", "\"core/b.h\"", false},
           Case{"tools/a.cpp", "\"offload/b.h\"", true},         Case{"tools/a.cpp", "\"cpu/b.h\"", false},
           Case{"tools/a.cpp", "\"cuda/b.h\"", false},           Case{"tools/backends.cpp", "\"cuda/b.h\"", true},
           Case{"tools/backends.cpp", "\"cpu/b.h\"", true},      Case{"tests/a_test.cpp", "\"cuda/b.h\"", true},
       }) {
    INFO(c.path << " " << c.include);
    CHECK((with_include(c.path, c.include) == "") == c.allowed);
  }
  CHECK(with_include("src/core/a.h", "\"cpu/ops.h\"") ==
        "src/core/a.h:2: \"cpu/ops.h\": src/core includes only core, named from src/");
  CHECK(only(check_includes("src/core/a.h", "#  include\t\"cpu/ops.h\"\n")) != "");
  CHECK(check_includes("src/core/a.h", "// #include \"cpu/ops.h\"\n/*\n#include \"cpu/ops.h\"\n*/\n").empty());
}

TEST_CASE("names_that_src_does_without_are_found_in_code_only") {
  const auto finds = [](const char* text) { return check_names("src/core/a.cpp", text).size(); };
  for (const char* text :
       {"std::getenv(\"A\")", "secure_getenv(x)", "printf(\"x\")", "std::printf(\"x\")", "std::cout << 1;",
        "std::cerr << 1;", "fmt::print(\"x\")", "puts(\"x\")", "std::shared_ptr<int> p;",
        "auto p = std::make_shared<int>(1);", "std::weak_ptr<int> p;", "fwrite(p, 1, 1, stdout)"}) {
    INFO(text);
    CHECK(finds(text) == 1);
  }
  for (const char* text :
       {"std::snprintf(p, 8, \"x\")", "// no shared_ptr", "/* getenv\n printf */", "f(\"std::cout\")",
        "R\"x(getenv(\")x\"", "int printf_count;", "table.print(1)", "'\"'; // printf\n'\"'"}) {
    INFO(text);
    CHECK(finds(text) == 0);
  }
  CHECK(only(check_names("src/core/a.cpp", "int x;\n/*\n*/ getenv")) ==
        "src/core/a.cpp:3: getenv: pass the setting as an argument");
  const char* assertion = "std::fprintf(stderr, \"bug\");";
  CHECK(check_names("src/core/base.cpp", assertion).empty());
  CHECK(check_names("src/core/base.cpp", fmt::format("{}{}", assertion, assertion)).size() == 2);
  CHECK(check_names("src/core/base.h", assertion).size() == 2);
}

TEST_CASE("comments_and_literals_are_blanked_in_place") {
  CHECK(code_only("a//b\nc") == "a   \nc");
  CHECK(code_only("a/*b\nc*/d") == "a   \n   d");
  CHECK(code_only("f(\"a\\\"//\", 'b')") == "f(       ,    )");
  CHECK(code_only("1'000'000 + u8'\"' + 2") == "1'000'000 + u8    + 2");
  CHECK(code_only("R\"x(a)\" \")x\" b") == std::string(13, ' ') + "b");
  for (const char* unfinished : {"\"abc", "'", "/*", "R\"", "R\"(", "\"\\", "//", ""}) {
    CHECK(code_only(unfinished).size() == std::string(unfinished).size());
  }
}

TEST_CASE("headers_are_guarded_by_their_path") {
  const auto guarded = [](const std::string& guard) {
    return fmt::format("// What.\n#ifndef {0}\n#define {0}\nint x;\n#endif  // {0}\n", guard);
  };
  CHECK(check_guard("src/core/base.h", guarded("OFFLOAD_CORE_BASE_H_")).empty());
  CHECK(check_guard("src/core/models/qwen4_exp.h", guarded("OFFLOAD_CORE_MODELS_QWEN4_EXP_H_")).empty());
  CHECK(check_guard("src/cuda/gemm.cuh", guarded("OFFLOAD_CUDA_GEMM_CUH_")).empty());
  CHECK(check_guard("tools/common.h", guarded("OFFLOAD_TOOLS_COMMON_H_")).empty());
  CHECK(only(check_guard("src/core/a.h", guarded("OFFLOAD_CORE_BASE_H_"))).find("OFFLOAD_CORE_A_H_") !=
        std::string::npos);
  CHECK(only(check_guard("src/core/a.h", "#pragma once\nint x;\n")) != "");
  CHECK(only(check_guard("src/core/a.h", "int y;\n" + guarded("OFFLOAD_CORE_A_H_"))) != "");
  CHECK(only(check_guard("src/core/a.h", "#ifndef OFFLOAD_CORE_A_H_\n#define OFFLOAD_CORE_A_H_\n#endif\n")) != "");
  CHECK(only(check_guard("src/core/a.h", "")) != "");
}

TEST_CASE("files_and_lines_have_a_longest_length") {
  std::string lines;
  for (int i = 0; i < 700; ++i) lines += "x\n";
  CHECK(check_length("src/core/a.h", lines).empty());
  CHECK(only(check_length("src/core/a.h", lines + "x")).find("has 701 lines") != std::string::npos);

  CHECK(check_lines("src/core/a.h", std::string(120, 'x') + "\n").empty());
  CHECK(only(check_lines("src/core/a.h", "\n" + std::string(121, 'x'))) == "src/core/a.h:2: 121 columns, at most 120");
  std::string chinese;
  for (int i = 0; i < 120; ++i) chinese += "模";
  CHECK(check_lines("README.md", chinese).empty());
  CHECK(check_lines("README.md", "|" + std::string(200, 'x')).empty());
  CHECK(only(check_lines("tools/test.sh", "|" + std::string(200, 'x'))) != "");
}

TEST_CASE("tabs_markers_and_machine_paths_are_found") {
  CHECK(only(check_lines("src/core/a.h", "a\tb")) != "");
  CHECK(check_lines("Makefile", "\ta").empty());
  const std::string marker = std::string("TO") + "DO";
  CHECK(only(check_lines("README.md", marker)) != "");
  CHECK(only(check_lines("src/core/a.h", "// " + marker + "(me): x")) != "");
  CHECK(only(check_lines("tools/a.sh", std::string("# FIX") + "ME")) != "");
  CHECK(check_lines("src/core/a.h", "x" + marker + " " + marker + "S MAS" + marker).empty());

  const std::string work = std::string("/wo") + "rk/";
  const std::string root = std::string("/ro") + "ot/";
  CHECK(only(check_machine_paths("README.md", "cd " + work + "x")) != "");
  CHECK(only(check_machine_paths("a.cpp", "\n\"" + root + "x\"")).find("a.cpp:2: ") == 0);
  CHECK(only(check_machine_paths("a.md", std::string("/tmp/bash") + "_jobs.0/1")) != "");
  CHECK(check_machine_paths("a.md", "example.org" + work + " $new" + root + " /tmp/x").empty());
  CHECK(check_machine_paths("a.md", "https://example.org" + work + " and " + work).size() == 1);
}

TEST_CASE("each_file_meets_the_rules_of_its_place") {
  const std::string long_line(200, 'x');
  CHECK(check_file("tests/data/json/a.txt", long_line).empty());
  CHECK(check_file("models/demo/tokenizer.json", long_line).empty());
  CHECK(check_file("src/core/models/a.cpp", long_line).size() == 1);
  CHECK(check_file("CMakeLists.txt", long_line).size() == 1);
  CHECK(check_file("tests/data/a.md", std::string("/wo") + "rk/").size() == 1);
  CHECK(check_file("src/core/a.cpp", "getenv").size() == 1);
  CHECK(check_file("tests/a_test.cpp", "getenv").empty());
  CHECK(check_file("src/core/a.cpp", "#include \"cpu/a.h\"\n").size() == 1);
  CHECK(check_file("tools/common.h", "int x;\n").size() == 1);
  std::string many_lines;
  for (int i = 0; i < 701; ++i) many_lines += "x\n";
  CHECK(check_file("tools/a.cpp", many_lines).size() == 1);
  CHECK(check_file("tests/a_test.cpp", many_lines).empty());
}
