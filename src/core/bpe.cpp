#include "core/bpe.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "core/base.h"
#include "core/byte_alphabet.h"
#include "core/unicode.h"

namespace offload {
namespace {

constexpr size_t kCachedWordsMin = 64;
constexpr size_t kCachedWordsMax = 16384;  // 1 MiB, about the size of an L2 cache
constexpr size_t kTextBytesPerCachedWord = 16;

uint64_t mix(uint64_t key) {
  key *= 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio (Knuth, TAOCP 3, 6.4)
  return key ^ key >> 32;
}

}  // namespace

BpeScratch::BpeScratch(size_t text_bytes) {
  size_t words = kCachedWordsMin;
  while (words < kCachedWordsMax && words * kTextBytesPerCachedWord < text_bytes) words *= 2;
  cache_.resize(words);
}

BpeModel::BpeModel(TokenTable vocab, std::vector<BpeMerge> merges, BpeOptions options)
    : vocab_(std::move(vocab)), merges_(std::move(merges)), options_(options) {
  for (size_t byte = 0; byte < 256; ++byte) {
    const char character = static_cast<char>(byte);
    id_of_byte_[byte] = vocab_.find(to_byte_alphabet({&character, 1})).value_or(-1);
    fallback_of_byte_[byte] = vocab_.find(fmt::format("<0x{:02X}>", byte)).value_or(-1);
  }
  size_t slots = 16;
  while (slots < merges_.size() * 2) slots *= 2;
  pairs_.resize(slots);
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    const BpeMerge& merge = merges_[rank];
    pairs_[pair_slot(merge.left, merge.right)] = {merge.left, merge.right, static_cast<int32_t>(rank)};
  }
}

size_t BpeModel::pair_slot(int32_t left, int32_t right) const {
  const size_t mask = pairs_.size() - 1;
  size_t slot = mix(static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right)) & mask;
  while (pairs_[slot].rank >= 0 && (pairs_[slot].left != left || pairs_[slot].right != right)) slot = (slot + 1) & mask;
  return slot;
}

int32_t BpeModel::rank_of(int32_t left, int32_t right) const {
  return pairs_[pair_slot(left, right)].rank;
}

void BpeModel::encode(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  if (word.size() > sizeof(BpeScratch::CachedWord::word)) return encode_uncached(word, scratch, ids);
  auto& cached = scratch.cache_[mix(std::hash<std::string_view>{}(word)) & (scratch.cache_.size() - 1)];
  if (cached.size == word.size() && std::memcmp(cached.word, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), cached.ids, cached.ids + cached.ids_size);
    return;
  }
  const size_t ids_before = ids.size();
  encode_uncached(word, scratch, ids);
  const size_t count = ids.size() - ids_before;
  if (count > std::size(cached.ids)) return;
  cached.size = static_cast<uint8_t>(word.size());
  cached.ids_size = static_cast<uint8_t>(count);
  std::memcpy(cached.word, word.data(), word.size());
  std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(ids_before), count, cached.ids);
}

void BpeModel::encode_uncached(std::string_view word, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (options_.ignore_merges) {
    const auto whole = options_.byte_level ? vocab_.find(to_byte_alphabet(word)) : vocab_.find(word);
    if (whole) return ids.push_back(*whole);
  }
  split_into_symbols(word, scratch);
  merge_symbols(scratch);
  for (const BpeScratch::Symbol& symbol : scratch.symbols_)
    if (symbol.id >= 0) ids.push_back(symbol.id);
}

void BpeModel::split_into_symbols(std::string_view word, BpeScratch& scratch) const {
  scratch.symbols_.clear();
  bool after_unknown = false;
  const auto add = [&](int32_t id) {
    const auto index = static_cast<int32_t>(scratch.symbols_.size());
    scratch.symbols_.push_back({id, index - 1, index + 1});
  };
  const auto add_unknown = [&](std::string_view symbol) {
    const auto has_fallback = [&](char byte) { return fallback_of_byte_[static_cast<uint8_t>(byte)] >= 0; };
    if (options_.byte_fallback && std::all_of(symbol.begin(), symbol.end(), has_fallback)) {
      for (const char byte : symbol) add(fallback_of_byte_[static_cast<uint8_t>(byte)]);
      after_unknown = false;
    } else if (options_.unk_id) {
      if (!after_unknown || !options_.fuse_unk) add(*options_.unk_id);
      after_unknown = true;
    }
  };
  size_t length = 1;
  for (size_t at = 0; at < word.size(); at += length) {
    int32_t id;
    if (options_.byte_level) {
      id = id_of_byte_[static_cast<uint8_t>(word[at])];
    } else {
      length = static_cast<size_t>(first_code_point(word.substr(at)).length);
      id = vocab_.find(word.substr(at, length)).value_or(-1);
    }
    if (id >= 0) {
      add(id);
      after_unknown = false;
    } else if (options_.byte_level) {
      add_unknown(to_byte_alphabet(word.substr(at, 1)));
    } else {
      add_unknown(word.substr(at, length));
    }
  }
  if (!scratch.symbols_.empty()) scratch.symbols_.back().next = -1;
}

void BpeModel::push_pair(BpeScratch& scratch, int32_t left_index, int32_t right_index) const {
  const int32_t rank = rank_of(scratch.symbols_[static_cast<size_t>(left_index)].id,
                               scratch.symbols_[static_cast<size_t>(right_index)].id);
  if (rank >= 0) scratch.heap_.push_back(static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(left_index));
}

void BpeModel::merge_symbols(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols_;
  auto& heap = scratch.heap_;
  const std::greater<uint64_t> lowest_first;
  heap.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i)
    push_pair(scratch, static_cast<int32_t>(i), static_cast<int32_t>(i + 1));
  std::make_heap(heap.begin(), heap.end(), lowest_first);
  const auto push = [&](int32_t left_index, int32_t right_index) {
    const size_t before = heap.size();
    push_pair(scratch, left_index, right_index);
    if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), lowest_first);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), lowest_first);
    const BpeMerge& merge = merges_[heap.back() >> 32];
    const auto left_index = static_cast<int32_t>(heap.back() & 0xFFFFFFFFu);
    heap.pop_back();
    auto& left = symbols[static_cast<size_t>(left_index)];
    // An entry is stale once either symbol has changed since it was pushed.
    if (left.id != merge.left || left.next < 0) continue;
    auto& right = symbols[static_cast<size_t>(left.next)];
    if (right.id != merge.right) continue;
    left.id = merge.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = left_index;
    if (left.previous >= 0) push(left.previous, left_index);
    if (left.next >= 0) push(left_index, left.next);
  }
}

}  // namespace offload
