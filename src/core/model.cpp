#include "core/model.h"

#include <algorithm>
#include <array>

namespace offload {
namespace {

// Rows of the first of two halves: whole tiles of what most kernels take at once.
int64_t first_half(int64_t rows) {
  constexpr int64_t kRowStep = 8;
  return std::min(rows, (rows / 2 + kRowStep - 1) / kRowStep * kRowStep);
}

// In how many parts a chunk of so many rows passes a layer.
int halves_of(const Step& step, int64_t rows) {
  return step.collective != nullptr && rows >= step.overlap_rows_min && first_half(rows) < rows ? 2 : 1;
}

std::string layer_prefix(size_t i) {
  return fmt::format("layers.{}.", i);
}

}  // namespace

std::vector<ExpertLayer> Model::expert_layers(const ModelSpec& spec) {
  std::vector<ExpertLayer> layers;
  for (size_t i = 0; i < spec.layers.size(); ++i) layers.push_back({layer_prefix(i) + "mlp.experts"});
  return layers;
}

ExpertShape Model::expert_shape(const ModelSpec& spec, DType dtype) {
  const MoeSpec& moe = spec.layers.front().moe;
  return {moe.experts, spec.hidden, moe.intermediate, dtype};
}

Model::Model(const ModelSpec& spec, RankSlice slice, WeightLoader& loader, StateLayout& layout)
    : spec_(spec),
      embedding_(loader.matrix({{"embed_tokens.weight", spec.vocab, spec.hidden}})),
      vocab_{spec.vocab * slice.rank / slice.world,
             spec.vocab * (slice.rank + 1) / slice.world - spec.vocab * slice.rank / slice.world},
      lm_head_(loader.matrix({{"lm_head.weight", spec.vocab, spec.hidden, {vocab_}}})),
      inv_freq_(loader.constant(spec.rope.inv_freq)),
      final_mixer_(spec, HyperConnection::Role::final_mixer, "hyper_connection_mixer.", loader) {
  layers_.reserve(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    const std::string prefix = layer_prefix(i);
    using Role = HyperConnection::Role;
    std::optional<NgramEmbedding> ngram;
    if (layer.ngram) ngram.emplace(spec, *layer.ngram, prefix + "ple.", loader, layout);
    const auto mixer = [&]() -> std::variant<GatedDeltaNet, Qsa> {
      if (const auto* net = std::get_if<GatedDeltaNetSpec>(&layer.mixer))
        return GatedDeltaNet(spec, *net, prefix + "linear_attn.", slice, loader, layout);
      const QsaSpec& qsa = std::get<QsaSpec>(layer.mixer);
      block_ratio_ = qsa.ratio;
      return Qsa(spec, qsa, prefix + "self_attn.", slice, loader, layout);
    };
    layers_.push_back(
        Layer{std::move(ngram), HyperConnection(spec, Role::around_block, prefix + "attn_hyper_connection.", loader),
              mixer(), HyperConnection(spec, Role::around_block, prefix + "mlp_hyper_connection.", loader),
              Moe(spec, layer.moe, static_cast<int64_t>(i), prefix + "mlp.", slice, loader)});
  }
}

std::vector<NgramEmbedding*> Model::table_users() {
  std::vector<NgramEmbedding*> users;
  for (Layer& layer : layers_)
    if (layer.ngram) users.push_back(&*layer.ngram);
  return users;
}

void Model::fill_rope(Step& step) const {
  const int64_t half = inv_freq_.dim(0);
  const auto fill = [&](const Tensor& out, int64_t first, int64_t stride) {
    step.ops(RopeTableArgs{.inv_freq = inv_freq_,
                           .out = out,
                           .first = first,
                           .step = stride,
                           .scale = spec_.rope.scale,
                           .round_to = step.dtype()});
    return out;
  };
  step.rope = fill(step.arena.take(DType::f32, {step.rows(), half, 2}), step.first, 1);
  if (block_ratio_ == 0) return;
  const int64_t first_block = step.first / block_ratio_;
  const int64_t completed = (step.first + step.rows()) / block_ratio_ - first_block;
  const Tensor blocks = step.arena.take(DType::f32, {step.rows() / block_ratio_ + 1, half, 2});
  step.rope_blocks = fill(blocks.narrow(0, 0, completed), first_block * block_ratio_, block_ratio_);
}

// Rows [begin, begin + rows) of the step.
Step Model::chunk_of(const Step& step, int64_t begin, int64_t rows) const {
  Step chunk = step;
  chunk.tokens = step.tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(rows));
  chunk.first = step.first + begin;
  chunk.rope = step.rope.narrow(0, begin, rows);
  if (block_ratio_ > 0) {
    const int64_t blocks_before = chunk.first / block_ratio_, blocks_after = (chunk.first + rows) / block_ratio_;
    chunk.rope_blocks =
        step.rope_blocks.narrow(0, blocks_before - step.first / block_ratio_, blocks_after - blocks_before);
  }
  return chunk;
}

void Model::Layer::start_mixer(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y,
                               const Tensor& inject) {
  mixer_connection.read(step, stack, x, inject);
  std::visit([&](const auto& block) { block.forward(step, x, y); }, mixer);
}

void Model::Layer::start_experts(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y,
                                 const Tensor& inject) {
  moe_connection.read(step, stack, x, inject);
  moe.forward(step, x, y);
}

// x, y [rows, hidden] and inject [rows, streams] are for its use.
void Model::Layer::forward(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y,
                           const Tensor& inject) {
  if (ngram) ngram->add_to(step, stack);
  start_mixer(step, stack, x, y, inject);
  mixer_connection.write(step, stack, y, inject);
  start_experts(step, stack, x, y, inject);
  moe_connection.write(step, stack, y, inject);
}

Tensor Model::forward(Step& step, int64_t chunk, const LayerTap& tap) {
  const int64_t rows = step.rows(), hidden = spec_.hidden, rows_max = std::min(chunk, rows);
  OFL_ASSERT(chunk >= 1);
  const Tensor stacks = step.arena.take(step.dtype(), {rows, spec_.hyper.streams * hidden});
  const ArenaScope scope(step.arena);
  const Tensor ids = step.arena.take(DType::i32, {rows});
  for (Layer& layer : layers_)
    if (layer.ngram) layer.ngram->fetch(step);
  if (!step.ops.planning()) step.backend.upload(std::as_bytes(step.tokens), ids);
  fill_rope(step);
  step.ops(GatherRowsArgs{.table = embedding_, .ids = ids, .out = stacks, .copies = spec_.hyper.streams});

  if (halves_of(step, rows_max) == 2) {
    forward_by_halves(step, chunk, stacks, tap);
    if (!step.ops.planning()) step.sequence.advance(step.tokens);
    return stacks;
  }
  const Tensor x = step.arena.take(step.dtype(), {rows_max, hidden});
  const Tensor y = step.arena.take(step.dtype(), {rows_max, hidden});
  const Tensor inject = final_mixer_.take_inject(step, rows_max);
  const bool sums_repeat = step.collective == nullptr || step.collective->runs_on_device(hidden);
  if (rows == 1 && sums_repeat && !step.ops.planning() && !step.ops.observed()) {
    forward_one_row(chunk_of(step, 0, 1), stacks, x, y, inject, tap);
    step.sequence.advance(step.tokens);
    return stacks;
  }
  // A plan needs one chunk: the last rows, which see the most positions.
  const int64_t first_row = step.ops.planning() ? rows - rows_max : 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (int64_t begin = first_row; begin < rows; begin += chunk) {
      Step part = chunk_of(step, begin, std::min(chunk, rows - begin));
      part.visits_left = (rows - begin - part.rows() + chunk - 1) / chunk;
      const Tensor stack = stacks.narrow(0, begin, part.rows());
      layers_[i].forward(part, stack, x.narrow(0, 0, part.rows()), y.narrow(0, 0, part.rows()),
                         inject.narrow(0, 0, part.rows()));
      if (tap && !step.ops.planning()) tap(i, stack);
    }
  }
  if (!step.ops.planning()) step.sequence.advance(step.tokens);
  return stacks;
}

// Work of one row that is alike for every token, whatever its position and its experts, from one thing that is not to
// the next: the device repeats a stretch by itself.
class Model::Stretch {
 public:
  enum class Part : uint8_t { mix, choose, share, run_experts, combine };

  Stretch(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y, const Tensor& inject)
      : step_(step), stack_(stack), x_(x), y_(y), inject_(inject) {}

  void add(Layer& layer, Part part) { pieces_.push_back({&layer, part}); }

  // Has the device do what was added.
  void end() {
    if (pieces_.empty()) return;
    step_.backend.repeat(key(), [&] {
      for (const Piece& piece : pieces_) issue(piece);
    });
    pieces_.clear();
  }

 private:
  struct Piece {
    Layer* layer;
    Part part;
  };

  // A number that is the same when the same pieces meet the same memory again.
  uint64_t key() const {
    uint64_t key = 0;
    const auto mix = [&](uint64_t value) { key = (key ^ value) * 0x100000001B3u + (key >> 29); };
    const auto mix_address = [&](const void* address) { mix(reinterpret_cast<uintptr_t>(address)); };
    mix_address(stack_.data());
    mix_address(step_.sequence.tensor(0).data());
    mix(static_cast<uint64_t>(step_.arena.used_bytes()));
    mix(static_cast<uint64_t>(step_.rounding()));
    for (const Piece& piece : pieces_) {
      mix_address(piece.layer);
      mix(static_cast<uint64_t>(piece.part));
    }
    return key;
  }

  void issue(const Piece& piece) {
    Layer& layer = *piece.layer;
    switch (piece.part) {
      case Part::mix:
        layer.start_mixer(step_, stack_, x_, y_, inject_);
        return layer.mixer_connection.write(step_, stack_, y_, inject_);
      case Part::choose:
        layer.moe_connection.read(step_, stack_, x_, inject_);
        return layer.moe.choose(step_, x_);
      case Part::share:
        return layer.moe.share(step_);
      case Part::run_experts:
        return layer.moe.run_experts(step_, x_);
      case Part::combine:
        layer.moe.combine(step_, y_);
        return layer.moe_connection.write(step_, stack_, y_, inject_);
    }
  }

  const Step& step_;
  const Tensor &stack_, &x_, &y_, &inject_;
  std::vector<Piece> pieces_;
};

// As Layer::forward() for each layer. The host comes in where rows of a table arrive, where work depends on the
// position and, unless the device knows where all experts are, where it has the experts run that were chosen.
void Model::forward_one_row(const Step& step, const Tensor& stack, const Tensor& x, const Tensor& y,
                            const Tensor& inject, const LayerTap& tap) {
  using Part = Stretch::Part;
  Stretch stretch(step, stack, x, y, inject);
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    if (layer.ngram) {
      stretch.end();
      layer.ngram->add_to(step, stack);
    }
    if (std::holds_alternative<Qsa>(layer.mixer)) {
      stretch.end();
      layer.start_mixer(step, stack, x, y, inject);
      layer.mixer_connection.write(step, stack, y, inject);
    } else {
      stretch.add(layer, Part::mix);
    }
    stretch.add(layer, Part::choose);
    if (step.experts.runs_on_device()) {
      stretch.add(layer, Part::run_experts);
      stretch.add(layer, Part::share);
    } else {
      // Beside the choice, as the device has nothing to do while the host plans.
      stretch.add(layer, Part::share);
      stretch.end();
      layer.moe.run_experts(step, x);
    }
    stretch.add(layer, Part::combine);
    if (tap) {
      stretch.end();
      tap(i, stack);
    }
  }
  stretch.end();
}

int64_t Model::visits(const Step& step, int64_t chunk) {
  int64_t visits = 0;
  for (int64_t begin = 0; begin < step.rows(); begin += chunk)
    visits += halves_of(step, std::min(chunk, step.rows() - begin));
  return visits;
}

// Half a chunk on its way through the layers.
struct Model::Half {
  Tensor x, y;    // [rows, hidden] A
  Tensor inject;  // [rows, streams]
  DeferredSum sum;

  // The sub-layer whose sum is under way; no part: none is.
  std::optional<Step> part = {};
  Tensor stack = {};
  const HyperConnection* connection = nullptr;
  std::optional<size_t> layer_done = {};  // the layer that ends with it

  void end(const LayerTap& tap) {
    if (!part) return;
    const int64_t rows = part->rows();
    const Tensor out = y.narrow(0, 0, rows);
    part->finish_sum(sum, out);
    connection->write(*part, stack, out, inject.narrow(0, 0, rows));
    if (layer_done && tap && !part->ops.planning()) tap(*layer_done, stack);
    part.reset();
  }
};

// Both halves take a sub-layer in turn; while the sum of one is under way, the device works on the other. A half's sum
// is finished when its next sub-layer is due, which may be the next layer's.
void Model::forward_by_halves(const Step& step, int64_t chunk, const Tensor& stacks, const LayerTap& tap) {
  const int64_t rows = step.rows(), hidden = spec_.hidden, rows_max = std::min(chunk, rows);
  // A last chunk that is not halved passes in the first half's memory.
  const int64_t half_rows = std::max(first_half(rows_max), std::min(rows_max, step.overlap_rows_min - 1));
  const auto take_half = [&] {
    return Half{.x = step.arena.take(step.dtype(), {half_rows, hidden}),
                .y = step.arena.take(step.dtype(), {half_rows, hidden}),
                .inject = final_mixer_.take_inject(step, half_rows),
                .sum = {step.arena.take(DType::f32, {half_rows, hidden})}};
  };
  std::array<Half, 2> halves{take_half(), take_half()};
  const int64_t first_row = step.ops.planning() ? rows - rows_max : 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    int64_t visits_left = visits(step, chunk);
    for (int64_t begin = first_row; begin < rows; begin += chunk) {
      const int64_t chunk_rows = std::min(chunk, rows - begin);
      const int count = halves_of(step, chunk_rows);
      const int64_t split = count == 2 ? first_half(chunk_rows) : chunk_rows;
      visits_left -= count;
      for (const bool is_mixer : {true, false}) {
        for (int h = 0; h < count; ++h) {
          Half& half = halves[static_cast<size_t>(h)];
          half.end(tap);
          if (count == 1) halves[1].end(tap);
          const int64_t part_rows = h == 0 ? split : chunk_rows - split;
          Step& part = half.part.emplace(chunk_of(step, begin + h * split, part_rows));
          part.deferred = &half.sum;
          part.visits_left = visits_left + count - 1 - h;
          half.stack = stacks.narrow(0, begin + h * split, part_rows);
          half.connection = is_mixer ? &layer.mixer_connection : &layer.moe_connection;
          half.layer_done = is_mixer ? std::optional<size_t>() : i;
          const Tensor x = half.x.narrow(0, 0, part_rows), y = half.y.narrow(0, 0, part_rows);
          const Tensor inject = half.inject.narrow(0, 0, part_rows);
          if (is_mixer && layer.ngram) layer.ngram->add_to(part, half.stack);
          if (is_mixer)
            layer.start_mixer(part, half.stack, x, y, inject);
          else
            layer.start_experts(part, half.stack, x, y, inject);
        }
      }
    }
  }
  for (Half& half : halves) half.end(tap);
}

void Model::read_out(const Step& step, const Tensor& stack, const Tensor& hidden) const {
  final_mixer_.read(step, stack, hidden, {});
}

}  // namespace offload
