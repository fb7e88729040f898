#include "op_cases.h"

#include <algorithm>
#include <cmath>

#include "op_case_families.h"

namespace offload {

CaseRandom::CaseRandom(std::string_view seed) : state_(0xcbf29ce484222325u) {
  for (const char c : seed) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;  // FNV-1a
}

uint64_t CaseRandom::bits() {
  state_ += 0x9e3779b97f4a7c15u;  // splitmix64, Steele et al. 2014
  uint64_t x = state_;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double CaseRandom::uniform() {
  return static_cast<double>(bits() >> 11) * 0x1p-53;
}

// Sum of 12 uniforms less 6: variance 1, bounded by 6, and no libm whose last bit may differ between machines.
double CaseRandom::normal() {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

int64_t CaseRandom::below(int64_t count) {
  OFL_ASSERT(count > 0);
  return static_cast<int64_t>(bits() % static_cast<uint64_t>(count));
}

Fill normal(double scale, double mean) {
  return [=](CaseRandom& random, std::span<double> values) {
    for (double& value : values) value = mean + scale * random.normal();
  };
}

Fill constant(double value) {
  return [=](CaseRandom&, std::span<double> values) { std::fill(values.begin(), values.end(), value); };
}

Fill literal(std::vector<double> given) {
  return [given = std::move(given)](CaseRandom&, std::span<double> values) {
    OFL_ASSERT(given.size() == values.size());
    std::copy(given.begin(), given.end(), values.begin());
  };
}

std::vector<OpCase> all_op_cases() {
  std::vector<OpCase> cases;
  append_pointwise_cases(cases);
  append_stream_cases(cases);
  append_matrix_cases(cases);
  append_moe_cases(cases);
  append_recurrent_cases(cases);
  append_attention_cases(cases);
  return cases;
}

std::vector<OpCase> op_cases(std::string_view op) {
  std::vector<OpCase> cases = all_op_cases();
  cases.erase(std::remove_if(cases.begin(), cases.end(), [&](const OpCase& c) { return c.op != op; }), cases.end());
  return cases;
}

}  // namespace offload
