// Arms: ways to compute a model's matrix products, as data.
//
// A rule gives products of one site in steps of so many rows a Math; the first rule that matches a product decides and
// without one it is native. Steps of up to kCanonicalRowsMax rows and decoding are native under every arm: that is what
// lets an expert run anywhere with the same bits.
// configs/arms.json: {"arms": [{"name", "status", "evidence", "description", "rules": [{"site", "phase", "rows_min",
// "math"}]}]}; phase may be left out (any), rows_min too (1). Immutable values; thread-safe.
#ifndef OFFLOAD_CORE_ARM_H_
#define OFFLOAD_CORE_ARM_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base.h"
#include "core/json.h"
#include "core/phase.h"
#include "core/product_math.h"

namespace offload {

// Which products: those inside hyper-connections, those of routed experts, and all others (projections of mixers and of
// n-gram embeddings, router, shared expert, lm_head).
enum class Site : uint8_t { dense, hyper_connection, experts };

struct MathRule {
  Site site = Site::dense;
  std::optional<Phase> phase = {};  // nothing: any
  int64_t rows_min = 1;             // of the product; for experts, of the step that is routed
  Math math = Math::native;

  friend constexpr bool operator==(const MathRule&, const MathRule&) = default;
};

// The rules of one arm, in order. A plain value: no memory is taken when it is copied.
class MathRules {
 public:
  static constexpr int kRulesMax = 12;

  constexpr MathRules() = default;
  // REQUIRES: fewer than kRulesMax so far.
  void add(const MathRule& rule);
  std::span<const MathRule> rules() const { return std::span(rules_).first(static_cast<size_t>(count_)); }
  // Native for up to kCanonicalRowsMax rows and in decode, whatever the rules say.
  Math math_of(Site site, Phase phase, int64_t rows) const;

  friend bool operator==(const MathRules& a, const MathRules& b) {
    return a.count_ == b.count_ && a.rules_ == b.rules_;
  }

 private:
  std::array<MathRule, kRulesMax> rules_ = {};
  int count_ = 0;
};

// strict: cannot be told from a control. control: plain BF16 in other orders of summation, the yardstick. rejected: was
// measured and lost. experimental: the rest.
enum class ArmStatus : uint8_t { strict, experimental, rejected, control };

struct Arm {
  std::string name;
  ArmStatus status = ArmStatus::experimental;
  std::vector<std::string> evidence;  // files, relative to the folder of arms.json
  std::string description;
  MathRules rules;
};

// As arms.json spells them.
std::string_view site_name(Site site);
std::string_view math_name(Math math);
std::string_view status_name(ArmStatus status);

// The arms of an arms.json in its order. Throws Error{input} naming `origin`, the arm and the field for an unknown
// field or word, a name that two arms have, a strict or rejected arm without evidence, evidence outside the folder, and
// rules of the baseline "bf16".
std::vector<Arm> parse_arms(std::string_view json, std::string_view origin);

// The "rules" of an arm as JSON, and back. `where` opens every message.
Json rules_json(const MathRules& rules);
MathRules parse_rules(const Json& rules, const std::string& where);

// The name of the arm without rules, which every other is compared with.
inline constexpr std::string_view kBaselineArm = "bf16";

}  // namespace offload

#endif  // OFFLOAD_CORE_ARM_H_
