// Byte-pair encoding of one word: the merge table and the search for the lowest rank.
//
// Serves byte-level vocabularies (symbols start as bytes) and SentencePiece-style ones (symbols start as code points,
// with byte fallback). Does not split text into words and knows no added tokens. Thread rule: BpeModel is immutable;
// a BpeScratch belongs to one thread.
#ifndef OFFLOAD_CORE_BPE_H_
#define OFFLOAD_CORE_BPE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/token_table.h"

namespace offload {

struct BpeOptions {
  bool byte_level = true;      // words are raw bytes; the vocabulary is written in the byte alphabet
  bool ignore_merges = false;  // a word that is a token is that token, whatever the merges say
  bool byte_fallback = false;  // a symbol that is no token becomes its bytes' <0xHH> tokens
  bool fuse_unk = false;       // adjacent unknown symbols give one unknown token
  std::optional<int32_t> unk_id;
};

// Rank is the index in the list.
struct BpeMerge {
  int32_t left, right, merged;
};

// Working memory of encode() and a bounded cache of words; a cache never changes a result.
class BpeScratch {
 public:
  // `text_bytes` is the size of the text about to be encoded; it sizes the cache.
  explicit BpeScratch(size_t text_bytes);

 private:
  friend class BpeModel;

  struct Symbol {
    int32_t id, previous, next;  // neighbours by index, -1 at the ends; id is -1 once merged away
  };
  // One cache line, so that a hit costs one miss of memory.
  struct alignas(64) CachedWord {
    uint8_t size = 0;  // 0: empty slot
    uint8_t ids_size = 0;
    char word[30];
    int32_t ids[8];
  };

  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;     // rank << 32 | index of the left symbol
  std::vector<CachedWord> cache_;  // direct-mapped, size is a power of two
};

class BpeModel {
 public:
  BpeModel() = default;
  // `vocab` must hold every id of `merges`. A pair listed twice has its last rank.
  BpeModel(TokenTable vocab, std::vector<BpeMerge> merges, BpeOptions options);

  // Appends the ids of `word`. REQUIRES: valid UTF-8 unless byte_level. Time O(n log n), no recursion.
  void encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;

  const TokenTable& vocab() const { return vocab_; }
  const BpeOptions& options() const { return options_; }

 private:
  struct Pair {
    int32_t left = -1, right = -1;
    int32_t rank = -1;
  };
  int32_t rank_of(int32_t left, int32_t right) const;
  size_t pair_slot(int32_t left, int32_t right) const;
  void encode_uncached(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void split_into_symbols(std::string_view word, BpeScratch& scratch) const;
  void merge_symbols(BpeScratch& scratch) const;
  void push_pair(BpeScratch& scratch, int32_t left_index, int32_t right_index) const;

  TokenTable vocab_;
  std::vector<BpeMerge> merges_;
  std::vector<Pair> pairs_;                      // open addressing, size is a power of two
  std::array<int32_t, 256> id_of_byte_{};        // byte_level: the token of one byte, -1 if none
  std::array<int32_t, 256> fallback_of_byte_{};  // the token <0xHH>, -1 if none
  BpeOptions options_;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_BPE_H_
