// Rows of a table arrive as their step asked for them, however late the copy lane comes to gathering them.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/blocks/ngram_embedding.h"
#include "core/models/registry.h"
#include "core/weights.h"
#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"

namespace offload::ngram_fetch_test {

namespace {

// Does nothing before it is drained.
class LateLane final : public Lane {
 public:
  void copy_in(std::span<const std::byte>, const Tensor&) override {}
  void call(void (*function)(void*), void* context) override {
    calls_.emplace_back([=] { function(context); });
  }
  void record(int) override {}
  void wait(int) override {}
  void drain() override {
    for (const auto& call : std::exchange(calls_, {})) call();
  }

 private:
  std::vector<std::function<void()>> calls_;
};

class LateDevice final : public Backend {
 public:
  std::string_view name() const override { return "late"; }
  bool uses_host_memory() const override { return true; }
  Buffer allocate(int64_t bytes, std::string_view tag) override { return cpu_.allocate(bytes, tag); }
  Buffer allocate_host(int64_t bytes, std::string_view tag) override { return cpu_.allocate_host(bytes, tag); }
  Ops& ops() override { return cpu_.ops(); }
  void create_events(int) override {}
  Lane& compute_lane() override { return compute_; }
  Lane& copy_lane() override { return copy_; }
  void upload(std::span<const std::byte>, const Tensor&) override {}
  void download(const Tensor&, std::span<std::byte>) override {}
  void fill_zero(const Tensor& tensor) override { cpu_.fill_zero(tensor); }

 private:
  void release(void*, int64_t) noexcept override {}
  cpu::CpuBackend cpu_{std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1})};
  LateLane compute_, copy_;
};

// Remembers what it was asked for.
class AskedTable final : public HostTable {
 public:
  AskedTable(int64_t rows, int64_t columns) : rows_(rows), columns_(columns) {}
  DType dtype() const override { return DType::f32; }
  int64_t rows() const override { return rows_; }
  int64_t columns() const override { return columns_; }
  void gather(std::span<const int64_t> ids, std::span<std::byte> out) override {
    CHECK(static_cast<int64_t>(out.size()) == std::ssize(ids) * columns_ * 4);
    asked.emplace_back(ids.begin(), ids.end());
  }
  std::vector<std::vector<int64_t>> asked;

 private:
  int64_t rows_, columns_;
};

class NoExperts final : public ExpertRunner {
 public:
  DType parts_dtype(DType activations) const override { return activations; }
  void run(const RoutedExperts&) override {}
};

// Fetches for prompts of these lengths, one after another, draining after each or at the end alone.
std::vector<std::vector<int64_t>> asked_for(const std::vector<int64_t>& lengths, bool drains_each) {
  const ModelSpec spec = load_model_spec(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
  const auto layer = std::find_if(spec.layers.begin(), spec.layers.end(), [](const auto& l) { return l.ngram; });
  REQUIRE(layer != spec.layers.end());
  const int64_t most = *std::max_element(lengths.begin(), lengths.end());
  LateDevice device;
  Arena planned;
  const auto source = dummy_source(0);
  device.ops().set_planning(true);
  WeightLoader loader(*source, device, planned);
  StateLayout layout(64, DType::bf16);
  NgramEmbedding ngram(spec, *layer->ngram, "ple.", loader, layout);
  AskedTable table(ngram.table_rows(), ngram.table_columns());
  ngram.set_table(table, 0);
  SequenceState sequence(layout, device);
  NoExperts experts;
  std::vector<int32_t> tokens(static_cast<size_t>(most));
  const auto fetch = [&](int64_t rows, Arena& arena) {
    ngram.fetch({.backend = device,
                 .ops = device.ops(),
                 .arena = arena,
                 .experts = experts,
                 .sequence = sequence,
                 .arithmetic = {.activations = DType::bf16},
                 .tokens = std::span(tokens).first(static_cast<size_t>(rows))});
  };
  fetch(most, planned);
  device.ops().set_planning(false);
  ngram.allocate(device);
  CHECK(ngram.gathered_bytes() == most * layer->ngram->width * 4);  // of the table's type
  for (const int64_t rows : lengths) {
    std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(100 * rows));
    const Buffer memory = device.allocate(1 << 20, "a step");
    Arena arena(memory.data(), memory.bytes());
    fetch(rows, arena);
    if (drains_each) device.copy_lane().drain();
  }
  device.copy_lane().drain();
  return table.asked;
}

}  // namespace

TEST_CASE("a_step_that_begins_before_the_last_ones_rows_are_gathered_leaves_those_alone") {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{8, 5}, {5, 8}, {8, 8, 1, 3}}) {
    const auto asked = asked_for(lengths, false);
    CHECK(std::ssize(asked) == std::ssize(lengths));
    CHECK(asked == asked_for(lengths, true));
  }
}

}  // namespace offload::ngram_fetch_test
