#include "offload/residency.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <set>

#include "offload/load_bench.h"
#include "offload/numa.h"
#include "synthetic_checkpoint.h"

namespace offload::residency_test {

namespace {

constexpr int kWorlds[] = {1, 2, 4, 8};
constexpr ShardForm kForms[] = {ShardForm::expert, ShardForm::slice};
constexpr ExpertShape kShape{.experts = 9, .hidden = 24, .intermediate = 40, .dtype = DType::bf16};

SyntheticExperts model_of(bool fused) {
  return {.shape = kShape, .layers = 2, .fused = fused, .files = 3};
}

// Whole matrices of one expert, read the plain way.
struct Matrices {
  std::vector<std::byte> gate, up, down;

  Matrices(const WeightSource& source, const SyntheticExperts& model, int64_t layer, int64_t expert) {
    const ExpertShape& s = model.shape;
    const std::string prefix = model.expert_layers()[static_cast<size_t>(layer)].prefix;
    const int64_t bytes = s.intermediate * s.hidden * dtype_bytes(s.dtype);
    const auto read = [&](const std::string& name, std::vector<int64_t> shape, int64_t offset) {
      std::vector<std::byte> out(static_cast<size_t>(bytes));
      source.read(source.require(name, shape), offset, out);
      return out;
    };
    if (model.fused) {
      const std::vector<int64_t> in = {s.experts, 2 * s.intermediate, s.hidden};
      gate = read(prefix + ".gate_up_proj", in, expert * 2 * bytes);
      up = read(prefix + ".gate_up_proj", in, expert * 2 * bytes + bytes);
      down = read(prefix + ".down_proj", {s.experts, s.hidden, s.intermediate}, expert * bytes);
    } else {
      const std::string stem = fmt::format("{}.{}.", prefix, expert);
      gate = read(stem + "gate_proj.weight", {s.intermediate, s.hidden}, 0);
      up = read(stem + "up_proj.weight", {s.intermediate, s.hidden}, 0);
      down = read(stem + "down_proj.weight", {s.hidden, s.intermediate}, 0);
    }
  }
};

// The block that rank `part` of `parts` must hold, element by element.
std::vector<std::byte> expected_block(const Matrices& m, const ExpertShape& s, int part, int parts) {
  std::vector<std::byte> out;
  const int64_t local = s.intermediate / parts, width = dtype_bytes(s.dtype);
  const auto push = [&](const std::vector<std::byte>& from, int64_t element) {
    for (int64_t b = 0; b < width; ++b) out.push_back(from[static_cast<size_t>(element * width + b)]);
  };
  for (const auto* in : {&m.gate, &m.up})
    for (int64_t i = 0; i < local; ++i)
      for (int64_t h = 0; h < s.hidden; ++h) push(*in, (part * local + i) * s.hidden + h);
  for (int64_t h = 0; h < s.hidden; ++h)
    for (int64_t i = 0; i < local; ++i) push(m.down, h * s.intermediate + part * local + i);
  return out;
}

void check_blocks(const Residency& residency, const WeightSource& source, const SyntheticExperts& model) {
  const bool slices = residency.form() == ShardForm::slice;
  for (int64_t layer = 0; layer < model.layers; ++layer)
    for (int64_t expert = 0; expert < model.shape.experts; ++expert) {
      const Matrices matrices(source, model, layer, expert);
      int holders = 0;
      for (int rank = 0; rank < residency.world(); ++rank) {
        const std::byte* block = residency.block(rank, layer, expert);
        CHECK((block != nullptr) == residency.owns(rank, expert));
        if (block == nullptr) continue;
        ++holders;
        CHECK(reinterpret_cast<uintptr_t>(block) % 64 == 0);
        const auto expected = expected_block(matrices, model.shape, slices ? rank : 0, slices ? residency.world() : 1);
        CHECK(std::ssize(expected) == residency.local_shape().block_bytes());
        CHECK(std::memcmp(block, expected.data(), expected.size()) == 0);
      }
      CHECK(holders == (slices ? residency.world() : 1));
    }
}

ResidencyLoadOptions small_load(bool uring = true, bool direct = true) {
  ResidencyLoadOptions options{.threads = 2};
  options.reader.use_uring = uring;
  options.reader.use_direct = direct;
  options.reader.chunk_bytes = 16 << 10;
  options.reader.queue_depth = 4;
  return options;
}

std::string error_of(const std::function<void()>& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.message();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) MESSAGE("\"", part, "\" is not in: ", text);
  return found;
}

// Blocks of three pages, so that pieces of whole blocks can be small.
constexpr ExpertShape kPagesShape{.experts = 9, .hidden = 32, .intermediate = 64, .dtype = DType::bf16};
SyntheticExperts pages_model() {
  return {.shape = kPagesShape, .layers = 2, .fused = true, .files = 3};
}

// Pins by bookkeeping; refuses or throws at a given piece.
struct FakePins {
  int64_t refuse_at = -1, throw_at = -1, calls = 0;
  std::map<std::byte*, size_t> pinned = {};

  PinHooks hooks(int64_t piece_bytes) {
    return {.pin =
                [this](std::span<std::byte> piece) {
                  if (calls == throw_at) throw_error(ErrorCode::device, "driver fault");
                  if (calls++ == refuse_at) return false;
                  CHECK(pinned.emplace(piece.data(), piece.size()).second);
                  return true;
                },
            .unpin =
                [this](std::span<std::byte> piece) {
                  CHECK(pinned[piece.data()] == piece.size());
                  pinned.erase(piece.data());
                },
            .piece_bytes = piece_bytes};
  }
};

}  // namespace

TEST_CASE("every_expert_byte_of_the_checkpoint_is_in_exactly_one_piece_of_one_rank") {
  for (const bool fused : {false, true}) {
    const TemporaryFolder folder;
    const SyntheticExperts model = model_of(fused);
    write_synthetic(folder.path(), model);
    const OpenSynthetic open(folder.path());
    for (const ShardForm form : kForms)
      for (const int world : kWorlds) {
        CAPTURE(fused);
        CAPTURE(world);
        std::map<std::string, std::vector<int>> uses;
        for (const TensorEntry& tensor : open.checkpoint.tensors())
          uses[tensor.name] = std::vector<int>(static_cast<size_t>(tensor.bytes), 0);
        for (int64_t layer = 0; layer < model.layers; ++layer)
          for (int64_t expert = 0; expert < kShape.experts; ++expert)
            for (int rank = 0; rank < world; ++rank) {
              if (form == ShardForm::expert && expert % world != rank) continue;
              const ExpertSlice slice = form == ShardForm::slice ? ExpertSlice{rank, world} : ExpertSlice{};
              int64_t block_at = 0;
              for (const ExpertPiece& piece : expert_pieces(
                       *open.source, model.expert_layers()[static_cast<size_t>(layer)], kShape, expert, slice)) {
                CHECK(piece.block_offset == block_at);  // a block has no holes
                block_at += piece.bytes();
                for (int64_t row = 0; row < piece.rows; ++row)
                  for (int64_t i = 0; i < piece.row_bytes; ++i)
                    ++uses[piece.tensor.name][static_cast<size_t>(piece.tensor_offset + row * piece.tensor_stride + i)];
              }
              CHECK(block_at == kShape.block_bytes() / slice.count);
            }
        for (const auto& [name, counts] : uses) {
          const int wanted = name.starts_with("odd") ? 0 : 1;
          CHECK(std::all_of(counts.begin(), counts.end(), [&](int count) { return count == wanted; }));
        }
      }
  }
}

TEST_CASE("shards_of_every_world_form_and_layout_hold_the_right_bytes") {
  for (const bool fused : {false, true}) {
    const TemporaryFolder folder;
    const SyntheticExperts model = model_of(fused);
    write_synthetic(folder.path(), model);
    const OpenSynthetic open(folder.path());
    for (const ShardForm form : kForms)
      for (const int world : kWorlds) {
        CAPTURE(fused);
        CAPTURE(world);
        Residency residency(*open.source, model.expert_layers(), kShape, {.form = form, .world = world});
        int64_t told = 0;
        residency.load(small_load(), [&](int64_t bytes) { told += bytes; });
        check_blocks(residency, *open.source, model);
        CHECK(told == model.layers * kShape.experts * kShape.block_bytes());
        CHECK(residency.warnings().empty());
      }
  }
}

TEST_CASE("every_reading_path_gives_the_same_checksum_and_another_byte_gives_another") {
  const TemporaryFolder folder;
  SyntheticExperts model = model_of(false);
  model.shape.dtype = DType::f32;
  write_synthetic(folder.path(), model);
  const OpenSynthetic open(folder.path());
  std::set<uint64_t> sums;
  for (const bool uring : {true, false})
    for (const bool direct : {true, false}) {
      Residency residency(*open.source, model.expert_layers(), model.shape, {.form = ShardForm::slice, .world = 2});
      residency.load(small_load(uring, direct), {});
      check_blocks(residency, *open.source, model);
      sums.insert(residency.checksum(1));
      CHECK(residency.checksum(0) != residency.checksum(1));
      if (uring || direct) continue;
      auto* stray = const_cast<std::byte*>(residency.block(1, 1, 3));
      stray[77] ^= std::byte{1};
      CHECK(sums.count(residency.checksum(1)) == 0);
    }
  CHECK(sums.size() == 1);
}

TEST_CASE("dummy_weights_are_the_same_values_in_every_form_and_world") {
  const auto source = dummy_source(5);
  SyntheticExperts model = model_of(true);
  for (const ShardForm form : kForms)
    for (const int world : kWorlds) {
      CAPTURE(world);
      Residency residency(*source, model.expert_layers(), kShape, {.form = form, .world = world});
      int64_t told = 0;
      residency.load(small_load(), [&](int64_t bytes) { told += bytes; });
      check_blocks(residency, *source, model);
      CHECK(told == model.layers * kShape.experts * kShape.block_bytes());
    }
}

TEST_CASE("ownership_counts_when_the_world_does_not_divide_the_experts") {
  const auto source = dummy_source(1);
  const SyntheticExperts model = model_of(true);
  const Residency residency(*source, model.expert_layers(), kShape, {.form = ShardForm::expert, .world = 4});
  CHECK(residency.bytes(0) == 2 * 3 * kShape.block_bytes());  // experts 0, 4, 8 of two layers
  CHECK(residency.bytes(3) == 2 * 2 * kShape.block_bytes());
  CHECK(residency.bytes() == 2 * 9 * kShape.block_bytes());
  CHECK(residency.owner(6) == 2);
  CHECK(residency.local_shape().intermediate == 40);
  const Residency slices(*source, model.expert_layers(), kShape, {.form = ShardForm::slice, .world = 4});
  CHECK_FALSE(slices.owner(6).has_value());
  CHECK(slices.local_shape().intermediate == 10);
}

TEST_CASE("worlds_that_cannot_share_the_experts_are_refused_with_a_remedy") {
  const auto source = dummy_source(1);
  const auto make = [&](ShardForm form, int world) {
    return error_of([&] { Residency(*source, model_of(true).expert_layers(), kShape, {.form = form, .world = world}); },
                    ErrorCode::usage);
  };
  CHECK(has(make(ShardForm::slice, 3), "--shard expert"));
  CHECK(has(make(ShardForm::expert, 10), "lower --tp"));
  CHECK(make(ShardForm::expert, 9).empty());
}

TEST_CASE("a_checkpoint_cut_short_after_opening_is_an_error_naming_file_and_tensor") {
  const TemporaryFolder folder;
  const SyntheticExperts model = model_of(false);
  write_synthetic(folder.path(), model);
  for (const bool direct : {true, false}) {
    const OpenSynthetic open(folder.path());
    const TensorEntry* last = &open.checkpoint.tensors()[0];
    for (const TensorEntry& tensor : open.checkpoint.tensors())
      if (tensor.file_index == 2 && (last->file_index != 2 || tensor.offset > last->offset)) last = &tensor;
    Residency residency(*open.source, model.expert_layers(), kShape, {});
    const std::string path = folder.path("model-00002.safetensors");
    REQUIRE(::truncate(path.c_str(), last->offset + 100) == 0);
    const std::string message = error_of([&] { residency.load(small_load(true, direct), {}); }, ErrorCode::input);
    CHECK(has(message, path));
    CHECK(has(message, last->name));
    CHECK(has(message, fmt::format("at byte {}", last->offset + 100)));
    write_synthetic(folder.path(), model);
  }
}

TEST_CASE("a_load_whose_nth_read_fails_reports_it_and_the_next_load_succeeds") {
  const TemporaryFolder folder;
  const SyntheticExperts model = model_of(false);
  write_synthetic(folder.path(), model);
  const OpenSynthetic open(folder.path());
  Residency residency(*open.source, model.expert_layers(), kShape, {.form = ShardForm::slice, .world = 2});
  int64_t n = 0;
  for (;; ++n) {
    REQUIRE(n < 50);
    ResidencyLoadOptions options = small_load();
    options.reader.fault = [n](int64_t read) { return read == n ? EIO : 0; };
    const std::string message = error_of([&] { residency.load(options, {}); }, ErrorCode::input);
    if (message.empty()) break;
    CHECK(has(message, "tensor model.layers."));
    CHECK(has(message, "Input/output error"));
  }
  CHECK(n == residency.read_report().reads);
  check_blocks(residency, *open.source, model);
}

TEST_CASE("a_missing_expert_is_refused_before_anything_is_loaded") {
  const TemporaryFolder folder;
  const SyntheticExperts model = model_of(false);
  write_synthetic(folder.path(), model);
  const OpenSynthetic open(folder.path());
  ExpertShape larger = kShape;
  larger.experts = 10;
  CHECK(
      has(error_of([&] { Residency(*open.source, model.expert_layers(), larger); }, ErrorCode::input), ".9.gate_proj"));
}

TEST_CASE("pinning_is_all_or_nothing_wherever_it_is_refused") {
  const auto source = dummy_source(3);
  const SyntheticExperts model = pages_model();
  constexpr int64_t kPieceBytes = 16 << 10;
  int64_t pieces = 0;
  {
    FakePins pins;
    Residency residency(*source, model.expert_layers(), kPagesShape, {.world = 2});
    ResidencyLoadOptions options = small_load();
    options.pinning = pins.hooks(kPieceBytes);
    residency.load(options, {});
    pieces = pins.calls;
    CHECK(residency.pinned());
    CHECK(residency.warnings().empty());
    size_t bytes = 0;
    for (const auto& [data, size] : pins.pinned) bytes += size;
    CHECK(static_cast<int64_t>(bytes) == residency.bytes());
    residency.load(options, {});  // again: the old pinning goes before its memory
    CHECK(std::ssize(pins.pinned) == pieces);
  }
  REQUIRE(pieces >= 4);
  for (const int64_t refuse_at : {int64_t{0}, int64_t{2}, pieces - 1}) {
    FakePins pins{.refuse_at = refuse_at};
    Residency residency(*source, model.expert_layers(), kPagesShape, {.world = 2});
    ResidencyLoadOptions options = small_load();
    options.pinning = pins.hooks(kPieceBytes);
    options.memlock_bytes = 65536;
    residency.load(options, {});
    CHECK_FALSE(residency.pinned());
    CHECK(pins.pinned.empty());
    CHECK(pins.calls == refuse_at + 1);
    REQUIRE(residency.warnings().size() == 1);
    CHECK(has(residency.warnings()[0], "RLIMIT_MEMLOCK is 64.00 KiB"));
    if (refuse_at == 2) CHECK(has(residency.warnings()[0], "stopped at 24.00 KiB of "));
    check_blocks(residency, *source, model);
  }
}

TEST_CASE("pinning_is_undone_when_the_device_faults_the_user_stops_or_the_shards_go") {
  const auto source = dummy_source(3);
  const SyntheticExperts model = pages_model();
  ResidencyLoadOptions options = small_load();
  FakePins pins{.throw_at = 3};
  Residency residency(*source, model.expert_layers(), kPagesShape, {});
  options.pinning = pins.hooks(16 << 10);
  CHECK(error_of([&] { residency.load(options, {}); }, ErrorCode::device) == "driver fault");
  CHECK(pins.pinned.empty());

  FakePins stopped;
  options.pinning = stopped.hooks(16 << 10);
  const auto stop_at_third_piece = [&](int64_t) {
    if (stopped.calls == 2) throw_error(ErrorCode::interrupted, "stop");
  };
  CHECK(error_of([&] { residency.load(options, stop_at_third_piece); }, ErrorCode::interrupted) == "stop");
  CHECK(stopped.pinned.empty());

  FakePins kept;
  {
    Residency owner(*source, model.expert_layers(), kPagesShape, {});
    options.pinning = kept.hooks(16 << 10);
    owner.load(options, {});
    CHECK_FALSE(kept.pinned.empty());
  }
  CHECK(kept.pinned.empty());
}

TEST_CASE("a_user_stops_a_load_within_a_second") {
  const auto source = dummy_source(3);
  // 384 MiB of made-up weights: seconds of work.
  const ExpertShape shape{.experts = 64, .hidden = 1024, .intermediate = 1024, .dtype = DType::bf16};
  Residency residency(*source, {{"layers.0.mlp.experts"}}, shape, {});
  auto stopped_at = std::chrono::steady_clock::now();
  int64_t told = 0;
  const auto stop = [&](int64_t bytes) {
    told += bytes;
    if (told == 0) return;
    stopped_at = std::chrono::steady_clock::now();
    throw_error(ErrorCode::interrupted, "stop");
  };
  CHECK(error_of([&] { residency.load(small_load(), stop); }, ErrorCode::interrupted) == "stop");
  CHECK(std::chrono::steady_clock::now() - stopped_at < std::chrono::seconds(1));
}

TEST_CASE("a_numa_node_that_does_not_exist_is_a_warning_and_node_0_works") {
  const auto source = dummy_source(3);
  const SyntheticExperts model = model_of(true);
  Residency residency(*source, model.expert_layers(), kShape, {.world = 2, .numa_nodes = {0, 4096}});
  residency.load(small_load(), {});
  check_blocks(residency, *source, model);
  REQUIRE(residency.warnings().size() >= 1);
  CHECK(has(residency.warnings().back(), "rank 1: NUMA node 4096 does not exist"));
}

TEST_CASE("the_load_bench_reports_rates_bounds_and_content") {
  const TemporaryFolder folder;
  const SyntheticExperts model = model_of(false);
  write_synthetic(folder.path(), model);
  const OpenSynthetic open(folder.path());
  LoadBenchOptions options{.residency = {.form = ShardForm::slice, .world = 2}, .load = small_load(), .repeat = 2};
  LoadBenchResult result;
  try {
    result = load_bench(open.checkpoint, model.expert_layers(), kShape, options);
  } catch (const Error& error) {
    REQUIRE(error.code() == ErrorCode::resource);
    MESSAGE("skipped: ", error.message());
    return;
  }
  CHECK(result.rounds.size() == 2);
  CHECK(result.expert_bytes == model.layers * kShape.experts * kShape.block_bytes());
  CHECK(result.file_bytes > result.expert_bytes);
  CHECK(load_efficiency(result) > 0);
  Residency residency(*open.source, model.expert_layers(), kShape, options.residency);
  residency.load(options.load, {});
  CHECK(result.checksum == (residency.checksum(0) ^ residency.checksum(1)));
}

}  // namespace offload::residency_test
