// The rules of the tree that no compiler checks, as pure functions from a file's path and text to findings.
//
// Paths are relative to the source root, with '/'. A finding is one line: "path:line: what is wrong, and what to do".
// Does NOT read files: tidy_test.cpp walks the tree. Thread-safe: no state.
#ifndef OFFLOAD_TESTS_TIDY_RULES_H_
#define OFFLOAD_TESTS_TIDY_RULES_H_

#include <string>
#include <string_view>
#include <vector>

namespace offload::tidy {

using Findings = std::vector<std::string>;

// C++ and CUDA sources and headers, by their ending.
bool is_cpp(std::string_view path);

// `text` of the same length and lines with comments and the insides of string and character literals as blanks.
std::string code_only(std::string_view text);

// Includes go downwards only: core <- offload | cpu | cuda <- tools, from the include root src/. tools/backends.cpp
// alone names backends; tests may include everything.
Findings check_includes(std::string_view path, std::string_view text);

// Names that src/ does without: the environment, the terminal, shared ownership. The assertion in core/base.cpp prints.
Findings check_names(std::string_view path, std::string_view text);

// Every header is guarded by OFFLOAD_<PATH>_H_, where the path starts at src/, or with TOOLS or TESTS.
Findings check_guard(std::string_view path, std::string_view text);

// Files of src/ and tools/ have at most 700 lines.
Findings check_length(std::string_view path, std::string_view text);

// Lines of at most 120 characters, rows of Markdown tables aside; no tabs in C++ files; no unfinished-work markers.
Findings check_lines(std::string_view path, std::string_view text);

// No path that exists on one developer's machine only.
Findings check_machine_paths(std::string_view path, std::string_view text);

// All of the above that apply to a file of this path.
Findings check_file(std::string_view path, std::string_view text);

}  // namespace offload::tidy

#endif  // OFFLOAD_TESTS_TIDY_RULES_H_
