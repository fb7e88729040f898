#include "op_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "cpu/ref_ops.h"

namespace offload {
namespace {

constexpr int64_t kGuardBytes = Arena::kAlignment;  // on both sides, keeps the tensor aligned
constexpr std::byte kGuard{0xc3};

// NaN patterns that no arithmetic gives (quiet bit clear), and impossible ids.
constexpr uint32_t kPoison32 = 0x7fa5a5a5u;
constexpr uint16_t kPoison16 = 0x7fa5u;
constexpr uint8_t kPoison8 = 0xa5u;

Tensor make_tensor(void* data, DType dtype, const std::vector<int64_t>& d) {
  switch (d.size()) {
    case 1:
      return Tensor(data, dtype, {d[0]});
    case 2:
      return Tensor(data, dtype, {d[0], d[1]});
    case 3:
      return Tensor(data, dtype, {d[0], d[1], d[2]});
    default:
      OFL_ASSERT(d.size() == 4);
      return Tensor(data, dtype, {d[0], d[1], d[2], d[3]});
  }
}

const std::vector<int64_t>& storage_shape(const CaseTensor& t) {
  return t.storage.empty() ? t.shape : t.storage;
}

int64_t storage_bytes(const CaseTensor& t) {
  return make_tensor(nullptr, t.dtype, storage_shape(t)).bytes();
}

// The logical tensor inside a storage that begins at `data`.
Tensor view_of(const CaseTensor& t, void* data) {
  Tensor view = make_tensor(data, t.dtype, storage_shape(t));
  for (int i = 0; i < view.rank(); ++i) view = view.narrow(i, 0, t.shape[static_cast<size_t>(i)]);
  return view;
}

// Element offsets into the storage of the logical elements, row-major.
std::vector<int64_t> element_offsets(const CaseTensor& t) {
  const Tensor view = view_of(t, nullptr);
  std::vector<int64_t> offsets = {0};
  for (int i = 0; i < view.rank(); ++i) {
    std::vector<int64_t> next;
    for (const int64_t base : offsets)
      for (int64_t j = 0; j < view.dim(i); ++j) next.push_back(base + j * view.stride(i));
    offsets = std::move(next);
  }
  return offsets;
}

template <typename T>
void put(std::byte* data, int64_t at, T value) {
  std::memcpy(data + at * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}
template <typename T>
T take(const std::byte* data, int64_t at) {
  T value;
  std::memcpy(&value, data + at * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

void put_number(std::byte* data, DType dtype, int64_t at, double value) {
  const bool poison = std::isnan(value);
  switch (dtype_bytes(dtype)) {
    case 1:
      return put<uint8_t>(data, at, poison ? kPoison8 : static_cast<uint8_t>(value));
    case 2:
      OFL_ASSERT(dtype == DType::bf16);
      return put<uint16_t>(data, at, poison ? kPoison16 : to_bf16(static_cast<float>(value)).bits);
    case 4:
      if (poison) return put<uint32_t>(data, at, kPoison32);
      if (dtype == DType::i32) return put<int32_t>(data, at, static_cast<int32_t>(value));
      return put<float>(data, at, static_cast<float>(value));
    default:
      OFL_ASSERT(false && "no op has 64-bit tensors");
  }
}

// Guard, storage, guard with the content before the op. Padding and outputs are poison.
std::vector<std::byte> initial_image(const OpCase& test, const CaseTensor& t) {
  const int64_t bytes = storage_bytes(t);
  std::vector<std::byte> image(static_cast<size_t>(bytes + 2 * kGuardBytes), kGuard);
  std::byte* data = image.data() + kGuardBytes;
  for (int64_t i = 0; i < bytes / dtype_bytes(t.dtype); ++i) put_number(data, t.dtype, i, NAN);
  if (t.role == Role::output) return image;
  const std::vector<int64_t> offsets = element_offsets(t);
  std::vector<double> values(offsets.size());
  CaseRandom random(test.name + "/" + t.name);
  t.fill(random, values);
  for (size_t i = 0; i < offsets.size(); ++i) put_number(data, t.dtype, offsets[i], values[i]);
  return image;
}

struct Element {
  uint32_t bits = 0;
  double value = 0;  // of float dtypes
  bool poison = false;
};

Element element_at(const std::byte* data, DType dtype, int64_t at) {
  switch (dtype_bytes(dtype)) {
    case 1: {
      const auto bits = take<uint8_t>(data, at);
      return {bits, static_cast<double>(bits), bits == kPoison8};
    }
    case 2: {
      const auto bits = take<uint16_t>(data, at);
      return {bits, static_cast<double>(to_float(bf16{bits})), bits == kPoison16};
    }
    default: {
      const auto bits = take<uint32_t>(data, at);
      const double value = dtype == DType::f32 ? static_cast<double>(std::bit_cast<float>(bits))
                                               : static_cast<double>(static_cast<int32_t>(bits));
      return {bits, value, bits == kPoison32};
    }
  }
}

double bf16_step(double value) {
  const int exponent = value == 0 ? -126 : std::max(-126, std::ilogb(value));
  return std::ldexp(1.0, exponent - 7);
}

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16;
}

double bound_of(const Tolerance& tolerance, DType dtype, double expected, double scale) {
  double bound = tolerance.relative * std::abs(expected) + tolerance.scaled * scale;
  if (dtype == DType::bf16) bound += tolerance.ulps * bf16_step(expected) + tolerance.scaled_ulps * bf16_step(scale);
  return bound;
}

// Compares the written elements of one tensor; fills `result`.
void compare_elements(const OpCase& test, const CaseTensor& t, const std::byte* expected_data,
                      const std::byte* actual_data, CaseResult& result) {
  const std::vector<int64_t> offsets = element_offsets(t);
  double scale = 0;
  for (const int64_t at : offsets) {
    const double value = element_at(expected_data, t.dtype, at).value;
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    const Element expected = element_at(expected_data, t.dtype, offsets[i]);
    const Element actual = element_at(actual_data, t.dtype, offsets[i]);
    result.output_hash = (result.output_hash ^ actual.bits) * 0x100000001b3u;
    if (expected.bits == actual.bits) continue;
    std::string why;
    if (expected.poison) {
      why = "an element that the contract leaves alone was written";
    } else if (actual.poison) {
      why = "an element was not written";
    } else if (!is_float(t.dtype)) {
      why = "integers differ";
    } else if (std::isnan(expected.value) && std::isnan(actual.value)) {
      continue;
    } else if (!std::isfinite(expected.value) || !std::isfinite(actual.value)) {
      why = "one is not finite";
    } else {
      const double bound = bound_of(test.tolerance, t.dtype, expected.value, scale);
      const double error = std::abs(actual.value - expected.value);
      if (error == 0) continue;  // zeros of either sign
      result.error_over_bound = std::max(result.error_over_bound, bound > 0 ? error / bound : INFINITY);
      if (error <= bound) continue;
      why = fmt::format("error {:.3g} exceeds {:.3g} (tolerance {})", error, bound, test.tolerance.name);
    }
    if (result.failure.empty())
      result.failure = fmt::format("{}: {} element {} of {}: expected {}, found {}: {}", test.name, t.name, i,
                                   offsets.size(), expected.value, actual.value, why);
  }
}

// True when every byte outside the logical elements is as before: guards and stride padding.
bool surroundings_unchanged(const CaseTensor& t, const std::vector<std::byte>& before,
                            const std::vector<std::byte>& after) {
  std::vector<std::byte> masked = after;
  const auto step = static_cast<size_t>(dtype_bytes(t.dtype));
  for (const int64_t at : element_offsets(t)) {
    const size_t byte = static_cast<size_t>(kGuardBytes) + static_cast<size_t>(at) * step;
    std::memcpy(masked.data() + byte, before.data() + byte, step);
  }
  return masked == before;
}

void check_tensor(const OpCase& test, const CaseTensor& t, const std::vector<std::byte>& before,
                  const std::vector<std::byte>& expected, const std::vector<std::byte>& actual, CaseResult& result) {
  if (t.role != Role::input)
    compare_elements(test, t, expected.data() + kGuardBytes, actual.data() + kGuardBytes, result);
  if (!result.failure.empty()) return;
  if (t.role == Role::input && actual != before)
    result.failure = fmt::format("{}: input {} or the words around it were changed", test.name, t.name);
  else if (!surroundings_unchanged(t, before, actual))
    result.failure = fmt::format("{}: guard words or stride padding of {} were written", test.name, t.name);
}

using Images = std::vector<std::vector<std::byte>>;

// Uploads the images, plans and runs the case, and downloads them again.
Images run_on(const OpCase& test, const Images& before, Ops& ops, Mirror& mirror, CaseResult& result) {
  std::vector<void*> blocks;
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < before.size(); ++i) {
    const auto bytes = static_cast<int64_t>(before[i].size());
    blocks.push_back(mirror.allocate(bytes));
    mirror.upload(blocks.back(), before[i].data(), bytes);
    tensors.push_back(view_of(test.tensors[i], static_cast<std::byte*>(blocks.back()) + kGuardBytes));
  }
  ops.reset_scratch_peak();  // what this case needs, whatever others needed
  ops.set_planning(true);
  test.run(ops, tensors);
  ops.set_planning(false);
  const int64_t scratch_bytes = ops.scratch_peak_bytes();
  const CaseTensor scratch{"scratch", DType::u8, {scratch_bytes}, Role::output, {}};
  const std::vector<std::byte> scratch_image = initial_image(test, scratch);
  const auto scratch_total = static_cast<int64_t>(scratch_image.size());
  void* scratch_block = mirror.allocate(scratch_total);
  mirror.upload(scratch_block, scratch_image.data(), scratch_total);
  ops.set_scratch(view_of(scratch, static_cast<std::byte*>(scratch_block) + kGuardBytes));

  test.run(ops, tensors);

  Images after = before;
  for (size_t i = 0; i < after.size(); ++i)
    mirror.download(after[i].data(), blocks[i], static_cast<int64_t>(after[i].size()));
  std::vector<std::byte> scratch_after = scratch_image;
  mirror.download(scratch_after.data(), scratch_block, scratch_total);
  if (!surroundings_unchanged(scratch, scratch_image, scratch_after))
    result.failure = fmt::format("{}: the op wrote outside its scratch of {} bytes", test.name, scratch_bytes);
  ops.set_scratch({});
  mirror.release_all();
  return after;
}

}  // namespace

PreparedCase::PreparedCase(const OpCase& test) : test_(test) {
  for (const CaseTensor& t : test_.tensors) before_.push_back(initial_image(test_, t));
  cpu::RefOps reference;
  HostMirror host;
  CaseResult result;
  expected_ = run_on(test_, before_, reference, host, result);
  reference_failure_ = result.failure;
}

CaseResult PreparedCase::run(Ops& candidate, Mirror& mirror) const {
  CaseResult result;
  result.failure = reference_failure_;
  result.output_hash = 0xcbf29ce484222325u;
  const Images actual = run_on(test_, before_, candidate, mirror, result);
  for (size_t i = 0; i < before_.size() && result.passed(); ++i)
    check_tensor(test_, test_.tensors[i], before_[i], expected_[i], actual[i], result);
  return result;
}

CaseResult run_case(const OpCase& test, Ops& candidate, Mirror& mirror) {
  return PreparedCase(test).run(candidate, mirror);
}

std::vector<Tensor> upload_case(const OpCase& test, Mirror& mirror) {
  std::vector<Tensor> tensors;
  for (const CaseTensor& t : test.tensors) {
    const std::vector<std::byte> image = initial_image(test, t);
    const int64_t bytes = storage_bytes(t);
    void* data = mirror.allocate(std::max<int64_t>(bytes, 1));
    mirror.upload(data, image.data() + kGuardBytes, bytes);
    tensors.push_back(view_of(t, data));
  }
  return tensors;
}

void* HostMirror::allocate(int64_t bytes) {
  blocks_.push_back(::operator new (static_cast<size_t>(bytes), std::align_val_t{Arena::kAlignment}));
  return blocks_.back();
}
void HostMirror::release_all() {
  for (void* block : blocks_) ::operator delete (block, std::align_val_t{Arena::kAlignment});
  blocks_.clear();
}
void HostMirror::upload(void* device, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, static_cast<size_t>(bytes));
}
void HostMirror::download(void* host, const void* device, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, static_cast<size_t>(bytes));
}

}  // namespace offload
