// Values in, op, values out: for tests that name their numbers. Works on any backend through its Mirror.
#ifndef OFFLOAD_TESTS_OP_VALUES_H_
#define OFFLOAD_TESTS_OP_VALUES_H_

#include <cmath>
#include <initializer_list>
#include <vector>

#include "op_suite.h"

namespace offload {

inline constexpr DType kF32 = DType::f32, kBf16 = DType::bf16;

// Memory is released with the mirror.
class OpValues {
 public:
  OpValues(Ops& ops, Mirror& mirror) : ops_(ops), mirror_(mirror) {}

  // A contiguous tensor that holds `values`, rounded to `dtype`. REQUIRES: as many values as elements.
  Tensor put(DType dtype, std::initializer_list<int64_t> shape, const std::vector<double>& values) {
    const Tensor probe(nullptr, dtype, shape);
    OFL_ASSERT(probe.elements() == static_cast<int64_t>(values.size()));
    std::vector<std::byte> host(static_cast<size_t>(probe.bytes()));
    for (size_t i = 0; i < values.size(); ++i) {
      const Tensor element = Tensor(host.data(), dtype, {probe.elements()}).narrow(0, static_cast<int64_t>(i), 1);
      if (dtype == DType::f32) *element.as<float>() = static_cast<float>(values[i]);
      if (dtype == DType::bf16) *element.as<bf16>() = to_bf16(static_cast<float>(values[i]));
      if (dtype == DType::i32) *element.as<int32_t>() = static_cast<int32_t>(values[i]);
      if (dtype == DType::u8) *element.as<uint8_t>() = static_cast<uint8_t>(values[i]);
    }
    void* data = mirror_.allocate(std::max<int64_t>(probe.bytes(), 1));
    mirror_.upload(data, host.data(), probe.bytes());
    return Tensor(data, dtype, shape);
  }
  Tensor fill(DType dtype, std::initializer_list<int64_t> shape, double value) {
    const auto elements = static_cast<size_t>(Tensor(nullptr, dtype, shape).elements());
    return put(dtype, shape, std::vector<double>(elements, value));
  }
  // For outputs: NaN, or -1 for integers.
  Tensor blank(DType dtype, std::initializer_list<int64_t> shape) {
    return fill(dtype, shape, dtype == DType::i32 ? -1 : NAN);
  }

  // Plans the op, gives it the scratch that it asked for, and executes it.
  template <typename Args>
  void run(const Args& args) {
    ops_.set_planning(true);
    ops_(args);
    ops_.set_planning(false);
    const int64_t scratch_bytes = ops_.scratch_peak_bytes();
    ops_.set_scratch(Tensor(mirror_.allocate(std::max<int64_t>(scratch_bytes, 1)), DType::u8, {scratch_bytes}));
    ops_(args);
    ops_.set_scratch({});
  }

  // The elements, row-major. REQUIRES: contiguous.
  std::vector<double> take(const Tensor& t) {
    OFL_ASSERT(t.contiguous());
    std::vector<std::byte> host(static_cast<size_t>(t.bytes()));
    mirror_.download(host.data(), t.data(), t.bytes());
    std::vector<double> values;
    for (int64_t i = 0; i < t.elements(); ++i) {
      const Tensor element = Tensor(host.data(), t.dtype(), {t.elements()}).narrow(0, i, 1);
      if (t.dtype() == DType::f32) values.push_back(static_cast<double>(*element.as<float>()));
      if (t.dtype() == DType::bf16) values.push_back(static_cast<double>(to_float(*element.as<bf16>())));
      if (t.dtype() == DType::i32) values.push_back(*element.as<int32_t>());
    }
    return values;
  }

 private:
  Ops& ops_;
  Mirror& mirror_;
};

// Largest |a - b|; infinity when the lengths differ or a NaN is among them.
inline double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (std::isnan(difference)) return INFINITY;
    largest = std::max(largest, difference);
  }
  return largest;
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_VALUES_H_
