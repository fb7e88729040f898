#include "offload/roofs.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace offload {
namespace {

constexpr double Roofs::*kAll[] = {&Roofs::read_bytes_per_s, &Roofs::flops_per_s, &Roofs::link_bytes_per_s,
                                   &Roofs::m16n8k8_flops_per_s};
static_assert(sizeof(Roofs) == std::size(kAll) * sizeof(double));

}  // namespace

Roofs better_of(const Roofs& a, const Roofs& b) {
  Roofs better;
  for (const auto roof : kAll) better.*roof = std::max(a.*roof, b.*roof);
  return better;
}

double drift(double a, double b) {
  return std::abs(b / a - 1);
}

double drift(const Roofs& a, const Roofs& b) {
  double most = 0;
  for (const auto roof : kAll)
    if (a.*roof > 0) most = std::max(most, drift(a.*roof, b.*roof));
  return most;
}

}  // namespace offload
