// RamTable: a row table (n-gram embeddings) held in host memory.
#ifndef OFFLOAD_OFFLOAD_HOST_TABLE_H_
#define OFFLOAD_OFFLOAD_HOST_TABLE_H_

#include <functional>
#include <string>

#include "core/experts.h"
#include "core/host_memory.h"

namespace offload {

class RamTable final : public HostTable {
 public:
  // Validates the table STEM.shard_{k}.weight (or STEM.weight) against [rows, columns]; loads nothing. Throws
  // Error{input}.
  RamTable(const WeightSource& source, std::string stem, int64_t rows, int64_t columns);

  int64_t bytes() const { return rows_ * row_bytes(); }
  void load(const std::function<void(int64_t bytes)>& progress);

  DType dtype() const override { return dtype_; }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void gather(std::span<const int64_t> ids, std::span<std::byte> out) override;

 private:
  int64_t row_bytes() const { return columns_ * dtype_bytes(dtype_); }

  const WeightSource& source_;
  std::string stem_;
  int64_t rows_, columns_;
  DType dtype_ = DType::bf16;
  HostMemory memory_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_HOST_TABLE_H_
