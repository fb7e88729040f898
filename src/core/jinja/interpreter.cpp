#include "core/jinja/interpreter.h"

#include <algorithm>

#include "core/jinja/arithmetic.h"
#include "core/jinja/format.h"

namespace offload::jinja {

// The variables of one loop round, macro call or template.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<int, Value>> variables;
  bool captured = false;  // by a macro defined inside: must outlive its block
};

namespace {

enum class Flow { next, loop_break, loop_continue };

class Interpreter {
 public:
  Interpreter(const Program& program, const Variables& variables, Heap& heap, const Clock& clock)
      : program_(program), heap_(heap), clock_(clock), globals_(program.symbols.names().size()) {
    for (size_t i = 0; i < globals_.size(); ++i) {
      const std::string& name = program.symbols.names()[i];
      for (const auto& [given, value] : variables)
        if (given == name) globals_[i] = {value, true};
      if (!globals_[i].given && is_function(name))
        globals_[i] = {heap.callable({Callable::Sort::function, name, {}, nullptr, nullptr}), true};
    }
  }

  Text run() {
    Text out;
    out_ = &out;
    scope_ = new_scope(nullptr);
    run_body(program_.body);
    return out;
  }

  int line() const { return line_; }

 private:
  struct Global {
    Value value;
    bool given = false;
  };

  class Deeper {
   public:
    explicit Deeper(Interpreter& interpreter) : depth_(interpreter.depth_) {
      if (++depth_ > kEvaluationDepthMax)
        throw_error(ErrorCode::input, "the template recurses deeper than {} levels", kEvaluationDepthMax);
      interpreter.heap_.spend(1);
    }
    ~Deeper() { --depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    int& depth_;
  };

  // --- scopes --------------------------------------------------------------------------------------------------------

  Scope* new_scope(Scope* parent) {
    Scope* scope = nullptr;
    if (free_scopes_.empty()) {
      heap_.charge(sizeof(Scope));
      scope = &scopes_.emplace_back();
    } else {
      scope = free_scopes_.back();
      free_scopes_.pop_back();
    }
    scope->parent = parent;
    return scope;
  }

  void leave(Scope* scope) {
    if (scope->captured) return;
    scope->variables.clear();
    free_scopes_.push_back(scope);
  }

  const Value* find(int symbol) const {
    for (const Scope* scope = scope_; scope; scope = scope->parent)
      for (const auto& [name, value] : scope->variables)
        if (name == symbol) return &value;
    const Global& global = globals_[static_cast<size_t>(symbol)];
    return global.given ? &global.value : nullptr;
  }

  static void put(Scope& scope, int symbol, const Value& value) {
    for (auto& [name, old] : scope.variables)
      if (name == symbol) {
        old = value;
        return;
      }
    scope.variables.emplace_back(symbol, value);
  }

  void assign(const Target& target, const Value& value, Scope& scope) {
    switch (target.sort) {
      case Target::Sort::name:
        return put(scope, target.symbol, value);
      case Target::Sort::attribute: {
        const Value* owner = find(target.symbol);
        if (!owner || !owner->is(Kind::name_space))
          throw_error(ErrorCode::input, "cannot set an attribute of {}: only a namespace takes attributes",
                      owner ? type_name(*owner) : "undefined");
        return owner->as_mapping().set(Value::string(&target.text), value, heap_);
      }
      case Target::Sort::tuple: {
        const std::vector<Value> parts = iterate(value, heap_);
        if (parts.size() != target.parts.size())
          throw_error(ErrorCode::input, "cannot unpack {} values into {} names", parts.size(), target.parts.size());
        for (size_t i = 0; i < parts.size(); ++i) assign(target.parts[i], parts[i], scope);
      }
    }
  }

  // --- statements ----------------------------------------------------------------------------------------------------

  void write(const Value& value) {
    if (value.is(Kind::string))
      out_->append(value.as_text());
    else
      out_->append(to_text(value, heap_));
    check_output();
  }

  void check_output() const {
    if (out_->size() > kOutputBytesMax)
      throw_error(ErrorCode::input, "the prompt is longer than {} bytes", kOutputBytesMax);
  }

  Flow run_body(const Body& body) {
    for (const auto& node : body)
      if (const Flow flow = run_node(*node); flow != Flow::next) return flow;
    return Flow::next;
  }

  Flow run_node(const Node& node) {
    const Deeper deeper(*this);
    line_ = node.line;
    switch (node.kind) {
      case NodeKind::text:
        out_->append(node.text);
        check_output();
        return Flow::next;
      case NodeKind::print:
        for (const ExprPtr& value : node.values) write(eval(*value));
        return Flow::next;
      case NodeKind::branch:
        for (const Branch& branch : node.branches)
          if (!branch.condition || truth(eval(*branch.condition))) return run_body(branch.body);
        return Flow::next;
      case NodeKind::loop:
        return run_loop(node);
      case NodeKind::set:
        assign(node.targets[0], eval(*node.values[0]), *scope_);
        return Flow::next;
      case NodeKind::set_block: {
        Scope* inner = new_scope(scope_);
        const Value text = captured_output(node.body, inner);
        leave(inner);
        assign(node.targets[0], text, *scope_);
        return Flow::next;
      }
      case NodeKind::macro: {
        for (Scope* scope = scope_; scope && !scope->captured; scope = scope->parent) scope->captured = true;
        const MacroNode& macro = *node.macro;
        put(*scope_, macro.symbol, heap_.callable({Callable::Sort::macro, macro.name, {}, &macro, scope_}));
        return Flow::next;
      }
      case NodeKind::with:
        return run_with(node);
      case NodeKind::loop_break:
        return Flow::loop_break;
      case NodeKind::loop_continue:
        return Flow::loop_continue;
    }
    return Flow::next;
  }

  Flow run_with(const Node& node) {
    Scope* inner = new_scope(scope_);
    for (size_t i = 0; i < node.values.size(); ++i) assign(node.targets[i], eval(*node.values[i]), *inner);
    Scope* const outer = std::exchange(scope_, inner);
    const Flow flow = run_body(node.body);
    scope_ = outer;
    leave(inner);
    return flow;
  }

  Flow run_loop(const Node& node) {
    std::vector<Value> items = iterate(eval(*node.values[0]), heap_);
    Scope* const outer = scope_;
    if (node.values.size() > 1) {
      std::vector<Value> kept;
      for (const Value& item : items) {
        scope_ = new_scope(outer);
        assign(node.targets[0], item, *scope_);
        if (truth(eval(*node.values[1]))) kept.push_back(item);
        leave(scope_);
        scope_ = outer;
      }
      items = std::move(kept);
    }
    LoopState* state = heap_.loop(std::move(items));
    Flow flow = Flow::next;
    for (size_t i = 0; i < state->items.size() && flow != Flow::loop_break; ++i) {
      heap_.spend(1);
      state->index0 = static_cast<int64_t>(i);
      scope_ = new_scope(outer);
      put(*scope_, program_.loop_symbol, Value::loop(state));
      assign(node.targets[0], state->items[i], *scope_);
      flow = run_body(node.body);
      leave(scope_);
      scope_ = outer;
    }
    if (!state->items.empty() || node.otherwise.empty()) return Flow::next;
    scope_ = new_scope(outer);
    flow = run_body(node.otherwise);
    leave(scope_);
    scope_ = outer;
    return flow;
  }

  Value captured_output(const Body& body, Scope* scope) {
    Text text;
    Text* const out = std::exchange(out_, &text);
    Scope* const outer = std::exchange(scope_, scope);
    run_body(body);
    scope_ = outer;
    out_ = out;
    return heap_.string(std::move(text));
  }

  // --- expressions ---------------------------------------------------------------------------------------------------

  Value eval(const Expr& expr) {
    const Deeper deeper(*this);
    switch (expr.kind) {
      case ExprKind::none:
        return Value::none();
      case ExprKind::boolean:
        return Value::boolean(expr.boolean);
      case ExprKind::integer:
        return Value::integer(expr.integer);
      case ExprKind::real:
        return Value::real(expr.real);
      case ExprKind::string:
        return Value::string(&expr.text);
      case ExprKind::name: {
        const Value* found = find(expr.symbol);
        return found ? *found : Value::undefined(&expr.text);
      }
      case ExprKind::logical_not:
        return Value::boolean(!truth(eval(*expr.children[0])));
      case ExprKind::logical_and: {
        const Value left = eval(*expr.children[0]);
        return truth(left) ? eval(*expr.children[1]) : left;
      }
      case ExprKind::logical_or: {
        const Value left = eval(*expr.children[0]);
        return truth(left) ? left : eval(*expr.children[1]);
      }
      case ExprKind::conditional:
        if (truth(eval(*expr.children[0]))) return eval(*expr.children[1]);
        return expr.children[2] ? eval(*expr.children[2]) : Value();
      default:
        return eval_compound(expr);
    }
  }

  Value eval_compound(const Expr& expr) {
    switch (expr.kind) {
      case ExprKind::list:
        return heap_.list(eval_children(expr));
      case ExprKind::tuple:
        return heap_.tuple(eval_children(expr));
      case ExprKind::dict: {
        const std::vector<Value> parts = eval_children(expr);
        Mapping* made = heap_.mapping();
        for (size_t i = 0; i + 1 < parts.size(); i += 2) made->set(parts[i], parts[i + 1], heap_);
        return Value::mapping(made);
      }
      case ExprKind::attribute: {
        const Value owner = eval(*expr.children[0]);
        line_ = expr.line;
        return get_attribute(owner, expr.text, heap_);
      }
      case ExprKind::item: {
        const Value owner = eval(*expr.children[0]);
        const Value key = eval(*expr.children[1]);
        line_ = expr.line;
        return get_item(owner, key, heap_);
      }
      case ExprKind::slice:
        return eval_slice(expr);
      case ExprKind::call:
        return eval_call(expr);
      case ExprKind::filter: {
        const Value input = eval(*expr.children[0]);
        const Arguments arguments = eval_arguments(expr);
        line_ = expr.line;
        return apply_filter(expr.text.bytes(), input, arguments, heap_);
      }
      case ExprKind::test: {
        const Value input = eval(*expr.children[0]);
        const Arguments arguments = eval_arguments(expr);
        line_ = expr.line;
        return Value::boolean(apply_test(expr.text.bytes(), input, arguments, heap_));
      }
      case ExprKind::negative:
        return negated(eval(*expr.children[0]));
      case ExprKind::positive: {
        const Value value = eval(*expr.children[0]);
        if (value.is(Kind::real)) return value;
        if (!value.is_integral()) throw_error(ErrorCode::input, "+ does not apply to {}", type_name(value));
        return Value::integer(value.as_integer());
      }
      case ExprKind::binary: {
        const Value left = eval(*expr.children[0]);
        const Value right = eval(*expr.children[1]);
        line_ = expr.line;
        return apply_binary(expr.op, left, right, heap_);
      }
      case ExprKind::concat:
        return heap_.string(joined(eval_children(expr), Text(), heap_));
      case ExprKind::compare:
        return eval_compare(expr);
      default:
        OFL_ASSERT(false);
    }
  }

  std::vector<Value> eval_children(const Expr& expr) {
    std::vector<Value> values;
    values.reserve(expr.children.size());
    for (const ExprPtr& child : expr.children) values.push_back(eval(*child));
    return values;
  }

  Value eval_slice(const Expr& expr) {
    const Value owner = eval(*expr.children[0]);
    Value parts[3];
    for (size_t i = 0; i < 3; ++i) parts[i] = expr.children[i + 1] ? eval(*expr.children[i + 1]) : Value::none();
    line_ = expr.line;
    return get_slice(owner, parts[0], parts[1], parts[2], heap_);
  }

  bool compare(Comparison comparison, const Value& left, const Value& right) {
    switch (comparison) {
      case Comparison::equal:
        return equal(left, right, heap_);
      case Comparison::unequal:
        return !equal(left, right, heap_);
      case Comparison::less:
        return order(left, right, heap_) == -1;
      case Comparison::less_equal: {
        const int sign = order(left, right, heap_);
        return sign == -1 || sign == 0;
      }
      case Comparison::greater:
        return order(left, right, heap_) == 1;
      case Comparison::greater_equal: {
        const int sign = order(left, right, heap_);
        return sign == 1 || sign == 0;
      }
      case Comparison::in:
        return contains(right, left, heap_);
      case Comparison::not_in:
        return !contains(right, left, heap_);
    }
    return false;
  }

  Value eval_compare(const Expr& expr) {
    Value left = eval(*expr.children[0]);
    for (size_t i = 0; i < expr.comparisons.size(); ++i) {
      const Value right = eval(*expr.children[i + 1]);
      line_ = expr.line;
      if (!compare(expr.comparisons[i], left, right)) return Value::boolean(false);
      left = right;
    }
    return Value::boolean(true);
  }

  Arguments eval_arguments(const Expr& expr) {
    Arguments arguments;
    for (const Argument& argument : expr.arguments) {
      const Value value = eval(*argument.value);
      switch (argument.sort) {
        case Argument::Sort::positional:
          arguments.positional.push_back(value);
          break;
        case Argument::Sort::named:
          arguments.named.emplace_back(argument.name, value);
          break;
        case Argument::Sort::spread_list:
          for (const Value& each : iterate(value, heap_)) arguments.positional.push_back(each);
          break;
        case Argument::Sort::spread_mapping:
          if (!value.is(Kind::mapping)) throw_error(ErrorCode::input, "** needs a mapping, found {}", type_name(value));
          for (const Mapping::Entry& entry : value.as_mapping().entries()) {
            if (!entry.key.is(Kind::string)) throw_error(ErrorCode::input, "** needs strings as keys");
            arguments.named.emplace_back(entry.key.as_text().bytes(), entry.value);
          }
          break;
      }
    }
    return arguments;
  }

  Value eval_call(const Expr& expr) {
    const Expr& callee = *expr.children[0];
    // The common case value.method(...) needs no bound method.
    if (callee.kind == ExprKind::attribute) {
      const Value owner = eval(*callee.children[0]);
      line_ = callee.line;
      if (is_method(owner, callee.text.bytes())) {
        const Arguments arguments = eval_arguments(expr);
        line_ = expr.line;
        return call_method(owner, callee.text.bytes(), arguments, heap_);
      }
      return call(get_attribute(owner, callee.text, heap_), expr);
    }
    return call(eval(callee), expr);
  }

  Value call(const Value& callee, const Expr& expr) {
    line_ = expr.line;
    if (callee.is(Kind::undefined)) throw_undefined(callee);
    if (!callee.is(Kind::callable)) throw_error(ErrorCode::input, "{} cannot be called", type_name(callee));
    const Arguments arguments = eval_arguments(expr);
    line_ = expr.line;
    const Callable& target = callee.as_callable();
    switch (target.sort) {
      case Callable::Sort::function:
        return call_function(target.name, arguments, heap_, clock_);
      case Callable::Sort::method:
        return call_method(target.self, target.name, arguments, heap_);
      case Callable::Sort::macro:
        return call_macro(target, arguments);
    }
    return {};
  }

  Value call_macro(const Callable& target, const Arguments& arguments) {
    const MacroNode& macro = *target.macro;
    const auto& parameters = macro.parameters;
    if (arguments.positional.size() > parameters.size())
      throw_error(ErrorCode::input, "the macro {} takes at most {} arguments, found {}", macro.name, parameters.size(),
                  arguments.positional.size());
    for (const auto& named : arguments.named) {
      const auto& name = named.first;
      if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.name == name; }))
        throw_error(ErrorCode::input, "the macro {} has no argument named '{}'", macro.name, printable(name, 60));
    }
    Scope* inner = new_scope(target.closure);
    Scope* const outer = std::exchange(scope_, inner);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const MacroNode::Parameter& parameter = parameters[i];
      const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                      [&](const auto& pair) { return pair.first == parameter.name; });
      const bool is_named = named != arguments.named.end();
      if (i < arguments.positional.size()) {
        if (is_named)
          throw_error(ErrorCode::input, "the macro {} got its argument '{}' twice", macro.name, parameter.name);
        put(*inner, parameter.symbol, arguments.positional[i]);
      } else if (is_named) {
        put(*inner, parameter.symbol, named->second);
      } else {
        put(*inner, parameter.symbol, parameter.fallback ? eval(*parameter.fallback) : Value());
      }
    }
    scope_ = outer;
    const Value text = captured_output(macro.body, inner);
    leave(inner);
    return text;
  }

  const Program& program_;
  Heap& heap_;
  const Clock& clock_;
  std::vector<Global> globals_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_scopes_;
  Scope* scope_ = nullptr;
  Text* out_ = nullptr;
  int depth_ = 0;
  int line_ = 1;
};

}  // namespace

Text render(const Program& program, const Variables& variables, Heap& heap, const Clock& clock) {
  Interpreter interpreter(program, variables, heap, clock);
  try {
    return interpreter.run();
  } catch (const Error& error) {
    throw error.with_context(fmt::format("{}: line {}", program.origin, interpreter.line()));
  } catch (const Raised& raised) {
    throw_error(ErrorCode::input, "{} ({}, line {})", printable(raised.sentence, 4000), program.origin,
                interpreter.line());
  }
}

}  // namespace offload::jinja
