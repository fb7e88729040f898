// Token texts and their ids, both ways: one arena of bytes, one flat hash table.
//
// Made for a quarter of a million short strings: loading is dominated by it. Refuses erasing. Thread rule: immutable
// once filled.
#ifndef OFFLOAD_CORE_TOKEN_TABLE_H_
#define OFFLOAD_CORE_TOKEN_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace offload {

class TokenTable {
 public:
  enum class Inserted { yes, text_exists, id_exists };
  // REQUIRES: 0 <= id. Leaves the table unchanged unless `yes`.
  Inserted insert(std::string_view text, int32_t id);

  std::optional<int32_t> find(std::string_view text) const;
  // Text of `id`, or nullopt for a hole or an id past the end. Valid until the next insert.
  std::optional<std::string_view> text(int32_t id) const;

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  // Largest id + 1; 0 when empty.
  int32_t id_end() const { return static_cast<int32_t>(entry_of_id_.size()); }

 private:
  struct Entry {
    uint32_t offset, length;  // into arena_
    int32_t id;
  };
  // The hash beside the index spares a look at an entry, a miss of memory, for nearly every other token on the way.
  struct Slot {
    uint32_t hash = 0;
    int32_t entry = -1;  // -1: empty
  };
  std::string_view text_of(const Entry& entry) const { return {arena_.data() + entry.offset, entry.length}; }
  // Slot that holds `text`, or the empty one where it belongs.
  size_t slot_of(std::string_view text, uint32_t hash) const;
  void grow();

  std::string arena_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;           // size is a power of two, at most half full
  std::vector<int32_t> entry_of_id_;  // entry index or -1
};

}  // namespace offload

#endif  // OFFLOAD_CORE_TOKEN_TABLE_H_
