#include "core/token_table.h"

#include <functional>

#include "core/base.h"

namespace offload {
namespace {

constexpr size_t kSlotsMin = 1024;

uint32_t hash_of(std::string_view text) {
  return static_cast<uint32_t>(std::hash<std::string_view>{}(text));
}

}  // namespace

size_t TokenTable::slot_of(std::string_view text, uint32_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  while (slots_[slot].entry >= 0) {
    if (slots_[slot].hash == hash && text_of(entries_[static_cast<size_t>(slots_[slot].entry)]) == text) break;
    slot = (slot + 1) & mask;
  }
  return slot;
}

void TokenTable::grow() {
  std::vector<Slot> old(slots_.empty() ? kSlotsMin : slots_.size() * 2);
  old.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (const Slot& moved : old) {
    if (moved.entry < 0) continue;
    size_t slot = moved.hash & mask;
    while (slots_[slot].entry >= 0) slot = (slot + 1) & mask;
    slots_[slot] = moved;
  }
}

TokenTable::Inserted TokenTable::insert(std::string_view text, int32_t id) {
  OFL_ASSERT(id >= 0 && arena_.size() + text.size() <= UINT32_MAX);
  if ((entries_.size() + 1) * 2 > slots_.size()) grow();
  const uint32_t hash = hash_of(text);
  const size_t slot = slot_of(text, hash);
  if (slots_[slot].entry >= 0) return Inserted::text_exists;
  const auto index = static_cast<size_t>(id);
  if (index < entry_of_id_.size() && entry_of_id_[index] >= 0) return Inserted::id_exists;
  if (index >= entry_of_id_.size()) entry_of_id_.resize(index + 1, -1);
  slots_[slot] = {hash, static_cast<int32_t>(entries_.size())};
  entry_of_id_[index] = slots_[slot].entry;
  entries_.push_back({static_cast<uint32_t>(arena_.size()), static_cast<uint32_t>(text.size()), id});
  arena_.append(text);
  return Inserted::yes;
}

std::optional<int32_t> TokenTable::find(std::string_view text) const {
  if (slots_.empty()) return std::nullopt;
  const int32_t entry = slots_[slot_of(text, hash_of(text))].entry;
  if (entry < 0) return std::nullopt;
  return entries_[static_cast<size_t>(entry)].id;
}

std::optional<std::string_view> TokenTable::text(int32_t id) const {
  if (id < 0 || id >= id_end() || entry_of_id_[static_cast<size_t>(id)] < 0) return std::nullopt;
  return text_of(entries_[static_cast<size_t>(entry_of_id_[static_cast<size_t>(id)])]);
}

}  // namespace offload
