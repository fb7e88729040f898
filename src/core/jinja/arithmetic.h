// The operators + - * / // % ** and unary minus, as Python has them, on 64-bit integers.
//
// Throws Error{input} on overflow, division by zero and operands without meaning. Does NOT format strings with %.
#ifndef OFFLOAD_CORE_JINJA_ARITHMETIC_H_
#define OFFLOAD_CORE_JINJA_ARITHMETIC_H_

#include "core/jinja/ast.h"
#include "core/jinja/value.h"

namespace offload::jinja {

// A string + a mapping that was parsed from JSON text (tool-call arguments) takes that text, where the reference would
// refuse: templates that want the text and templates that want the mapping both work.
Value apply_binary(BinaryOp op, const Value& left, const Value& right, Heap& heap);
Value negated(const Value& value);

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_ARITHMETIC_H_
