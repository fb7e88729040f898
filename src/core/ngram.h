// Hashed n-gram row ids: token ids of one sequence -> rows of the n-gram table.
//
// Pure integer arithmetic, 64-bit wrap-around (spec: splitmix mixing, one prime per hash head). Immutable, thread-safe.
#ifndef OFFLOAD_CORE_NGRAM_H_
#define OFFLOAD_CORE_NGRAM_H_

#include <cstdint>
#include <span>
#include <vector>

#include "core/model_spec.h"

namespace offload {

class NgramHash {
 public:
  NgramHash(const NgramEmbeddingSpec& spec, int64_t vocab);

  int64_t heads() const { return static_cast<int64_t>(primes_.size()); }
  int64_t context() const { return static_cast<int64_t>(multipliers_.size()) - 1; }  // predecessors that count
  int64_t table_rows() const { return table_rows_; }                                 // padded to the divisor

  // The constants as checkpoints store them.
  std::span<const int64_t> multipliers() const { return multipliers_; }
  std::span<const int64_t> primes() const { return primes_; }
  std::span<const int64_t> offsets() const { return offsets_; }

  // rows[t * heads() + h] for each t. `previous`: the raw ids before tokens[0], oldest first, context() of them; before
  // a sequence's start they are the EOS id. A predecessor that is EOS hides itself and all older ones.
  void row_ids(std::span<const int32_t> previous, std::span<const int32_t> tokens, std::span<int64_t> rows) const;

 private:
  int64_t heads_per_ngram_;
  int32_t eos_id_;
  int64_t table_rows_ = 0;
  std::vector<int64_t> multipliers_, primes_, offsets_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_NGRAM_H_
