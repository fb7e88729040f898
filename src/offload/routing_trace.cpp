#include "offload/routing_trace.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "core/base.h"

namespace offload {
namespace {

constexpr std::string_view kMagic = "OFLROUTE";
constexpr int64_t kHeaderBytes = 8 + 4 * 4 + 8;
constexpr int64_t kStepHeaderBytes = 4 + 4;

void put(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

uint64_t get(std::string_view in, int64_t at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i)
    value |= uint64_t{static_cast<unsigned char>(in[static_cast<size_t>(at + i)])} << (8 * i);
  return value;
}

}  // namespace

RoutingTrace::RoutingTrace(const RoutingShape& shape) : shape_(shape) {
  OFL_ASSERT(shape.layers > 0 && shape.layers <= kTraceLayersMax);
  OFL_ASSERT(shape.top_k > 0 && shape.top_k <= shape.experts && shape.experts <= kTraceExpertsMax);
}

const RoutingTrace::Step& RoutingTrace::at(int64_t step) const {
  OFL_ASSERT(step >= 0 && step < steps());
  return steps_[static_cast<size_t>(step)];
}

std::span<const uint16_t> RoutingTrace::ids(int64_t step, int64_t layer) const {
  OFL_ASSERT(layer >= 0 && layer < shape_.layers);
  const int64_t count = rows(step) * shape_.top_k;
  return std::span(ids_).subspan(static_cast<size_t>(at(step).begin + layer * count), static_cast<size_t>(count));
}

void RoutingTrace::append(Phase phase, int64_t rows, std::span<const uint16_t> ids) {
  OFL_ASSERT(rows > 0 && rows <= kTraceRowsMax && static_cast<int64_t>(ids.size()) == rows * ids_per_row());
  OFL_ASSERT(std::all_of(ids.begin(), ids.end(), [&](uint16_t id) { return id < shape_.experts; }));
  steps_.push_back({phase, rows, static_cast<int64_t>(ids_.size())});
  ids_.insert(ids_.end(), ids.begin(), ids.end());
}

void RoutingTrace::reserve(int64_t more_steps, int64_t more_ids) {
  steps_.reserve(steps_.size() + static_cast<size_t>(more_steps));
  ids_.reserve(ids_.size() + static_cast<size_t>(more_ids));
}

bool RoutingTrace::has_room_for(int64_t ids) const {
  return steps_.size() < steps_.capacity() && ids_.size() + static_cast<size_t>(ids) <= ids_.capacity();
}

RoutingTrace RoutingTrace::slice(int64_t begin, int64_t end) const {
  OFL_ASSERT(begin >= 0 && begin <= end && end <= steps());
  RoutingTrace out(shape_);
  for (int64_t s = begin; s < end; ++s)
    out.append(phase(s), rows(s),
               std::span(ids_).subspan(static_cast<size_t>(at(s).begin), static_cast<size_t>(rows(s) * ids_per_row())));
  return out;
}

void RoutingTrace::append(const RoutingTrace& other) {
  OFL_ASSERT(shape_ == other.shape_ && this != &other);
  for (int64_t s = 0; s < other.steps(); ++s)
    append(other.phase(s), other.rows(s),
           std::span(other.ids_)
               .subspan(static_cast<size_t>(other.at(s).begin), static_cast<size_t>(other.rows(s) * ids_per_row())));
}

std::string serialize_trace(const RoutingTrace& trace) {
  const RoutingShape& shape = trace.shape();
  std::string out(kMagic);
  put(out, 1, 4);
  put(out, static_cast<uint64_t>(shape.layers), 4);
  put(out, static_cast<uint64_t>(shape.experts), 4);
  put(out, static_cast<uint64_t>(shape.top_k), 4);
  put(out, static_cast<uint64_t>(trace.steps()), 8);
  for (int64_t s = 0; s < trace.steps(); ++s) {
    put(out, trace.phase(s) == Phase::decode ? 1 : 0, 4);
    put(out, static_cast<uint64_t>(trace.rows(s)), 4);
    for (int64_t l = 0; l < shape.layers; ++l)
      for (const uint16_t id : trace.ids(s, l)) put(out, id, 2);
  }
  return out;
}

namespace {

int64_t checked(std::string_view bytes, int64_t at, const char* what, int64_t max, std::string_view origin) {
  const auto value = static_cast<int64_t>(get(bytes, at, 4));
  if (value < 1 || value > max)
    throw_error(ErrorCode::input, "{}: {} is {}, expected 1 to {}; record the trace anew", origin, what, value, max);
  return value;
}

RoutingShape parse_trace_shape(std::string_view bytes, std::string_view origin) {
  if (static_cast<int64_t>(bytes.size()) < kHeaderBytes || !bytes.starts_with(kMagic))
    throw_error(ErrorCode::input, "{}: no routing trace: expected {} bytes or more that begin with {}", origin,
                kHeaderBytes, kMagic);
  if (get(bytes, 8, 4) != 1)
    throw_error(ErrorCode::input, "{}: routing trace of version {}, expected 1; record it anew", origin,
                get(bytes, 8, 4));
  RoutingShape shape;
  shape.layers = checked(bytes, 12, "the number of layers", kTraceLayersMax, origin);
  shape.experts = checked(bytes, 16, "the number of experts", kTraceExpertsMax, origin);
  shape.top_k = checked(bytes, 20, "top_k", shape.experts, origin);
  return shape;
}

}  // namespace

RoutingTrace parse_trace(std::string_view bytes, std::string_view origin) {
  const RoutingShape shape = parse_trace_shape(bytes, origin);
  const auto size = static_cast<int64_t>(bytes.size());
  const uint64_t steps = get(bytes, 24, 8);
  RoutingTrace trace(shape);
  std::vector<uint16_t> ids;
  int64_t at = kHeaderBytes;
  for (uint64_t s = 0; s < steps; ++s) {
    if (size - at < kStepHeaderBytes)
      throw_error(ErrorCode::input, "{}: ends at byte {} in step {} of {}; the file is cut short", origin, size, s,
                  steps);
    const uint64_t phase = get(bytes, at, 4);
    if (phase > 1) throw_error(ErrorCode::input, "{}: step {}: phase {}, expected 0 or 1", origin, s, phase);
    const int64_t rows =
        checked(bytes, at + 4, fmt::format("the number of rows of step {}", s).c_str(), kTraceRowsMax, origin);
    at += kStepHeaderBytes;
    const int64_t count = rows * shape.layers * shape.top_k;  // < 2^20 * 2^12 * 2^16
    if ((size - at) / 2 < count)
      throw_error(ErrorCode::input, "{}: step {} needs {} ids, the file holds {} more; it is cut short", origin, s,
                  count, (size - at) / 2);
    ids.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      ids[static_cast<size_t>(i)] = static_cast<uint16_t>(get(bytes, at + 2 * i, 2));
      if (ids[static_cast<size_t>(i)] >= shape.experts)
        throw_error(ErrorCode::input, "{}: step {}, layer {}: expert id {}, expected less than {}", origin, s,
                    i / (rows * shape.top_k), ids[static_cast<size_t>(i)], shape.experts);
    }
    at += 2 * count;
    trace.append(phase == 1 ? Phase::decode : Phase::prefill, rows, ids);
  }
  if (at != size)
    throw_error(ErrorCode::input, "{}: {} bytes follow the last of {} steps; the file is damaged", origin, size - at,
                steps);
  return trace;
}

void write_trace(const RoutingTrace& trace, const std::string& path) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::string bytes = serialize_trace(trace);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file)
    throw_error(ErrorCode::resource, "{}: cannot write the routing trace: {}", printable(path), std::strerror(errno));
}

RoutingTrace read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (size < 0) throw_error(ErrorCode::input, "{}: cannot read: {}", printable(path), std::strerror(errno));
  if (size > 2 * kTraceIdsMax)
    throw_error(ErrorCode::input, "{}: {} bytes, a routing trace has at most {}", printable(path), size,
                2 * kTraceIdsMax);
  std::string bytes(static_cast<size_t>(size), '\0');
  file.seekg(0);
  file.read(bytes.data(), size);
  if (!file) throw_error(ErrorCode::input, "{}: cannot read: {}", printable(path), std::strerror(errno));
  return parse_trace(bytes, printable(path));
}

RoutingRecorder::RoutingRecorder(const RoutingShape& shape, int64_t steps_max, int64_t rows_max, int64_t rows_total_max)
    : trace_(shape), steps_max_(steps_max) {
  trace_.reserve(steps_max, rows_total_max * shape.layers * shape.top_k);
  step_.reserve(static_cast<size_t>(rows_max * shape.layers * shape.top_k));
}

void RoutingRecorder::record(int64_t layer, Phase phase, std::span<const int32_t> ids) {
  const RoutingShape& shape = trace_.shape();
  if (layer == 0) {
    layer_ = 0;
    step_.clear();
    phase_ = phase;
    rows_ = static_cast<int64_t>(ids.size()) / shape.top_k;
    const auto total = static_cast<size_t>(rows_ * shape.layers * shape.top_k);
    full_ = full_ || trace_.steps() == steps_max_ || total > step_.capacity() ||
            !trace_.has_room_for(static_cast<int64_t>(total));
  }
  OFL_ASSERT(layer == layer_ && phase == phase_ && static_cast<int64_t>(ids.size()) == rows_ * shape.top_k);
  ++layer_;
  if (full_) return;
  for (const int32_t id : ids) {
    OFL_ASSERT(id >= 0 && id < shape.experts);
    step_.push_back(static_cast<uint16_t>(id));
  }
  if (layer_ == shape.layers) trace_.append(phase_, rows_, step_);
}

}  // namespace offload
