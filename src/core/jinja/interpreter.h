// Renders a Program: the statements, expressions and scopes of the language.
//
// Scopes are those of the reference: a loop round and a macro call have their own, an `if` has none; a macro sees the
// scope it was defined in. An inline filter of a loop is evaluated for all items before the first round. Depth, work,
// memory and output are bounded (value.h). Does NOT know messages or prompts: see chat_template.h.
// Thread rule: a Program is shared freely; a Heap belongs to one rendering.
#ifndef OFFLOAD_CORE_JINJA_INTERPRETER_H_
#define OFFLOAD_CORE_JINJA_INTERPRETER_H_

#include <string>
#include <utility>
#include <vector>

#include "core/jinja/ast.h"
#include "core/jinja/builtins.h"
#include "core/jinja/value.h"

namespace offload::jinja {

// Statements, expressions and macro calls inside one another while rendering; as Python's recursion limit.
inline constexpr int kEvaluationDepthMax = 1000;

using Variables = std::vector<std::pair<std::string, Value>>;  // a later one of the same name wins

// Throws Error{input}: "origin: line N: what" for a fault, and for raise_exception the template's own sentence followed
// by its place.
Text render(const Program& program, const Variables& variables, Heap& heap, const Clock& clock);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_INTERPRETER_H_
