#include "offload/budget.h"

#include <algorithm>
#include <limits>

#include "core/base.h"

namespace offload {
namespace {

constexpr size_t kRowsShown = 4;  // of a refusal, which is one line

int64_t saturating_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", value / 0x1p30);
  if (bytes >= int64_t{1} << 20) return fmt::format("{:.2f} MiB", value / 0x1p20);
  if (bytes >= int64_t{1} << 10) return fmt::format("{:.2f} KiB", value / 0x1p10);
  return fmt::format("{} bytes", bytes);
}

std::string MemoryPlace::name() const {
  switch (kind) {
    case Kind::ram:
      return "RAM";
    case Kind::vram:
      return fmt::format("VRAM of rank {}", rank);
  }
  return "";
}

void Budget::limit(MemoryPlace where, int64_t bytes, std::string origin) {
  OFL_ASSERT(bytes >= 0);
  limits_.push_back({where, bytes, std::move(origin)});
}

void Budget::add(std::string tag, int64_t bytes, MemoryPlace where, MemoryRemedy remedy) {
  OFL_ASSERT(bytes >= 0);
  rows_.push_back({std::move(tag), bytes, where, std::move(remedy)});
}

int64_t Budget::total(MemoryPlace where) const {
  int64_t sum = 0;
  for (const Row& row : rows_)
    if (row.where == where) sum = saturating_sum(sum, row.bytes);
  return sum;
}

// The tightest.
const Budget::Limit* Budget::limit_of(MemoryPlace where) const {
  const Limit* found = nullptr;
  for (const Limit& limit : limits_)
    if (limit.where == where && (found == nullptr || limit.bytes < found->bytes)) found = &limit;
  return found;
}

// The first remedy that is enough alone, else the smallest set of the largest ones, else the truth.
std::string Budget::advice(const Limit& limit, int64_t excess_bytes) const {
  std::vector<const MemoryRemedy*> remedies;
  for (const Row& row : rows_)
    if (row.where == limit.where && !row.remedy.advice.empty() && row.remedy.saves_bytes > 0)
      remedies.push_back(&row.remedy);
  for (const MemoryRemedy* remedy : remedies)
    if (remedy->saves_bytes >= excess_bytes) return remedy->advice;
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const auto* a, const auto* b) { return a->saves_bytes > b->saves_bytes; });
  std::string text;
  int64_t saved = 0;
  for (const MemoryRemedy* remedy : remedies) {
    if (saved >= excess_bytes) break;
    text += (text.empty() ? "" : " and ") + remedy->advice;
    saved = saturating_sum(saved, remedy->saves_bytes);
  }
  if (saved >= excess_bytes) return text;
  if (limit.origin.starts_with("--")) return fmt::format("raise {}", limit.origin);
  return "no flag saves that much; free memory, raise the limit or use a machine with more";
}

void Budget::require_fit() const {
  for (const Limit& each : limits_) {
    const Limit& limit = *limit_of(each.where);
    const int64_t sum = total(limit.where);
    if (sum <= limit.bytes) continue;
    std::vector<const Row*> rows;
    for (const Row& row : rows_)
      if (row.where == limit.where) rows.push_back(&row);
    std::stable_sort(rows.begin(), rows.end(), [](const Row* a, const Row* b) { return a->bytes > b->bytes; });
    std::string parts;
    for (size_t i = 0; i < std::min(rows.size(), kRowsShown); ++i)
      parts += fmt::format("{}{} {}", i == 0 ? "" : ", ", rows[i]->tag, bytes_text(rows[i]->bytes));
    if (rows.size() > kRowsShown) parts += fmt::format(" and {} more", rows.size() - kRowsShown);
    throw_error(ErrorCode::resource, "{} needed: {} ({}), available: {} ({}), short by {}; {}", limit.where.name(),
                bytes_text(sum), parts, bytes_text(limit.bytes), limit.origin, bytes_text(sum - limit.bytes),
                advice(limit, sum - limit.bytes));
  }
}

std::string Budget::table() const {
  std::vector<MemoryPlace> places;
  const auto note = [&](MemoryPlace where) {
    if (std::find(places.begin(), places.end(), where) == places.end()) places.push_back(where);
  };
  for (const Row& row : rows_) note(row.where);
  for (const Limit& limit : limits_) note(limit.where);
  std::string text;
  for (const MemoryPlace& place : places) {
    text += fmt::format("{}\n", place.name());
    for (const Row& row : rows_)
      if (row.where == place) text += fmt::format("  {:<28} {:>12}\n", row.tag, bytes_text(row.bytes));
    text += fmt::format("  {:<28} {:>12}\n", "sum", bytes_text(total(place)));
    if (const Limit* limit = limit_of(place))
      text += fmt::format("  {:<28} {:>12}  ({})\n", "available", bytes_text(limit->bytes), limit->origin);
  }
  return text;
}

}  // namespace offload
