// Turns the source of a template into a Program.
//
// Refuses, by name and line: call blocks, include, import, from, extends, block, filter blocks, autoescape, trans, do,
// debug and recursive loops. Nesting and size are bounded, so hostile source cannot exhaust the stack. Thread-safe.
#ifndef OFFLOAD_CORE_JINJA_PARSER_H_
#define OFFLOAD_CORE_JINJA_PARSER_H_

#include <string>
#include <string_view>

#include "core/jinja/ast.h"

namespace offload::jinja {

inline constexpr size_t kTemplateBytesMax = size_t{1} << 20;  // the largest published template has 20 KB
// Blocks in blocks plus parentheses, operators and chained calls in one another; published templates stay below 30.
inline constexpr int kNestingMax = 200;

// Throws Error{input}, "origin: line N: what".
Program parse_template(std::string_view source, std::string origin);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_PARSER_H_
