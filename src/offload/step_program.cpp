#include "offload/step_program.h"

#include <algorithm>

#include "core/model.h"
#include "core/op_parts.h"

namespace offload {
namespace {

// Notes ops by the part of the step that they belong to. Always in planning mode: executing is a bug.
class NotingOps final : public Ops {
 public:
  void begin(StepProgram& program) {
    program_ = &program;
    part_ = Part::prologue;
    reset_cost();
  }
  void begin_experts() {
    OFL_ASSERT(part_ == Part::router);
    part_ = Part::shared;
  }
  void begin_head() { part_ = Part::head; }
  // The final mixer reads the stack after the last layer's write: it is no layer of its own.
  void end_layers() {
    OFL_ASSERT(part_ == Part::mixer && !program_->layers.empty());
    program_->epilogue = std::move(program_->layers.back().mixer);
    program_->layers.pop_back();
  }

 private:
  enum class Part : uint8_t { prologue, mixer, router, shared, combine, write, head };

#define OFL_NOTE_OP(Args, name)                            \
  void execute(const Args&) override {                     \
    OFL_ASSERT(planning());                                \
  }                                                        \
  int64_t scratch_bytes(const Args& args) const override { \
    const_cast<NotingOps*>(this)->note(args);              \
    return 0;                                              \
  }
  OFL_FOR_EACH_OP(OFL_NOTE_OP)
#undef OFL_NOTE_OP

  // As its parts: what they cost is known by their shapes.
  void note(const HyperReadArgs& args) {
    Arena none;
    for_each_part(args, HyperReadScratch(none, args, 0), [this](const auto& part) { note(part); });
  }
  template <typename Args>
  void note(const Args& args) {
    if constexpr (std::is_same_v<Args, StreamWriteArgs>) {
      // What a block adds to the stack has just been all-reduced; in the activations' dtype, as published (a backend
      // that reduces F32 parts moves twice that).
      program_->reduce_bytes = args.y.bytes();
      part_ = part_ == Part::mixer ? Part::router : Part::write;
    }
    if constexpr (std::is_same_v<Args, MoeCombineArgs>) part_ = Part::combine;
    StepOp op{op_name(&args), cost(args)};
    if constexpr (std::is_same_v<Args, LinearArgs>) {
      op.m = args.x.dim(0);
      op.n = args.w.dim(0);
      op.k = args.w.dim(1);
    }
    ops_of_part().push_back(op);
    if constexpr (std::is_same_v<Args, StreamWriteArgs>)
      if (part_ == Part::write) next_layer();
    if constexpr (std::is_same_v<Args, GatherRowsArgs>)
      if (part_ == Part::prologue) next_layer();
  }

  void next_layer() {
    program_->layers.emplace_back();
    part_ = Part::mixer;
  }

  StepOps& ops_of_part() {
    switch (part_) {
      case Part::prologue:
        return program_->prologue;
      case Part::mixer:
        return program_->layers.back().mixer;
      case Part::router:
        return program_->layers.back().router;
      case Part::shared:
        return program_->layers.back().shared;
      case Part::combine:
        return program_->layers.back().combine;
      case Part::write:
        return program_->layers.back().write;
      case Part::head:
        return program_->head;
    }
    OFL_ASSERT(false);
    return program_->head;
  }

  StepProgram* program_ = nullptr;
  Part part_ = Part::prologue;
};

// Planning issues nothing on lanes.
class NoLane final : public Lane {
 public:
  void copy_in(std::span<const std::byte>, const Tensor&) override { OFL_ASSERT(false); }
  void call(void (*)(void*), void*) override { OFL_ASSERT(false); }
  void record(int) override { OFL_ASSERT(false); }
  void wait(int) override { OFL_ASSERT(false); }
  void drain() override { OFL_ASSERT(false); }
};

// A device with no memory: planning touches none.
class NoDevice final : public Backend {
 public:
  std::string_view name() const override { return "plan"; }
  bool uses_host_memory() const override { return true; }
  Buffer allocate(int64_t, std::string_view) override {
    OFL_ASSERT(false);
    return {};
  }
  Buffer allocate_host(int64_t bytes, std::string_view tag) override { return allocate(bytes, tag); }
  Ops& ops() override { return ops_; }
  NotingOps& noting() { return ops_; }
  void create_events(int) override {}
  Lane& compute_lane() override { return lane_; }
  Lane& copy_lane() override { return lane_; }
  void upload(std::span<const std::byte>, const Tensor&) override { OFL_ASSERT(false); }
  void download(const Tensor&, std::span<std::byte>) override { OFL_ASSERT(false); }
  void fill_zero(const Tensor&) override { OFL_ASSERT(false); }

 private:
  void release(void*, int64_t) noexcept override {}
  NotingOps ops_;
  NoLane lane_;
};

class ExpertsMarker final : public ExpertRunner {
 public:
  explicit ExpertsMarker(NotingOps& ops) : ops_(ops) {}
  DType parts_dtype(DType activations) const override { return activations; }
  void run(const RoutedExperts&) override { ops_.begin_experts(); }

 private:
  NotingOps& ops_;
};

void require_divisible(int64_t value, std::string_view what, int64_t world) {
  if (value % world != 0)
    throw_error(ErrorCode::usage, "{} ranks do not divide the model's {} {}; choose another --tp", world, value, what);
}

void check_world(const ModelSpec& spec, int64_t world) {
  if (world < 1 || world > 64) throw_error(ErrorCode::usage, "{} ranks: expected 1 to 64", world);
  for (const LayerSpec& layer : spec.layers) {
    require_divisible(layer.moe.shared_intermediate, "columns of the shared expert", world);
    require_divisible(layer.moe.intermediate, "columns of an expert", world);
    if (const auto* net = std::get_if<GatedDeltaNetSpec>(&layer.mixer)) {
      require_divisible(net->key_heads, "key heads", world);
      require_divisible(net->value_heads, "value heads", world);
    } else {
      const QsaSpec& qsa = std::get<QsaSpec>(layer.mixer);
      require_divisible(qsa.query_heads, "query heads", world);
      // As spec/ states for the families known: a rank's query heads lie in one group, or are whole groups.
      const int64_t group = qsa.query_heads / qsa.kv_heads, own = qsa.query_heads / world;
      if (own % group != 0 && group % own != 0)
        throw_error(ErrorCode::usage, "{} ranks give each {} query heads, which cut the model's groups of {}", world,
                    own, group);
    }
  }
}

}  // namespace

struct StepProgrammer::Planned {
  explicit Planned(int64_t context, DType activations)
      : source(dummy_source(0)), loader(*source, device, weights), layout(context, activations) {}

  NoDevice device;
  std::unique_ptr<WeightSource> source;
  Arena weights;
  WeightLoader loader;
  StateLayout layout;
  std::unique_ptr<Model> model;
};

StepProgrammer::StepProgrammer(const ModelSpec& spec, int64_t world, int64_t context, const Arithmetic& arithmetic)
    : spec_(spec), world_(world), context_(context), arithmetic_(arithmetic) {
  check_world(spec_, world_);
  if (context < 1 || context > spec_.context_max)
    throw_error(ErrorCode::usage, "a context of {} positions is outside 1..{}, the model's own", context,
                spec_.context_max);
  planned_ = std::make_unique<Planned>(context_, arithmetic_.activations);
  planned_->device.ops().set_planning(true);
  planned_->model =
      std::make_unique<Model>(spec_, RankSlice{0, static_cast<int>(world_)}, planned_->loader, planned_->layout);
  weight_bytes_ = planned_->weights.peak_bytes();
  sequence_bytes_ = planned_->layout.bytes();
}

StepProgrammer::~StepProgrammer() = default;

StepProgram StepProgrammer::run(int64_t rows, int64_t first, int64_t chunk, int64_t& peak_bytes) const {
  OFL_ASSERT(rows >= 1 && chunk >= 1 && first >= 0 && first + rows <= context_);
  StepProgram program{.rows = rows};
  NotingOps& ops = planned_->device.noting();
  ops.begin(program);
  ExpertsMarker experts(ops);
  SequenceState sequence(planned_->layout);
  Arena arena;
  const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
  Step step{.backend = planned_->device,
            .ops = ops,
            .arena = arena,
            .experts = experts,
            .sequence = sequence,
            .arithmetic = arithmetic_,
            .tokens = tokens,
            .first = first};
  const Tensor stack = planned_->model->forward(step, chunk).narrow(0, 0, std::min(chunk, rows));
  const Tensor hidden = arena.take(step.dtype(), {stack.dim(0), spec_.hidden});
  planned_->model->read_out(step, stack, hidden);
  ops.end_layers();
  ops.begin_head();
  const Tensor& lm_head = planned_->model->lm_head();
  ops(LinearArgs{hidden.narrow(0, 0, 1), lm_head, arena.take(DType::f32, {1, lm_head.dim(0)})});
  if (world_ == 1) program.reduce_bytes = 0;
  OFL_ASSERT(program.layers.size() == spec_.layers.size());
  peak_bytes = arena.peak_bytes();
  return program;
}

StepProgram StepProgrammer::program(int64_t rows, int64_t first) const {
  int64_t peak_bytes = 0;
  return run(rows, first, rows, peak_bytes);
}

int64_t StepProgrammer::workspace_bytes(int64_t rows) const {
  int64_t peak_bytes = 0;
  run(rows, context_ - rows, rows, peak_bytes);
  return peak_bytes;
}

int64_t StepProgrammer::stack_bytes(int64_t tokens, int64_t chunk) const {
  if (tokens <= chunk) return 0;
  int64_t peak_bytes = 0;
  run(tokens, context_ - tokens, chunk, peak_bytes);
  return peak_bytes - workspace_bytes(chunk);
}

RoutingShape StepProgrammer::routing_shape() const {
  const MoeSpec& moe = spec_.layers.front().moe;
  return {static_cast<int64_t>(spec_.layers.size()), moe.experts, moe.top_k};
}

ExpertShape StepProgrammer::expert_shape() const {
  return Model::expert_shape(spec_, DType::bf16);
}

}  // namespace offload
