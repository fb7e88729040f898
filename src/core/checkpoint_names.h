// From the names that a model asks for to the tensors of a checkpoint: prefixes of text models, and tables that are
// stored as numbered row shards.
//
// Pure: works on entries, reads no file and owns none of them. Does not know which tensors a model needs. Thread-safe.
#ifndef OFFLOAD_CORE_CHECKPOINT_NAMES_H_
#define OFFLOAD_CORE_CHECKPOINT_NAMES_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint.h"

namespace offload {

// `name` relative to the text model: the prefixes `model.language_model.`, `language_model.` and `model.` are stripped,
// each at most once and in this order. "lm_head.weight" and "mtp.*" have none to strip; `model.mtp.*` becomes `mtp.*`.
// Nothing for a vision tensor (`visual.*` after stripping).
std::optional<std::string_view> text_name(std::string_view name);

// The text tensors of one checkpoint by text_name(). REQUIRES: the entries outlive it.
class TextTensors {
 public:
  // `origin` (the checkpoint's path) opens every message. Throws Error{input} naming both tensors when two resolve to
  // the same name.
  TextTensors(std::span<const TensorEntry> tensors, std::string_view origin);

  const TensorEntry* find(std::string_view name) const;

  // Throws Error{input} naming the missing tensor, the checkpoint and the nearest names it has.
  const TensorEntry& at(std::string_view name) const;

  struct Item {
    std::string_view name;  // relative to the text model; a view into tensor->name
    const TensorEntry* tensor;
  };
  // Sorted by name.
  std::span<const Item> items() const { return items_; }

  const std::string& origin() const { return origin_; }

 private:
  std::string origin_;
  std::vector<Item> items_;
};

// A [rows, columns] table stored as `STEM.shard_{k}.weight`, k = 0, 1, ... concatenated along rows in numeric order of
// k, or unsplit as `STEM.weight`. REQUIRES: the entries outlive it.
class RowTable {
 public:
  // Heights come from the headers; every height is legal. Throws Error{input} naming the tensor for a gap in the
  // numbers, a malformed number, both forms at once, neither, a rank other than 2, or shards that differ in columns or
  // type.
  RowTable(const TextTensors& tensors, std::string_view stem);

  struct Location {
    const TensorEntry* tensor;
    int64_t row;  // within tensor
  };
  // REQUIRES: 0 <= row < rows().
  Location locate(int64_t row) const;

  int64_t rows() const { return row_begin_.back(); }
  int64_t columns() const { return shards_.front()->shape[1]; }
  DType dtype() const { return shards_.front()->dtype; }
  int64_t row_bytes() const { return columns() * dtype_bytes(dtype()); }
  // In numeric order; one when the table is unsplit.
  std::span<const TensorEntry* const> shards() const { return shards_; }

 private:
  std::vector<const TensorEntry*> shards_;
  std::vector<int64_t> row_begin_;  // [shards + 1], from 0 to rows()
};

}  // namespace offload

#endif  // OFFLOAD_CORE_CHECKPOINT_NAMES_H_
