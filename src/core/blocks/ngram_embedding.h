// Per-layer n-gram embedding: hashed n-grams of token ids fetch rows of a host-side table; a gate computed from the
// residual streams scales them, a dilated causal convolution mixes them over time, and the result is added to the
// streams. Replicated on all ranks.
#ifndef OFFLOAD_CORE_BLOCKS_NGRAM_EMBEDDING_H_
#define OFFLOAD_CORE_BLOCKS_NGRAM_EMBEDDING_H_

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/experts.h"
#include "core/model_spec.h"
#include "core/ngram.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class NgramEmbedding {
 public:
  // Throws Error{input} when the hash constants stored in the checkpoint are not those computed from the config.
  NgramEmbedding(const ModelSpec& spec, const NgramEmbeddingSpec& ngram, const std::string& prefix,
                 WeightLoader& loader, StateLayout& layout);

  // Type of the table's elements, for planning before set_table().
  void set_table_dtype(DType dtype) { table_dtype_ = dtype; }
  // The stem of the table's tensor names ("layers.1.ple.ple_embedding.ngram_embedding") and its size.
  const std::string& table_stem() const { return table_stem_; }
  int64_t table_rows() const { return hash_.table_rows(); }
  int64_t table_columns() const { return width_ / hash_.heads(); }
  // Events of the backend that the block uses for itself.
  static constexpr int kEvents = 2;
  // REQUIRES: before the first forward; rows and columns as above. The table outlives the model. Events first_event ...
  // first_event + kEvents - 1 are this block's own.
  void set_table(HostTable& table, int first_event) {
    table_ = &table;
    table_dtype_ = table.dtype();
    arrived_event_ = first_event;
    begun_event_ = first_event + 1;
  }
  int64_t gathered_bytes() const { return gathered_bytes_; }
  // Host memory, gathered_bytes(), for the rows of the largest step planned since. REQUIRES: before the first step that
  // runs.
  void allocate(Backend& backend) { gathered_ = backend.allocate_host(gathered_bytes_, "n-gram rows"); }

  // At the start of a step: has the copy lane gather the rows of all its tokens while the layers before this one run.
  // Its tensor lives in the step's arena until the last add_to().
  void fetch(const Step& step);

  // stack [rows, streams * hidden] += the embedding of the step's tokens. REQUIRES: fetch() of a step that they are
  // part of.
  void add_to(const Step& step, const Tensor& stack);

 private:
  void gather() {
    table_->gather(row_ids_, gathering_);
    *gather_waits_ = false;
  }

  NgramHash hash_;
  std::string table_stem_;
  int64_t width_, streams_, hidden_, taps_, dilation_;
  float eps_;
  Tensor in_;  // [key_proj | value_proj rows, width]
  Tensor norm_key_, norm_query_, norm_conv_, conv_;
  size_t history_ = 0;  // in SequenceState
  HostTable* table_ = nullptr;
  DType table_dtype_ = DType::bf16;
  int arrived_event_ = 0, begun_event_ = 0;
  Tensor fetched_;             // [rows, width] of the table's type
  int64_t fetched_first_ = 0;  // position of its first row
  // Written by the host for gather(), which the copy lane calls when it gets there.
  std::vector<int64_t> row_ids_;
  int64_t gathered_bytes_ = 0;
  Buffer gathered_;                 // host memory for the rows of the largest step
  std::span<std::byte> gathering_;  // of gathered_, this step's
  std::unique_ptr<std::atomic<bool>> gather_waits_ = std::make_unique<std::atomic<bool>>(false);
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BLOCKS_NGRAM_EMBEDDING_H_
