// Budget: every byte that a plan will take, by purpose and place, checked before the first one is taken.
//
// A ledger: it allocates nothing and reads nothing of the machine (see system_memory.h). One thread.
#ifndef OFFLOAD_OFFLOAD_BUDGET_H_
#define OFFLOAD_OFFLOAD_BUDGET_H_

#include <cstdint>
#include <string>
#include <vector>

namespace offload {

// Host memory, shared by all ranks, or the device memory of one rank.
struct MemoryPlace {
  enum class Kind { ram, vram } kind = Kind::ram;
  int rank = 0;  // of vram

  static MemoryPlace ram() { return {}; }
  static MemoryPlace vram(int rank) { return {Kind::vram, rank}; }
  std::string name() const;  // "RAM", "VRAM of rank 2"
  friend bool operator==(const MemoryPlace&, const MemoryPlace&) = default;
};

// What a user can do about a row: `flag`, put as advice ("lower --context"), saves up to `saves_bytes`.
struct MemoryRemedy {
  std::string advice;
  int64_t saves_bytes = 0;
};

class Budget {
 public:
  // `bytes` may be used at `where`; `origin` says who says so ("/proc/meminfo", "--ram-budget"). A place without a
  // limit holds everything.
  void limit(MemoryPlace where, int64_t bytes, std::string origin);

  // REQUIRES: bytes >= 0. Sums saturate.
  void add(std::string tag, int64_t bytes, MemoryPlace where, MemoryRemedy remedy = {});

  int64_t total(MemoryPlace where) const;

  // Throws Error{resource} for the first place whose sum exceeds its limit: the sum, the largest rows, what is
  // available and says who, and the advice that makes it fit.
  void require_fit() const;

  // Rows by place with sums and limits, for --dry-run. Lines end in '\n'.
  std::string table() const;

 private:
  struct Row {
    std::string tag;
    int64_t bytes;
    MemoryPlace where;
    MemoryRemedy remedy;
  };
  struct Limit {
    MemoryPlace where;
    int64_t bytes;
    std::string origin;
  };

  const Limit* limit_of(MemoryPlace where) const;
  std::string advice(const Limit& limit, int64_t excess_bytes) const;

  std::vector<Row> rows_;
  std::vector<Limit> limits_;
};

// "56.25 GiB", "9.38 MiB", "12 bytes"
std::string bytes_text(int64_t bytes);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_BUDGET_H_
