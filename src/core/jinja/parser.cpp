#include "core/jinja/parser.h"

#include <algorithm>
#include <initializer_list>

#include "core/base.h"
#include "core/jinja/token_cursor.h"

namespace offload::jinja {
namespace {

constexpr std::string_view kRefusedTags[] = {"call",   "include",    "import", "from", "extends", "block",
                                             "filter", "autoescape", "trans",  "do",   "debug",   "pluralize"};

class Parser : private TokenCursor {
 public:
  Parser(std::string_view source, const std::string& origin) : TokenCursor(tokenize(source, origin), origin) {
    program_.origin = origin;
    program_.loop_symbol = program_.symbols.intern("loop");
  }

  Program run() {
    program_.body = body({}, 1);
    return std::move(program_);
  }

 private:
  // Counts nesting for the life of a recursive call.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kNestingMax) parser_.fail(fmt::format("nested deeper than {} levels", kNestingMax));
    }
    ~Nested() { --parser_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    Parser& parser_;
  };

  ExprPtr make(ExprKind kind, int line) const {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    return expr;
  }
  void adopt(Expr& parent, ExprPtr child) const {
    if (child) {
      parent.depth = std::max(parent.depth, child->depth + 1);
      if (parent.depth > kNestingMax) fail(fmt::format("an expression is nested deeper than {} levels", kNestingMax));
    }
    parent.children.push_back(std::move(child));
  }
  ExprPtr unary(ExprKind kind, int line, ExprPtr child) const {
    ExprPtr expr = make(kind, line);
    adopt(*expr, std::move(child));
    return expr;
  }
  ExprPtr pair(ExprKind kind, int line, ExprPtr left, ExprPtr right) const {
    ExprPtr expr = unary(kind, line, std::move(left));
    adopt(*expr, std::move(right));
    return expr;
  }

  // --- statements ----------------------------------------------------------------------------------------------------

  // Up to one of the tags `ends` (left as the current token, behind its "{%"), or to the end when there are none;
  // the block begins at `line`.
  Body body(std::initializer_list<std::string_view> ends, int line) {
    const Nested nested(*this);
    Body nodes;
    for (;;) {
      switch (now().type) {
        case TokenType::end:
          if (ends.size() == 0) return nodes;
          throw_at(program_.origin, line,
                   fmt::format("the block that starts here has no {{% {} %}}", *(ends.end() - 1)));
        case TokenType::data: {
          auto node = make_node(NodeKind::text);
          node->text = Text(now().text, Trust::trusted);
          nodes.push_back(std::move(node));
          ++at_;
          break;
        }
        case TokenType::variable_begin: {
          auto node = make_node(NodeKind::print);
          ++at_;
          node->values.push_back(tuple(Condition::yes));
          expect(TokenType::variable_end, "'}}'");
          nodes.push_back(std::move(node));
          break;
        }
        default:
          expect(TokenType::block_begin, "a tag");
          if (is(TokenType::name) && std::find(ends.begin(), ends.end(), now().text) != ends.end()) return nodes;
          statement(nodes);
      }
    }
  }

  std::unique_ptr<Node> make_node(NodeKind kind) const {
    auto node = std::make_unique<Node>();
    node->kind = kind;
    node->line = now().line;
    return node;
  }

  // Behind an opening tag's header: the body up to `ends`; the end tag's name is the current token afterwards.
  Body block(std::initializer_list<std::string_view> ends) {
    skip_op(":");
    const int line = now().line;
    expect(TokenType::block_end, "'%}'");
    return body(ends, line);
  }
  void end_tag() { expect(TokenType::block_end, "'%}'"); }

  void statement(Body& nodes) {
    if (!is(TokenType::name)) fail(fmt::format("expected the name of a tag, found {}", found()));
    const std::string& tag = now().text;
    if (tag == "if") return nodes.push_back(if_statement());
    if (tag == "for") return nodes.push_back(for_statement());
    if (tag == "set") return nodes.push_back(set_statement());
    if (tag == "macro") return nodes.push_back(macro_statement());
    if (tag == "with") return nodes.push_back(with_statement());
    if (tag == "print") return nodes.push_back(print_statement());
    if (tag == "generation" || tag == "endgeneration") {  // marks what is trained on: nothing to render
      ++at_;
      return end_tag();
    }
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail(fmt::format("'{}' is outside a loop", tag));
      nodes.push_back(make_node(tag == "break" ? NodeKind::loop_break : NodeKind::loop_continue));
      ++at_;
      return end_tag();
    }
    if (std::find(std::begin(kRefusedTags), std::end(kRefusedTags), tag) != std::end(kRefusedTags))
      fail(fmt::format("the tag '{}' is not supported in chat templates here", tag));
    fail(fmt::format("unknown tag '{}'", printable(tag, 60)));
  }

  std::unique_ptr<Node> if_statement() {
    auto node = make_node(NodeKind::branch);
    ++at_;
    for (;;) {
      Branch branch;
      branch.condition = tuple(Condition::no);
      branch.body = block({"elif", "else", "endif"});
      node->branches.push_back(std::move(branch));
      const std::string tag = expect_name();
      if (tag == "elif") continue;
      if (tag == "else") {
        node->branches.push_back({nullptr, block({"endif"})});
        ++at_;
      }
      end_tag();
      return node;
    }
  }

  std::unique_ptr<Node> for_statement() {
    auto node = make_node(NodeKind::loop);
    ++at_;
    node->targets.push_back(target(TargetUse::loop));
    if (!skip_word("in")) fail(fmt::format("expected 'in', found {}", found()));
    node->values.push_back(tuple(Condition::no));
    if (skip_word("if")) node->values.push_back(expression());
    if (is_word("recursive")) fail("recursive loops are not supported");
    ++loops_;
    node->body = block({"else", "endfor"});
    --loops_;
    if (expect_name() == "else") {
      node->otherwise = block({"endfor"});
      ++at_;
    }
    end_tag();
    return node;
  }

  std::unique_ptr<Node> set_statement() {
    auto node = make_node(NodeKind::set);
    ++at_;
    node->targets.push_back(target(TargetUse::set));
    if (skip_op("=")) {
      node->values.push_back(tuple(Condition::yes));
      end_tag();
      return node;
    }
    if (is_op("|")) fail("filters on block set are not supported");
    node->kind = NodeKind::set_block;
    node->body = block({"endset"});
    ++at_;
    end_tag();
    return node;
  }

  std::unique_ptr<Node> macro_statement() {
    auto node = make_node(NodeKind::macro);
    ++at_;
    node->macro = std::make_unique<MacroNode>();
    MacroNode& macro = *node->macro;
    macro.name = expect_name();
    macro.symbol = program_.symbols.intern(macro.name);
    expect_op("(");
    while (!is_op(")")) {
      if (!macro.parameters.empty()) expect_op(",");
      MacroNode::Parameter parameter;
      parameter.name = expect_name();
      parameter.symbol = program_.symbols.intern(parameter.name);
      if (skip_op("="))
        parameter.fallback = expression();
      else if (!macro.parameters.empty() && macro.parameters.back().fallback)
        fail("a parameter without default follows one with default");
      macro.parameters.push_back(std::move(parameter));
    }
    expect_op(")");
    const int loops_outside = std::exchange(loops_, 0);
    macro.body = block({"endmacro"});
    loops_ = loops_outside;
    ++at_;
    end_tag();
    return node;
  }

  std::unique_ptr<Node> with_statement() {
    auto node = make_node(NodeKind::with);
    ++at_;
    while (!is(TokenType::block_end)) {
      if (!node->values.empty()) expect_op(",");
      node->targets.push_back(target(TargetUse::loop));
      expect_op("=");
      node->values.push_back(expression());
    }
    node->body = block({"endwith"});
    ++at_;
    end_tag();
    return node;
  }

  std::unique_ptr<Node> print_statement() {
    auto node = make_node(NodeKind::print);
    ++at_;
    while (!is(TokenType::block_end)) {
      if (!node->values.empty()) expect_op(",");
      node->values.push_back(expression());
    }
    end_tag();
    return node;
  }

  enum class TargetUse { loop, set };

  Target target(TargetUse use) {
    std::vector<Target> parts;
    bool is_tuple = false;
    do {
      if (!parts.empty() && (is_word("in") || is_op("=") || is_op(")") || is(TokenType::block_end))) break;
      parts.push_back(single_target(use));
      is_tuple = is_tuple || is_op(",");
    } while (skip_op(","));
    if (!is_tuple) return std::move(parts.front());
    Target made;
    made.sort = Target::Sort::tuple;
    made.parts = std::move(parts);
    return made;
  }

  Target single_target(TargetUse use) {
    const Nested nested(*this);
    if (skip_op("(")) {
      Target inner = target(use);
      expect_op(")");
      return inner;
    }
    Target made;
    const std::string name = expect_name();
    for (const std::string_view word : {"true", "false", "none", "True", "False", "None"})
      if (name == word) fail(fmt::format("cannot assign to '{}'", name));
    made.symbol = program_.symbols.intern(name);
    if (use == TargetUse::set && skip_op(".")) {
      made.sort = Target::Sort::attribute;
      made.text = Text(expect_name(), Trust::trusted);
    }
    return made;
  }

  // --- expressions ---------------------------------------------------------------------------------------------------

  enum class Condition { no, yes };

  bool at_tuple_end() const {
    return is(TokenType::variable_end) || is(TokenType::block_end) || is_op(")") || is_word("recursive");
  }

  // One expression, or several with commas between as a tuple.
  ExprPtr tuple(Condition condition, bool in_parentheses = false) {
    const int line = now().line;
    std::vector<ExprPtr> items;
    bool is_tuple = false;
    for (;;) {
      if (!items.empty()) expect_op(",");
      if (at_tuple_end()) break;
      items.push_back(condition == Condition::yes ? expression() : logical_or());
      if (!is_op(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !items.empty()) return std::move(items.front());
    if (!is_tuple && !in_parentheses) fail(fmt::format("expected an expression, found {}", found()));
    ExprPtr made = make(ExprKind::tuple, line);
    for (ExprPtr& item : items) adopt(*made, std::move(item));
    return made;
  }

  ExprPtr expression() {
    const Nested nested(*this);
    ExprPtr value = logical_or();
    while (is_word("if")) {
      ExprPtr made = make(ExprKind::conditional, now().line);
      ++at_;
      adopt(*made, logical_or());
      adopt(*made, std::move(value));
      adopt(*made, skip_word("else") ? expression() : nullptr);
      value = std::move(made);
    }
    return value;
  }

  ExprPtr logical_or() {
    ExprPtr left = logical_and();
    while (is_word("or")) {
      const int line = tokens_[at_++].line;
      left = pair(ExprKind::logical_or, line, std::move(left), logical_and());
    }
    return left;
  }

  ExprPtr logical_and() {
    ExprPtr left = logical_not();
    while (is_word("and")) {
      const int line = tokens_[at_++].line;
      left = pair(ExprKind::logical_and, line, std::move(left), logical_not());
    }
    return left;
  }

  ExprPtr logical_not() {
    if (!is_word("not")) return comparison();
    const Nested nested(*this);
    const int line = tokens_[at_++].line;
    return unary(ExprKind::logical_not, line, logical_not());
  }

  // The comparison at the current token, which is skipped; -1 when there is none.
  int skip_comparison() {
    static constexpr std::pair<std::string_view, Comparison> kSigns[] = {
        {"==", Comparison::equal},      {"!=", Comparison::unequal}, {"<", Comparison::less},
        {"<=", Comparison::less_equal}, {">", Comparison::greater},  {">=", Comparison::greater_equal}};
    for (const auto& [sign, comparison] : kSigns)
      if (skip_op(sign)) return static_cast<int>(comparison);
    if (skip_word("in")) return static_cast<int>(Comparison::in);
    if (is_word("not") && ahead().type == TokenType::name && ahead().text == "in") {
      at_ += 2;
      return static_cast<int>(Comparison::not_in);
    }
    return -1;
  }

  ExprPtr comparison() {
    ExprPtr left = sum();
    int sign = skip_comparison();
    if (sign < 0) return left;
    ExprPtr made = unary(ExprKind::compare, now().line, std::move(left));
    for (; sign >= 0; sign = skip_comparison()) {
      made->comparisons.push_back(static_cast<Comparison>(sign));
      adopt(*made, sum());
    }
    return made;
  }

  ExprPtr binary(BinaryOp op, int line, ExprPtr left, ExprPtr right) const {
    ExprPtr made = pair(ExprKind::binary, line, std::move(left), std::move(right));
    made->op = op;
    return made;
  }

  ExprPtr sum() {
    ExprPtr left = concat();
    while (is_op("+") || is_op("-")) {
      const Token& token = tokens_[at_++];
      left = binary(token.text == "+" ? BinaryOp::add : BinaryOp::subtract, token.line, std::move(left), concat());
    }
    return left;
  }

  ExprPtr concat() {
    ExprPtr first = product();
    if (!is_op("~")) return first;
    ExprPtr made = unary(ExprKind::concat, now().line, std::move(first));
    while (skip_op("~")) adopt(*made, product());
    return made;
  }

  ExprPtr product() {
    ExprPtr left = power();
    for (;;) {
      const int line = now().line;
      BinaryOp op;
      if (skip_op("*"))
        op = BinaryOp::multiply;
      else if (skip_op("//"))
        op = BinaryOp::floor_divide;
      else if (skip_op("/"))
        op = BinaryOp::divide;
      else if (skip_op("%"))
        op = BinaryOp::modulo;
      else
        return left;
      left = binary(op, line, std::move(left), power());
    }
  }

  ExprPtr power() {
    ExprPtr left = signed_term(WithFilters::yes);
    while (is_op("**")) {
      const int line = tokens_[at_++].line;
      left = binary(BinaryOp::power, line, std::move(left), signed_term(WithFilters::yes));
    }
    return left;
  }

  enum class WithFilters { no, yes };

  ExprPtr signed_term(WithFilters filters) {
    const Nested nested(*this);
    ExprPtr value;
    if (is_op("-") || is_op("+")) {
      const Token& token = tokens_[at_++];
      value =
          unary(token.text == "-" ? ExprKind::negative : ExprKind::positive, token.line, signed_term(WithFilters::no));
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return filters == WithFilters::yes ? filtered(std::move(value)) : std::move(value);
  }

  ExprPtr primary() {
    const Token& token = now();
    switch (token.type) {
      case TokenType::name:
        return name();
      case TokenType::string: {
        ExprPtr made = make(ExprKind::string, token.line);
        while (is(TokenType::string)) made->text.append(tokens_[at_++].text, Trust::trusted);
        return made;
      }
      case TokenType::integer: {
        ExprPtr made = make(ExprKind::integer, token.line);
        made->integer = tokens_[at_++].integer;
        return made;
      }
      case TokenType::real: {
        ExprPtr made = make(ExprKind::real, token.line);
        made->real = tokens_[at_++].real;
        return made;
      }
      default:
        break;
    }
    if (skip_op("(")) {
      ExprPtr made = tuple(Condition::yes, true);
      expect_op(")");
      return made;
    }
    if (is_op("[")) return list();
    if (is_op("{")) return dict();
    fail(fmt::format("expected an expression, found {}", found()));
  }

  ExprPtr name() {
    const Token& token = tokens_[at_++];
    const std::string& word = token.text;
    if (word == "true" || word == "True" || word == "false" || word == "False") {
      ExprPtr made = make(ExprKind::boolean, token.line);
      made->boolean = word == "true" || word == "True";
      return made;
    }
    if (word == "none" || word == "None") return make(ExprKind::none, token.line);
    ExprPtr made = make(ExprKind::name, token.line);
    made->symbol = program_.symbols.intern(word);
    made->text = Text("'" + word + "'", Trust::trusted);
    return made;
  }

  ExprPtr list() {
    ExprPtr made = make(ExprKind::list, now().line);
    expect_op("[");
    while (!is_op("]")) {
      if (!made->children.empty()) {
        expect_op(",");
        if (is_op("]")) break;
      }
      adopt(*made, expression());
    }
    expect_op("]");
    return made;
  }

  ExprPtr dict() {
    ExprPtr made = make(ExprKind::dict, now().line);
    expect_op("{");
    while (!is_op("}")) {
      if (!made->children.empty()) {
        expect_op(",");
        if (is_op("}")) break;
      }
      adopt(*made, expression());
      expect_op(":");
      adopt(*made, expression());
    }
    expect_op("}");
    return made;
  }

  ExprPtr postfix(ExprPtr value) {
    for (;;) {
      if (is_op("."))
        value = attribute(std::move(value));
      else if (is_op("["))
        value = subscript(std::move(value));
      else if (is_op("("))
        value = call(std::move(value));
      else
        return value;
    }
  }

  ExprPtr filtered(ExprPtr value) {
    for (;;) {
      if (is_op("|"))
        value = filter(std::move(value));
      else if (is_word("is"))
        value = test(std::move(value));
      else if (is_op("("))
        value = call(std::move(value));
      else
        return value;
    }
  }

  ExprPtr attribute(ExprPtr value) {
    const int line = tokens_[at_++].line;
    if (is(TokenType::name)) {
      ExprPtr made = unary(ExprKind::attribute, line, std::move(value));
      made->text = Text(tokens_[at_++].text, Trust::trusted);
      return made;
    }
    if (!is(TokenType::integer)) fail(fmt::format("expected a name or a number after '.', found {}", found()));
    ExprPtr index = primary();
    return pair(ExprKind::item, line, std::move(value), std::move(index));
  }

  ExprPtr subscript(ExprPtr value) {
    const int line = tokens_[at_++].line;
    ExprPtr first = is_op(":") ? nullptr : expression();
    if (is_op(":")) {
      ExprPtr made = pair(ExprKind::slice, line, std::move(value), std::move(first));
      while (skip_op(":")) {
        if (made->children.size() == 4) fail("a slice has at most three parts");
        adopt(*made, is_op(":") || is_op("]") ? nullptr : expression());
      }
      if (is_op(",")) fail("an index of several slices is not supported");
      expect_op("]");
      made->children.resize(4);
      return made;
    }
    if (is_op(",")) {
      ExprPtr index = unary(ExprKind::tuple, line, std::move(first));
      while (skip_op(",")) {
        if (is_op("]")) break;
        adopt(*index, expression());
      }
      first = std::move(index);
    }
    expect_op("]");
    return pair(ExprKind::item, line, std::move(value), std::move(first));
  }

  ExprPtr call(ExprPtr callee) {
    ExprPtr made = unary(ExprKind::call, now().line, std::move(callee));
    arguments(*made);
    return made;
  }

  void arguments(Expr& owner) {
    expect_op("(");
    bool first = true;
    while (!is_op(")")) {
      if (!std::exchange(first, false)) {
        expect_op(",");
        if (is_op(")")) break;
      }
      Argument argument;
      if (skip_op("**")) {
        argument.sort = Argument::Sort::spread_mapping;
      } else if (skip_op("*")) {
        argument.sort = Argument::Sort::spread_list;
      } else if (is(TokenType::name) && ahead().type == TokenType::op && ahead().text == "=") {
        argument.sort = Argument::Sort::named;
        argument.name = now().text;
        at_ += 2;
      }
      if (argument.sort == Argument::Sort::positional && !owner.arguments.empty() &&
          owner.arguments.back().sort != Argument::Sort::positional)
        fail("a positional argument follows a named one");
      argument.value = expression();
      owner.depth = std::max(owner.depth, argument.value->depth + 1);
      if (owner.depth > kNestingMax) fail(fmt::format("an expression is nested deeper than {} levels", kNestingMax));
      owner.arguments.push_back(std::move(argument));
    }
    expect_op(")");
  }

  ExprPtr filter(ExprPtr value) {
    expect_op("|");
    ExprPtr made = unary(ExprKind::filter, now().line, std::move(value));
    made->text = Text(expect_name(), Trust::trusted);
    if (is_op("(")) arguments(*made);
    return made;
  }

  ExprPtr test(ExprPtr value) {
    const int line = tokens_[at_++].line;
    const bool negated = skip_word("not");
    ExprPtr made = unary(ExprKind::test, line, std::move(value));
    made->text = Text(expect_name(), Trust::trusted);
    const bool operand = is(TokenType::string) || is(TokenType::integer) || is(TokenType::real) || is_op("[") ||
                         is_op("{") || (is(TokenType::name) && !is_word("else") && !is_word("or") && !is_word("and"));
    if (is_op("(")) {
      arguments(*made);
    } else if (operand) {
      if (is_word("is")) fail("tests cannot be chained with 'is'");
      Argument argument;
      argument.value = postfix(primary());
      made->depth = std::max(made->depth, argument.value->depth + 1);
      made->arguments.push_back(std::move(argument));
    }
    return negated ? unary(ExprKind::logical_not, line, std::move(made)) : std::move(made);
  }

  Program program_;
  int nesting_ = 0;
  int loops_ = 0;
};

}  // namespace

Program parse_template(std::string_view source, std::string origin) {
  if (source.size() > kTemplateBytesMax)
    throw_error(ErrorCode::input, "{}: a template of {} bytes is larger than the {} allowed", origin, source.size(),
                kTemplateBytesMax);
  if (const size_t at = find_invalid_utf8(source); at != std::string_view::npos)
    throw_error(ErrorCode::input, "{}: the template is not valid UTF-8 at byte {}", origin, at);
  return Parser(source, origin).run();
}

}  // namespace offload::jinja
