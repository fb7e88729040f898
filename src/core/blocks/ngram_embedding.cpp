#include "core/blocks/ngram_embedding.h"

#include <fmt/format.h>
#include <algorithm>

namespace offload {
namespace {

// The checkpoint stores the hash constants as I64; a model run with others would look up wrong rows without an error.
void check_constants(const WeightSource& source, const std::string& name, std::span<const int64_t> computed) {
  if (source.tensors() == nullptr) return;
  const TensorEntry& entry = source.tensors()->at(name);
  if (entry.dtype != DType::i64 || entry.shape != std::vector<int64_t>{static_cast<int64_t>(computed.size())})
    throw_error(ErrorCode::input, "{}: tensor {} is {} [{}], expected I64 [{}]", source.tensors()->origin(),
                printable(entry.name), dtype_name(entry.dtype), fmt::join(entry.shape, ", "), computed.size());
  std::vector<int64_t> stored(computed.size());
  source.read(entry, 0, std::as_writable_bytes(std::span(stored)));
  for (size_t i = 0; i < stored.size(); ++i)
    if (stored[i] != computed[i])
      throw_error(ErrorCode::input,
                  "{}: tensor {}[{}] is {}, config.json gives {}; config and weights do not belong together",
                  source.tensors()->origin(), printable(entry.name), i, stored[i], computed[i]);
}

}  // namespace

NgramEmbedding::NgramEmbedding(const ModelSpec& spec, const NgramEmbeddingSpec& ngram, const std::string& prefix,
                               WeightLoader& loader, StateLayout& layout)
    : hash_(ngram, spec.vocab),
      table_stem_(prefix + "ple_embedding.ngram_embedding"),
      width_(ngram.width),
      streams_(spec.hyper.streams),
      hidden_(spec.hidden),
      taps_(ngram.conv_taps),
      dilation_(ngram.ngram_size),
      eps_(spec.rms_eps) {
  check_constants(loader.source(), prefix + "ple_embedding.layer_multipliers", hash_.multipliers());
  check_constants(loader.source(), prefix + "ple_embedding.ngram_heads_vocab_sizes", hash_.primes());
  check_constants(loader.source(), prefix + "ple_embedding.ngram_heads_offsets", hash_.offsets());
  const int64_t stack_width = streams_ * hidden_;
  in_ = loader.matrix(
      {{prefix + "key_proj.weight", stack_width, width_}, {prefix + "value_proj.weight", hidden_, width_}});
  const auto norm = [&](const char* name) {
    return loader.vector(prefix + name, {stack_width}).reshaped({streams_, hidden_});
  };
  norm_key_ = norm("norm_key.weight");
  norm_query_ = norm("norm_query.weight");
  norm_conv_ = norm("norm_conv.weight");
  conv_ = loader.vector(prefix + "conv1d.weight", {stack_width, 1, taps_}).reshaped({stack_width, taps_});
  history_ = layout.add(prefix + "conv_history", layout.activations(), dilation_ * (taps_ - 1), stack_width);
  layout.keep_recent_ids(hash_.context(), ngram.eos_id);
}

void NgramEmbedding::fetch(const Step& step) {
  const int64_t rows = step.rows();
  fetched_ = step.arena.take(table_dtype_, {rows, width_});
  fetched_first_ = step.first;
  if (step.ops.planning()) {
    gathered_bytes_ = std::max(gathered_bytes_, fetched_.bytes());
    return;
  }
  Lane& lane = step.backend.copy_lane();
  // A host that waits for nothing in a step may be here before the lane has come to the last step's rows.
  if (*gather_waits_) lane.drain();
  row_ids_.resize(static_cast<size_t>(rows * hash_.heads()));
  gathering_ = {static_cast<std::byte*>(gathered_.data()), static_cast<size_t>(fetched_.bytes())};
  const std::vector<int32_t>& recent = step.sequence.recent_ids();
  hash_.row_ids(std::span(recent).last(static_cast<size_t>(hash_.context())), step.tokens, row_ids_);
  *gather_waits_ = true;
  lane.call([](void* self) { static_cast<NgramEmbedding*>(self)->gather(); }, this);
  // The arena's memory may still be read by the step before.
  step.backend.compute_lane().record(begun_event_);
  lane.wait(begun_event_);
  lane.copy_in(gathering_, fetched_);
  lane.record(arrived_event_);
}

void NgramEmbedding::add_to(const Step& step, const Tensor& stack) {
  const ArenaScope scope(step.arena);
  const int64_t rows = step.rows(), stack_width = streams_ * hidden_;
  const Tensor embedded = step.arena.take(step.dtype(), {rows, width_});
  if (!step.ops.planning()) step.backend.compute_lane().wait(arrived_event_);
  step.ops(CopyArgs{fetched_.narrow(0, step.first - fetched_first_, rows), embedded});
  const Tensor projected = step.linear(embedded, in_);
  const auto take = [&] { return step.arena.take(step.dtype(), {rows, stack_width}); };
  const auto norm = [&](const Tensor& x, const Tensor& w) {
    const Tensor out = take();
    step.ops(RmsNormArgs{.x = x.split_last(hidden_),
                         .w = w,
                         .out = out.split_last(hidden_),
                         .eps = eps_,
                         .weight = NormWeight::one_plus,
                         .rounding = step.rounding()});
    return out;
  };
  const Tensor key = norm(projected.narrow(1, 0, stack_width), norm_key_);
  const Tensor query = norm(stack, norm_query_);
  const Tensor gated = take();
  step.ops(SignedRootGateArgs{.key = key.split_last(hidden_),
                              .query = query.split_last(hidden_),
                              .value = projected.narrow(1, stack_width, hidden_),
                              .out = gated.split_last(hidden_),
                              .rounding = step.rounding()});
  const Tensor normed = norm(gated, norm_conv_);
  const Tensor mixed = take();
  const Tensor history = step.sequence.tensor(history_);
  step.ops(CausalConvSiluArgs{.x = normed,
                              .w = conv_,
                              .history = history.reshaped({history.dim(0), stack_width}),
                              .out = mixed,
                              .dilation = dilation_,
                              .rounding = step.rounding()});
  step.ops(AddArgs{gated, mixed, mixed});
  step.ops(AddArgs{stack, mixed, stack});
}

}  // namespace offload
