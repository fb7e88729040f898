// The parsed form of a template: immutable, shared by all renderings.
//
// Names of variables are numbered per template (SymbolTable), so that a lookup compares integers. Thread-safe: no state.
#ifndef OFFLOAD_CORE_JINJA_AST_H_
#define OFFLOAD_CORE_JINJA_AST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/jinja/text.h"

namespace offload::jinja {

struct Expr;
struct Node;
using ExprPtr = std::unique_ptr<Expr>;
using Body = std::vector<std::unique_ptr<Node>>;

enum class ExprKind : uint8_t {
  none,
  boolean,
  integer,
  real,
  string,
  name,
  list,
  tuple,
  dict,       // children: key, value, key, value, ...
  attribute,  // children[0].text
  item,       // children[0][children[1]]
  slice,      // children[0][children[1]:children[2]:children[3]], each of the three may be null
  call,       // children[0](arguments)
  filter,     // children[0] | text(arguments)
  test,       // children[0] is text(arguments)
  logical_not,
  negative,
  positive,
  binary,      // children[0] op children[1]
  concat,      // children[0] ~ children[1] ~ ...
  compare,     // children[0] comparisons[0] children[1] comparisons[1] ...
  logical_and,
  logical_or,
  conditional,  // children: condition, then, else or null
};

enum class BinaryOp : uint8_t { add, subtract, multiply, divide, floor_divide, modulo, power };
enum class Comparison : uint8_t { equal, unequal, less, less_equal, greater, greater_equal, in, not_in };

struct Argument {
  enum class Sort : uint8_t { positional, named, spread_list, spread_mapping };
  Sort sort = Sort::positional;
  std::string name;
  ExprPtr value;
};

struct Expr {
  ExprKind kind;
  BinaryOp op = BinaryOp::add;
  bool boolean = false;
  int line = 0;
  int depth = 1;   // of the tree below
  int symbol = 0;  // of a name
  int64_t integer = 0;
  double real = 0;
  Text text;
  std::vector<ExprPtr> children;
  std::vector<Argument> arguments;
  std::vector<Comparison> comparisons;
};

// Where a value is stored: a name, name.attribute of a namespace, or a tuple of targets.
struct Target {
  enum class Sort : uint8_t { name, attribute, tuple };
  Sort sort = Sort::name;
  int symbol = 0;
  Text text;  // the attribute
  std::vector<Target> parts;
};

struct Branch {
  ExprPtr condition;  // null: else
  Body body;
};

struct MacroNode {
  std::string name;
  int symbol = 0;
  struct Parameter {
    std::string name;
    int symbol = 0;
    ExprPtr fallback;  // null: undefined when not given
  };
  std::vector<Parameter> parameters;
  Body body;
};

enum class NodeKind : uint8_t { text, print, branch, loop, set, set_block, macro, with, loop_break, loop_continue };

struct Node {
  NodeKind kind;
  int line = 0;
  Text text;                  // text
  std::vector<ExprPtr> values;  // print, set: what; loop: the iterated, and the filter if any; with: the values
  std::vector<Target> targets;  // loop, set, set_block: one; with: one per value
  std::vector<Branch> branches;
  Body body;       // loop, set_block, with
  Body otherwise;  // loop: else
  std::unique_ptr<MacroNode> macro;
};

// Numbers the variable names of one template.
class SymbolTable {
 public:
  int intern(const std::string& name) {
    const auto [found, added] = ids_.try_emplace(name, static_cast<int>(names_.size()));
    if (added) names_.push_back(name);
    return found->second;
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::unordered_map<std::string, int> ids_;
  std::vector<std::string> names_;
};

struct Program {
  std::string origin;
  SymbolTable symbols;
  int loop_symbol = 0;
  Body body;
};

}  // namespace offload::jinja

#endif  // OFFLOAD_CORE_JINJA_AST_H_
