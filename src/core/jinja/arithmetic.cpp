#include "core/jinja/arithmetic.h"

#include <cmath>
#include <limits>

namespace offload::jinja {
namespace {

std::string_view symbol(BinaryOp op) {
  switch (op) {
    case BinaryOp::add:
      return "+";
    case BinaryOp::subtract:
      return "-";
    case BinaryOp::multiply:
      return "*";
    case BinaryOp::divide:
      return "/";
    case BinaryOp::floor_divide:
      return "//";
    case BinaryOp::modulo:
      return "%";
    case BinaryOp::power:
      return "**";
  }
  return "";
}

[[noreturn]] void overflow(BinaryOp op) {
  throw_error(ErrorCode::input, "the result of {} is beyond 64-bit signed", symbol(op));
}

[[noreturn]] void zero(BinaryOp op) { throw_error(ErrorCode::input, "{} by zero", symbol(op)); }

// Python rounds the quotient down and gives the remainder the divisor's sign.
Value divide_down(BinaryOp op, int64_t a, int64_t b) {
  if (b == 0) zero(op);
  if (b == -1) {
    if (op == BinaryOp::modulo) return Value::integer(0);
    if (a == std::numeric_limits<int64_t>::min()) overflow(op);
    return Value::integer(-a);
  }
  int64_t quotient = a / b;
  int64_t remainder = a % b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) {
    --quotient;
    remainder += b;
  }
  return Value::integer(op == BinaryOp::modulo ? remainder : quotient);
}

Value real_power(double base, double exponent) {
  if (base == 0 && exponent < 0) throw_error(ErrorCode::input, "zero cannot be raised to a negative power");
  if (base < 0 && std::isfinite(base) && std::isfinite(exponent) && exponent != std::floor(exponent))
    throw_error(ErrorCode::input, "a negative number to a fractional power is complex, which is not supported");
  const double result = std::pow(base, exponent);
  if (std::isinf(result) && std::isfinite(base) && std::isfinite(exponent))
    throw_error(ErrorCode::input, "the result of ** is out of range");
  return Value::real(result);
}

Value integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) return real_power(static_cast<double>(base), static_cast<double>(exponent));
  if (base == 0 || base == 1) return Value::integer(exponent == 0 ? 1 : base);
  if (base == -1) return Value::integer(exponent % 2 == 0 ? 1 : -1);
  int64_t result = 1;
  for (int64_t i = 0; i < exponent; ++i)  // ends after at most 63 rounds, by overflow
    if (__builtin_mul_overflow(result, base, &result)) overflow(BinaryOp::power);
  return Value::integer(result);
}

Value integers(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflows = false;
  switch (op) {
    case BinaryOp::add:
      overflows = __builtin_add_overflow(a, b, &result);
      break;
    case BinaryOp::subtract:
      overflows = __builtin_sub_overflow(a, b, &result);
      break;
    case BinaryOp::multiply:
      overflows = __builtin_mul_overflow(a, b, &result);
      break;
    case BinaryOp::divide:
      if (b == 0) zero(op);
      return Value::real(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::floor_divide:
    case BinaryOp::modulo:
      return divide_down(op, a, b);
    case BinaryOp::power:
      return integer_power(a, b);
  }
  if (overflows) overflow(op);
  return Value::integer(result);
}

Value reals(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::add:
      return Value::real(a + b);
    case BinaryOp::subtract:
      return Value::real(a - b);
    case BinaryOp::multiply:
      return Value::real(a * b);
    case BinaryOp::divide:
      if (b == 0) zero(op);
      return Value::real(a / b);
    case BinaryOp::floor_divide:
    case BinaryOp::modulo: {
      if (b == 0) zero(op);
      double remainder = std::fmod(a, b);
      double quotient = (a - remainder) / b;
      if (remainder != 0) {
        if ((b < 0) != (remainder < 0)) {
          remainder += b;
          quotient -= 1;
        }
      } else {
        remainder = std::copysign(0.0, b);
      }
      if (op == BinaryOp::modulo) return Value::real(remainder);
      double whole = std::floor(quotient);
      if (quotient - whole > 0.5) whole += 1;
      return Value::real(quotient == 0 ? std::copysign(0.0, a / b) : whole);
    }
    case BinaryOp::power:
      return real_power(a, b);
  }
  return {};
}

Value repeated(const Value& value, int64_t times, Heap& heap) {
  times = std::max<int64_t>(times, 0);
  if (value.is(Kind::string)) {
    const Text& text = value.as_text();
    if (!text.empty() && times > static_cast<int64_t>(kOutputBytesMax / text.size()))
      throw_error(ErrorCode::input, "the template makes a string above {} bytes", kOutputBytesMax);
    Text out;
    for (int64_t i = 0; i < times && !text.empty(); ++i) out.append(text);
    return heap.string(std::move(out));
  }
  const Sequence& sequence = value.as_sequence();
  if (!sequence.items.empty() && times > kSequenceItemsMax / static_cast<int64_t>(sequence.items.size()))
    throw_error(ErrorCode::input, "the template makes a list above {} items", kSequenceItemsMax);
  std::vector<Value> items;
  for (int64_t i = 0; i < times && !sequence.items.empty(); ++i)
    items.insert(items.end(), sequence.items.begin(), sequence.items.end());
  return Value::sequence(heap.sequence(sequence.shape, std::move(items)));
}

bool is_list_or_tuple(const Value& value) {
  return value.is(Kind::sequence) &&
         (value.as_sequence().shape == Shape::list || value.as_sequence().shape == Shape::tuple);
}

const Text* source_text(const Value& value) {
  if (value.is(Kind::string)) return &value.as_text();
  return value.is(Kind::mapping) ? value.as_mapping().source : nullptr;
}

// Strings, lists and tuples; false when + does not apply.
bool join(const Value& left, const Value& right, Heap& heap, Value& result) {
  const Text* head = source_text(left);
  const Text* tail = source_text(right);
  if (head && tail && (left.is(Kind::string) || right.is(Kind::string))) {
    Text out = *head;
    out.append(*tail);
    result = heap.string(std::move(out));
    return true;
  }
  if (is_list_or_tuple(left) && is_list_or_tuple(right) && left.as_sequence().shape == right.as_sequence().shape) {
    std::vector<Value> items = left.as_sequence().items;
    items.insert(items.end(), right.as_sequence().items.begin(), right.as_sequence().items.end());
    result = Value::sequence(heap.sequence(left.as_sequence().shape, std::move(items)));
    return true;
  }
  return false;
}

}  // namespace

Value apply_binary(BinaryOp op, const Value& left, const Value& right, Heap& heap) {
  if (left.is(Kind::undefined)) throw_undefined(left);
  if (right.is(Kind::undefined)) throw_undefined(right);
  if (left.is_integral() && right.is_integral()) return integers(op, left.as_integer(), right.as_integer());
  if (left.is_number() && right.is_number()) return reals(op, left.as_real(), right.as_real());
  Value result;
  if (op == BinaryOp::add && join(left, right, heap, result)) return result;
  if (op == BinaryOp::multiply) {
    if ((left.is(Kind::string) || is_list_or_tuple(left)) && right.is_integral())
      return repeated(left, right.as_integer(), heap);
    if ((right.is(Kind::string) || is_list_or_tuple(right)) && left.is_integral())
      return repeated(right, left.as_integer(), heap);
  }
  if (op == BinaryOp::modulo && left.is(Kind::string))
    throw_error(ErrorCode::input, "formatting a string with % is not supported; use ~");
  throw_error(ErrorCode::input, "{} does not apply to {} and {}", symbol(op), type_name(left), type_name(right));
}

Value negated(const Value& value) {
  if (value.is(Kind::undefined)) throw_undefined(value);
  if (value.is(Kind::real)) return Value::real(-value.as_real());
  if (!value.is_integral()) throw_error(ErrorCode::input, "- does not apply to {}", type_name(value));
  if (value.as_integer() == std::numeric_limits<int64_t>::min()) overflow(BinaryOp::subtract);
  return Value::integer(-value.as_integer());
}

}  // namespace offload::jinja
