// QSA: grouped-query attention over the blocks of positions that an indexer selects, plus the incomplete tail block,
// with a sigmoid gate on its output. Query heads are split over ranks; the indexer is replicated, so every rank selects
// alike.
#ifndef OFFLOAD_CORE_BLOCKS_QSA_H_
#define OFFLOAD_CORE_BLOCKS_QSA_H_

#include <string>

#include "core/model_spec.h"
#include "core/step.h"
#include "core/weights.h"

namespace offload {

class Qsa {
 public:
  Qsa(const ModelSpec& spec, const QsaSpec& qsa, const std::string& prefix, RankSlice slice, WeightLoader& loader,
      StateLayout& layout);

  // y = the mixer's output for x, both [rows, hidden]; appends to the sequence's caches.
  void forward(const Step& step, const Tensor& x, const Tensor& y) const;

 private:
  struct Selection {
    Tensor blocks, counts;  // empty: every visible position
  };
  void append_block_keys(const Step& step, const Tensor& raw_keys) const;
  Selection select(const Step& step, const Tensor& index_q) const;

  QsaSpec spec_;
  int64_t query_heads_, kv_heads_;  // of this rank
  float eps_;
  Tensor in_;  // [q and gate, alternating per head | k | v | index q | index k rows, hidden]
  Tensor q_norm_, k_norm_, index_q_norm_, index_k_norm_, out_;
  size_t keys_ = 0, values_ = 0, block_keys_ = 0, raw_tail_ = 0;  // in SequenceState
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BLOCKS_QSA_H_
