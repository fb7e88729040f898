#include "offload/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/canonical.h"

namespace offload {
namespace {

// Zero-copy reads of pinned memory reach this share of the copy engine's rate (measured on an H200, 2026-11-29: 47.6 of
// 51.7 GiB/s with 80 blocks).
constexpr double kZeroCopyEfficiency = 0.92;
// Rows of the smallest GEMM tile worth having; matrix units take 8 or 16.
constexpr int64_t kTileRowsMin = 16;

int64_t nanoseconds(double seconds) {
  return std::llround(seconds * 1e9);
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t bytes_of(const StepOp& op) {
  return op.cost.bytes_read + op.cost.bytes_written;
}

}  // namespace

CostModel::CostModel(const Machine& machine, GemmMath math, int64_t world)
    : machine_(machine), math_(math), flops_(machine.device.gemm_flops.at(static_cast<size_t>(math))), world_(world) {
  if (world < 1 || world > machine_.device.count)
    throw_error(ErrorCode::usage, "{} ranks: the machine \"{}\" has {} device(s)", world, machine_.name,
                machine_.device.count);
}

// Roof of a product of few rows: its weights stream once. Of a larger one: tiles are dealt to the compute units in
// waves, and a wave takes as long for one tile as for one on every unit.
double CostModel::gemm_seconds(int64_t m, int64_t n, int64_t k, int64_t bytes) const {
  const DeviceRates& device = machine_.device;
  const double memory_s = static_cast<double>(bytes) / device.memory_bytes_per_s;
  if (m <= kCanonicalRowsMax) return memory_s / device.gemv_efficiency;
  const int64_t tile_rows =
      std::min(device.tile_rows, std::max<int64_t>(kTileRowsMin, std::bit_ceil(static_cast<uint64_t>(m))));
  const int64_t tiles = ceil_div(m, tile_rows) * ceil_div(n, device.tile_columns);
  const int64_t waves = ceil_div(tiles, device.compute_units);
  const double flops = 2.0 * static_cast<double>(waves) * static_cast<double>(device.compute_units) *
                       static_cast<double>(tile_rows * device.tile_columns) * static_cast<double>(k);
  return std::max(memory_s, flops / flops_);
}

double CostModel::seconds(const StepOp& op) const {
  const double gap = machine_.device.launch_gap_s;
  if (op.k > 0) return gap + gemm_seconds(op.m, op.n, op.k, bytes_of(op));
  return gap + std::max(static_cast<double>(bytes_of(op)) / machine_.device.memory_bytes_per_s,
                        static_cast<double>(op.cost.flops) / flops_);
}

int64_t CostModel::op_ns(const StepOp& op) const {
  return nanoseconds(seconds(op));
}

int64_t CostModel::part_ns(const StepOps& ops, bool is_head, int64_t rows) const {
  double dense = 0, other = 0;
  for (const StepOp& op : ops) (op.k > 0 ? dense : other) += seconds(op);
  if (rows > kCanonicalRowsMax) return nanoseconds(dense + other);
  return nanoseconds(dense * (is_head ? head_factor_ : dense_factor_) + other * attention_factor_);
}

StepTimes CostModel::step_ns(const StepProgram& program) const {
  StepTimes out{.rows = program.rows};
  const auto part = [&](const StepOps& ops) { return part_ns(ops, false, program.rows); };
  out.reduce = program.reduce_bytes > 0 ? all_reduce_ns(program.reduce_bytes) : 0;
  out.prologue = part(program.prologue);
  out.epilogue = part(program.epilogue);
  out.head = part_ns(program.head, true, 1);
  for (const LayerProgram& layer : program.layers)
    out.layers.push_back({.mixer = part(layer.mixer),
                          .router = part(layer.router),
                          .shared = part(layer.shared),
                          .combine = part(layer.combine),
                          .write = part(layer.write)});
  return out;
}

StepParts CostModel::parts_ns(const StepProgram& program) const {
  double dense = 0, other = 0, head = 0;
  const auto add = [&](const StepOps& ops) {
    for (const StepOp& op : ops) (op.k > 0 ? dense : other) += seconds(op);
  };
  add(program.prologue);
  add(program.epilogue);
  for (const LayerProgram& layer : program.layers)
    for (const StepOps* ops : {&layer.mixer, &layer.router, &layer.shared, &layer.combine, &layer.write}) add(*ops);
  for (const StepOp& op : program.head) head += seconds(op);
  const auto reduces = static_cast<int64_t>(2 * program.layers.size());
  return {nanoseconds(dense), nanoseconds(other), nanoseconds(head),
          program.reduce_bytes > 0 ? reduces * all_reduce_ns(program.reduce_bytes) : 0};
}

bool CostModel::calibrate(const StepProgrammer& programmer) {
  if (!machine_.calibration) return false;
  const Calibration& measured = *machine_.calibration;
  const RoutingShape shape = programmer.routing_shape();
  if (programmer.spec().hidden != measured.hidden || shape.layers != measured.layers ||
      shape.experts != measured.experts || world_ != measured.world || programmer.world() != world_ ||
      !programmer.spec().model_type.starts_with(measured.model_type) ||
      programmer.spec().context_max <= measured.context)
    return false;
  const StepProgrammer at_context(programmer.spec(), world_, measured.context + 1);
  dense_factor_ = attention_factor_ = head_factor_ = 1;
  const StepParts roofs = parts_ns(at_context.program(1, measured.context));
  dense_factor_ = measured.dense_s * 1e9 / static_cast<double>(roofs.dense);
  attention_factor_ = measured.attention_s * 1e9 / static_cast<double>(roofs.attention);
  head_factor_ = measured.lm_head_s * 1e9 / static_cast<double>(roofs.lm_head);
  expert_bytes_per_s_ =
      static_cast<double>(measured.expert_runs * programmer.expert_shape().block_bytes()) / measured.experts_s;
  return true;
}

CostModel CostModel::on(const Machine& machine) const {
  CostModel out(machine, math_, world_);
  out.dense_factor_ = dense_factor_;
  out.attention_factor_ = attention_factor_;
  out.head_factor_ = head_factor_;
  out.expert_bytes_per_s_ =
      expert_bytes_per_s_ * machine.device.memory_bytes_per_s / machine_.device.memory_bytes_per_s;
  return out;
}

// n links that copy at once: rate x (1 + (n - 1) x additive) in all.
double CostModel::link_bytes_per_s() const {
  const auto n = static_cast<double>(world_);
  return machine_.link.h2d_bytes_per_s * (1 + (n - 1) * machine_.link.additive) / n;
}

int64_t CostModel::copy_ns(int64_t bytes) const {
  if (!has_link() || bytes == 0) return 0;
  return nanoseconds(machine_.link.copy_overhead_s + static_cast<double>(bytes) / link_bytes_per_s());
}

// Linear between the measured sizes and beyond them; the smallest holds below.
int64_t CostModel::all_reduce_ns(int64_t bytes) const {
  const std::vector<CollectivePoint>& points = machine_.collective;
  if (world_ == 1 || points.empty()) return 0;
  if (bytes <= points.front().bytes || points.size() == 1) return nanoseconds(points.front().duration_s);
  size_t i = 1;
  while (i + 1 < points.size() && points[i].bytes < bytes) ++i;
  const CollectivePoint &a = points[i - 1], &b = points[i];
  const double share = static_cast<double>(bytes - a.bytes) / static_cast<double>(b.bytes - a.bytes);
  return nanoseconds(a.duration_s + share * (b.duration_s - a.duration_s));
}

int64_t CostModel::expert_ns(const ExpertShape& shape, int64_t rows) const {
  if (rows <= kCanonicalRowsMax && expert_bytes_per_s_ > 0)
    return nanoseconds(static_cast<double>(shape.block_bytes()) / expert_bytes_per_s_);
  const int64_t down_bytes = shape.block_bytes() - shape.gate_up_bytes();
  const int64_t row_bytes = rows * shape.hidden * dtype_bytes(shape.dtype);
  return nanoseconds(2 * machine_.device.launch_gap_s +
                     gemm_seconds(rows, 2 * shape.intermediate, shape.hidden, shape.gate_up_bytes() + row_bytes) +
                     gemm_seconds(rows, shape.hidden, shape.intermediate, down_bytes + row_bytes));
}

int64_t CostModel::batch_ns(int64_t rows) const {
  if (rows <= kCanonicalRowsMax && expert_bytes_per_s_ > 0) return 0;  // measured as a whole
  return nanoseconds(2 * machine_.device.launch_gap_s);
}

int64_t CostModel::expert_zero_copy_ns(const ExpertShape& shape, int64_t rows) const {
  if (!has_link()) return expert_ns(shape, rows);
  const double link_s = static_cast<double>(shape.block_bytes()) / (link_bytes_per_s() * kZeroCopyEfficiency);
  return std::max(expert_ns(shape, rows), nanoseconds(link_s));
}

// The cores of the host serve all ranks, one expert after another at the whole rate.
int64_t CostModel::expert_host_ns(const ExpertShape& shape, int64_t rows) const {
  OFL_ASSERT(has_host());
  const HostRates& host = machine_.host;
  const double rate = host.dram_with_h2d_bytes_per_s > 0 ? host.dram_with_h2d_bytes_per_s : host.dram_bytes_per_s;
  const double memory_s = static_cast<double>(shape.block_bytes()) / rate;
  const double flops = static_cast<double>(rows) * 6.0 * static_cast<double>(shape.intermediate * shape.hidden);
  return nanoseconds(std::max(memory_s, host.fma_flops > 0 ? flops / host.fma_flops : 0));
}

int64_t CostModel::wait_ns() const {
  return nanoseconds(machine_.host.wait_s);
}

int64_t CostModel::plan_ns() const {
  return nanoseconds(machine_.host.plan_s);
}

int64_t CostModel::launch_ns() const {
  return nanoseconds(machine_.host.launch_s);
}

}  // namespace offload
