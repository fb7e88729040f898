// RamTable: a row table (n-gram embeddings) held in host memory, read as experts are: see DirectReader.
#ifndef OFFLOAD_OFFLOAD_HOST_TABLE_H_
#define OFFLOAD_OFFLOAD_HOST_TABLE_H_

#include <string>
#include <vector>

#include "core/experts.h"
#include "core/host_memory.h"
#include "offload/direct_reader.h"

namespace offload {

class RamTable final : public HostTable {
 public:
  // Validates the table STEM.shard_{k}.weight (or STEM.weight) against [rows, columns]; loads nothing. Throws
  // Error{input}.
  RamTable(const WeightSource& source, std::string stem, int64_t rows, int64_t columns);

  int64_t bytes() const { return rows_ * row_bytes(); }
  // Allocates and fills the table, with `reader.threads` threads. `progress` may throw to stop, and so may an Error of
  // a read; nothing is left then. Beside the table it takes the reader's staging bytes.
  void load(const DirectReaderOptions& reader, const LoadProgressSink& progress);
  // How the files were read; all zero when none were.
  const ReadReport& read_report() const { return report_; }

  DType dtype() const override { return dtype_; }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void gather(std::span<const int64_t> ids, std::span<std::byte> out) override;

 private:
  // Its parts in row order.
  std::vector<TensorEntry> parts() const;
  int64_t row_bytes() const { return columns_ * dtype_bytes(dtype_); }

  const WeightSource& source_;
  std::string stem_;
  int64_t rows_, columns_;
  DType dtype_ = DType::bf16;
  HostMemory memory_;
  ReadReport report_;
};

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_HOST_TABLE_H_
