#include "core/ngram.h"

#include <algorithm>

namespace offload {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr uint64_t kLayerPrime = 10007;

uint64_t splitmix(uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

bool is_prime(int64_t n) {
  if (n < 4) return n >= 2;
  if (n % 2 == 0) return false;
  for (int64_t d = 3; d * d <= n; d += 2)
    if (n % d == 0) return false;
  return true;
}

}  // namespace

NgramHash::NgramHash(const NgramEmbeddingSpec& spec, int64_t vocab)
    : heads_per_ngram_(spec.heads_per_ngram), eos_id_(spec.eos_id) {
  // Keeps id * multiplier inside 63 bits.
  const uint64_t half = std::max<uint64_t>(1, ((uint64_t{1} << 63) - 1) / static_cast<uint64_t>(vocab) / 2);
  const uint64_t base = static_cast<uint64_t>(spec.seed) + kLayerPrime * static_cast<uint64_t>(spec.ordinal);
  for (int64_t i = 0; i < spec.ngram_size; ++i) {
    const uint64_t mixed = splitmix(base + kGolden * static_cast<uint64_t>(i + 1));
    multipliers_.push_back(static_cast<int64_t>(2 * (mixed % half) + 1));
  }
  const int64_t count = (spec.ngram_size - 1) * spec.heads_per_ngram;
  int64_t prime = spec.vocab_base - 1;
  for (int64_t skipped = 0; skipped < (spec.ordinal + 1) * count;) {
    if (!is_prime(++prime)) continue;
    if (skipped++ >= spec.ordinal * count) primes_.push_back(prime);
  }
  int64_t total = 0;
  for (const int64_t p : primes_) {
    offsets_.push_back(total);
    total += p;
  }
  table_rows_ = (total + spec.row_divisor - 1) / spec.row_divisor * spec.row_divisor;
}

void NgramHash::row_ids(std::span<const int32_t> previous, std::span<const int32_t> tokens,
                        std::span<int64_t> rows) const {
  OFL_ASSERT(static_cast<int64_t>(previous.size()) == context());
  OFL_ASSERT(static_cast<int64_t>(rows.size()) == static_cast<int64_t>(tokens.size()) * heads());
  const auto id_at = [&](int64_t t) {  // t < 0 reaches into `previous`
    return t >= 0 ? tokens[static_cast<size_t>(t)] : previous[static_cast<size_t>(context() + t)];
  };
  for (int64_t t = 0; t < static_cast<int64_t>(tokens.size()); ++t) {
    uint64_t mix = static_cast<uint64_t>(id_at(t)) * static_cast<uint64_t>(multipliers_[0]);
    bool cut = false;
    for (int64_t back = 1; back <= context(); ++back) {
      const int32_t id = cut ? eos_id_ : id_at(t - back);
      cut = id == eos_id_;
      mix ^= static_cast<uint64_t>(id) * static_cast<uint64_t>(multipliers_[static_cast<size_t>(back)]);
      for (int64_t i = 0; i < heads_per_ngram_; ++i) {
        const auto head = static_cast<size_t>((back - 1) * heads_per_ngram_ + i);
        rows[static_cast<size_t>(t * heads()) + head] = static_cast<int64_t>(mix) % primes_[head] + offsets_[head];
      }
    }
  }
}

}  // namespace offload
