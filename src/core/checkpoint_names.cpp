#include "core/checkpoint_names.h"

#include <fmt/format.h>
#include <algorithm>
#include <charconv>

namespace offload {

std::optional<std::string_view> text_name(std::string_view name) {
  for (const std::string_view prefix : {"model.language_model.", "language_model.", "model."})
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  if (name.starts_with("visual.")) return std::nullopt;
  return name;
}

TextTensors::TextTensors(std::span<const TensorEntry> tensors, std::string_view origin) : origin_(origin) {
  items_.reserve(tensors.size());
  for (const TensorEntry& tensor : tensors)
    if (const auto name = text_name(tensor.name)) items_.push_back({*name, &tensor});
  std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return std::pair<std::string_view, std::string_view>(a.name, a.tensor->name) <
           std::pair<std::string_view, std::string_view>(b.name, b.tensor->name);
  });
  const auto repeated =
      std::adjacent_find(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.name == b.name; });
  if (repeated != items_.end())
    throw_error(ErrorCode::input, "{}: tensors {} and {} both resolve to {}", printable(origin_, 4096),
                printable(repeated[0].tensor->name), printable(repeated[1].tensor->name), printable(repeated->name));
}

const TensorEntry* TextTensors::find(std::string_view name) const {
  const auto found = std::lower_bound(items_.begin(), items_.end(), name,
                                      [](const Item& item, std::string_view key) { return item.name < key; });
  return found != items_.end() && found->name == name ? found->tensor : nullptr;
}

const TensorEntry& TextTensors::at(std::string_view name) const {
  if (const TensorEntry* found = find(name)) return *found;
  std::vector<std::string_view> names;
  names.reserve(items_.size());
  for (const Item& item : items_) names.push_back(item.name);
  throw_missing_tensor(origin_, name, names);
}

namespace {

struct Shard {
  int64_t number;
  const TensorEntry* tensor;
};

// k of "{k}.weight": decimal without sign or leading zero, so that each k has one spelling.
std::optional<int64_t> shard_number(std::string_view text) {
  if (!text.ends_with(".weight")) return std::nullopt;
  text.remove_suffix(7);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool plain = !text.empty() && text[0] >= '0' && text[0] <= '9' && (text[0] != '0' || text.size() == 1);
  if (error != std::errc() || end != text.data() + text.size() || !plain) return std::nullopt;
  return number;
}

// All `STEM.shard_{k}.weight` in numeric order of k, which must run 0, 1, ... without a gap.
std::vector<const TensorEntry*> numbered_shards(const TextTensors& tensors, std::string_view stem) {
  const std::string prefix = fmt::format("{}.shard_", stem);
  const std::string origin = printable(tensors.origin(), 4096);
  std::vector<Shard> found;
  const auto items = tensors.items();
  auto item = std::lower_bound(items.begin(), items.end(), std::string_view(prefix),
                               [](const TextTensors::Item& a, std::string_view key) { return a.name < key; });
  for (; item != items.end() && item->name.starts_with(prefix); ++item) {
    const auto number = shard_number(item->name.substr(prefix.size()));
    if (!number)
      throw_error(ErrorCode::input, "{}: tensor {}: expected {}NUMBER.weight", origin, printable(item->tensor->name),
                  printable(prefix));
    found.push_back({*number, item->tensor});
  }
  std::sort(found.begin(), found.end(), [](const Shard& a, const Shard& b) { return a.number < b.number; });
  std::vector<const TensorEntry*> shards;
  for (const Shard& shard : found) {
    if (shard.number != std::ssize(shards))
      throw_error(ErrorCode::input, "{}: tensor {}{}.weight is missing, but {} exists; fetch the checkpoint again",
                  origin, printable(prefix), shards.size(), printable(shard.tensor->name));
    shards.push_back(shard.tensor);
  }
  return shards;
}

}  // namespace

RowTable::RowTable(const TextTensors& tensors, std::string_view stem) : shards_(numbered_shards(tensors, stem)) {
  const std::string origin = printable(tensors.origin(), 4096);
  const std::string whole_name = fmt::format("{}.weight", stem);
  if (const TensorEntry* whole = tensors.find(whole_name)) {
    if (!shards_.empty())
      throw_error(ErrorCode::input, "{}: tensors {} and {} are two forms of one table; expected only one", origin,
                  printable(whole->name), printable(shards_.front()->name));
    shards_.push_back(whole);
  }
  if (shards_.empty()) tensors.at(fmt::format("{}.shard_0.weight", stem));
  row_begin_.push_back(0);
  const TensorEntry& first = *shards_.front();
  for (const TensorEntry* shard : shards_) {
    if (shard->shape.size() != 2)
      throw_error(ErrorCode::input, "{}: tensor {} has shape [{}], expected [rows, columns]", origin,
                  printable(shard->name), fmt::join(shard->shape, ", "));
    if (shard->shape[1] != first.shape[1] || shard->dtype != first.dtype)
      throw_error(ErrorCode::input, "{}: tensor {} is {} with {} columns, but {} is {} with {}", origin,
                  printable(shard->name), dtype_name(shard->dtype), shard->shape[1], printable(first.name),
                  dtype_name(first.dtype), first.shape[1]);
    int64_t end = 0;
    if (__builtin_add_overflow(row_begin_.back(), shard->shape[0], &end))
      throw_error(ErrorCode::input, "{}: tensor {} has {} rows, more than a table can count", origin,
                  printable(shard->name), shard->shape[0]);
    row_begin_.push_back(end);
  }
}

RowTable::Location RowTable::locate(int64_t row) const {
  OFL_ASSERT(row >= 0 && row < rows());
  // The last shard that begins at or before the row; shards of zero rows are stepped over.
  const auto after = std::upper_bound(row_begin_.begin(), row_begin_.end(), row);
  const auto shard = static_cast<size_t>(after - row_begin_.begin() - 1);
  return {shards_[shard], row - row_begin_[shard]};
}

}  // namespace offload
