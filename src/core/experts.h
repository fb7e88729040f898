// Routed experts: where their bytes lie in a checkpoint, and the door through which blocks have them run.
//
// The policy of residency, caching and movement is behind ExpertRunner, in src/offload; blocks know only that door.
#ifndef OFFLOAD_CORE_EXPERTS_H_
#define OFFLOAD_CORE_EXPERTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/checkpoint_names.h"
#include "core/collective.h"
#include "core/ops.h"
#include "core/weights.h"

namespace offload {

// Sizes of one routed expert; the same for every expert of a model.
// Its block in memory: gate [intermediate, hidden], up [intermediate, hidden], down [hidden, intermediate], contiguous.
struct ExpertShape {
  int64_t experts = 0;  // per layer
  int64_t hidden = 0;
  int64_t intermediate = 0;
  DType dtype = DType::bf16;

  int64_t gate_up_bytes() const { return 2 * intermediate * hidden * dtype_bytes(dtype); }
  int64_t block_bytes() const { return 3 * intermediate * hidden * dtype_bytes(dtype); }
};

// One layer's experts in the checkpoint, under PREFIX (".../experts"): fused 3-D (PREFIX.gate_up_proj,
// PREFIX.down_proj) or one matrix per expert and projection (PREFIX.{e}.gate_proj.weight, .up_proj.weight,
// .down_proj.weight).
struct ExpertLayer {
  std::string prefix;
};

// How the ranks of a world share the experts. expert: whole experts by expert_id % world. slice: every expert's
// intermediate dimension in `world` equal parts, rank r holding part r of all.
enum class ShardForm { expert, slice };

// Part `index` of `count` equal parts of an expert's intermediate dimension; 0 of 1 is the whole expert.
struct ExpertSlice {
  int index = 0;
  int count = 1;
};

// `rows` runs of `row_bytes` bytes, the first at `tensor_offset` of the tensor and each `tensor_stride` bytes after the
// one before, belong one after another at `block_offset` of the block. One row when the bytes lie together.
struct ExpertPiece {
  TensorEntry tensor;
  int64_t tensor_offset = 0;
  int64_t row_bytes = 0;
  int64_t block_offset = 0;
  int64_t rows = 1;
  int64_t tensor_stride = 0;

  int64_t bytes() const { return rows * row_bytes; }
};

// The pieces of one slice of expert `expert` in block order: the slice's rows of gate and up, then its columns of down.
// The block is that of a small expert of intermediate / slice.count. REQUIRES: slice.count divides shape.intermediate.
// Throws Error{input} naming the tensor that is missing, of another shape or of another type than shape.dtype.
std::vector<ExpertPiece> expert_pieces(const WeightSource& source, const ExpertLayer& layer, const ExpertShape& shape,
                                       int64_t expert, ExpertSlice slice = {});

// The type of the experts' matrices in the checkpoint: BF16 or F32. Throws Error{input} naming another.
DType expert_dtype(const WeightSource& source, const ExpertLayer& layer);

// One layer's routed work. Tensors are on the device.
struct RoutedExperts {
  int64_t layer = 0;  // index among the layers with experts
  Tensor x;           // [rows, hidden] A
  Tensor ids;         // I32 [rows, K]
  Tensor parts;       // [rows * K, hidden] parts_dtype(): row r * K + s receives expert ids[r][s] applied to x[r]
  Tensor present;     // U8 [rows, K]: 1 where this rank wrote the part; left alone where it has all
  Rounding rounding = Rounding::fused;
  int64_t visits_left = 0;  // chunks of the same tokens that go through the same layer next
  Math math = Math::native;
};

class ExpertRunner {
 public:
  virtual ~ExpertRunner() = default;

  // The dtype of `parts` for activations of dtype `activations`: F32 where a part is not an expert's whole output.
  virtual DType parts_dtype(DType activations) const = 0;

  // Whether this rank writes a part for every expert.
  virtual bool has_all() const { return false; }

  // Whether run() has ops run and nothing else, all through the step: the host then need not see the routing.
  virtual bool runs_on_device() const { return false; }

  // Fills parts and present for the experts of this rank. In planning mode (Ops::planning) it asks the ops for the
  // largest scratch that any routing of these shapes can need.
  virtual void run(const RoutedExperts& step) = 0;
};

// Rows of a host-side table, for embeddings that are too large for a device.
class HostTable {
 public:
  virtual ~HostTable() = default;

  virtual DType dtype() const = 0;
  virtual int64_t rows() const = 0;
  virtual int64_t columns() const = 0;
  // out = the rows one after another. REQUIRES: ids in range, out exactly as large. Throws Error{input} when a read
  // fails.
  virtual void gather(std::span<const int64_t> ids, std::span<std::byte> out) = 0;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_EXPERTS_H_
