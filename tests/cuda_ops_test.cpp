// The CUDA kernels: the op suite on the plans of this card and of Turing, the bits of the canonical order against the
// CPU's, and the same bits on repeat. Skipped, with the reason, where there is no device.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/canonical.h"
#include "cpu/cpu_ops.h"
#include "cuda/cuda_backend.h"
#include "op_handed.h"
#include "op_suite.h"
#include "op_traps.h"
#include "op_values.h"

using namespace offload;
using cuda::CudaBackend;

namespace {

class DeviceMirror final : public Mirror {
 public:
  // Tensors lie in `pool_bytes` taken once, as far as they fit: taking memory costs more than most cases. A sanitizer
  // sees who leaves a tensor only without a pool.
  explicit DeviceMirror(Backend& backend, int64_t pool_bytes = 0)
      : backend_(backend), pool_(backend.allocate(pool_bytes, "a test")) {}
  void* allocate(int64_t bytes) override {
    const int64_t begin = (used_ + kAlignment - 1) / kAlignment * kAlignment, end = begin + std::max<int64_t>(bytes, 1);
    if (end <= pool_.bytes()) {
      used_ = end;
      return static_cast<std::byte*>(pool_.data()) + begin;
    }
    blocks_.push_back(backend_.allocate(end - begin, "a test"));
    return blocks_.back().data();
  }
  void release_all() override {
    used_ = 0;
    blocks_.clear();
  }
  void upload(void* device, const void* host, int64_t bytes) override {
    backend_.upload({static_cast<const std::byte*>(host), static_cast<size_t>(bytes)},
                    Tensor(device, DType::u8, {bytes}));
  }
  void download(void* host, const void* device, int64_t bytes) override {
    backend_.download(Tensor(const_cast<void*>(device), DType::u8, {bytes}),
                      {static_cast<std::byte*>(host), static_cast<size_t>(bytes)});
  }

 private:
  static constexpr int64_t kAlignment = 256;  // as of the device's allocator
  Backend& backend_;
  Buffer pool_;
  int64_t used_ = 0;
  std::vector<Buffer> blocks_;
};

bool no_device() {
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) MESSAGE("skipped: no CUDA device: ", devices.why_none);
  return devices.count == 0;
}

// The ops of a token at the published widths, each on what the one before it made: no host waits in between.
class TokenChain {
 public:
  explicit TokenChain(CudaBackend& backend) : backend_(backend), mirror_(backend), v_(backend.ops(), mirror_) {
    Ops& ops = backend.ops();
    ops.set_planning(true);
    issue();
    ops.set_planning(false);
    const int64_t bytes = ops.scratch_peak_bytes();
    ops.set_scratch(Tensor(mirror_.allocate(bytes), DType::u8, {bytes}));
  }
  ~TokenChain() { backend_.ops().set_scratch({}); }

  // The stack behind `tokens` tokens from the same start; the first is issued op by op, later ones as a graph.
  std::vector<double> run(int tokens) {
    backend_.ops()(CopyArgs{.x = start_, .out = stack_});
    for (int i = 0; i < tokens; ++i) backend_.repeat(1, [&] { issue(); });
    return v_.take(stack_);
  }

 private:
  static constexpr int64_t kHidden = 2560, kStreams = 4, kLowrank = 320, kWide = 4608, kExperts = 8, kTopK = 4,
                           kInter = 64;

  Tensor matrix(int64_t rows, int64_t columns) {
    CaseRandom random("token chain");
    const double scale = 3 / std::sqrt(static_cast<double>(columns));
    std::vector<double> values;
    for (int64_t i = 0; i < rows * columns; ++i) values.push_back((random.uniform() - 0.5) * scale);
    return v_.put(kBf16, {rows, columns}, values);
  }

  void issue() {
    Ops& ops = backend_.ops();
    ops(HyperReadArgs{.stack = stack_,
                      .norm = hyper_norm_,
                      .down = hyper_down_,
                      .up = hyper_up_,
                      .inject = inject_,
                      .out = x_,
                      .logits = logits_,
                      .streams = kStreams});
    ops(LinearArgs{x_, wide_in_, wide_});
    ops(LinearArgs{wide_, wide_out_, y_});
    ops(RmsNormArgs{.x = y_.reshaped({1, 1, kHidden}), .w = norm_, .out = x_.reshaped({1, 1, kHidden})});
    ops(LinearArgs{x_, router_, scores_});
    ops.mark();
    ops(RouterTopkArgs{.logits = scores_, .ids = ids_, .weights = weights_});
    ops(SwigluRoutedArgs{.x = x_,
                         .ids = ids_,
                         .slab = slab_,
                         .slots = slots_,
                         .out = parts_,
                         .present = present_,
                         .intermediate = kInter});
    ops.beside([&] { ops(LinearArgs{x_, shared_in_, shared_}); });
    ops(MoeCombineArgs{
        .parts = parts_, .weights = weights_, .present = present_, .shared = shared_, .gate = {}, .out = y_});
    ops(StreamWriteArgs{.stack = stack_, .y = y_, .logits = logits_, .streams = kStreams});
  }

  CudaBackend& backend_;
  DeviceMirror mirror_;
  OpValues v_;
  const Tensor start_ = matrix(1, kStreams*kHidden), stack_ = v_.blank(kBf16, {1, kStreams*kHidden});
  const Tensor hyper_norm_ = v_.fill(kF32, {kStreams, kHidden}, 0.5), hyper_down_ = matrix(kLowrank, kStreams*kHidden),
               hyper_up_ = matrix(kStreams * kHidden, kLowrank), inject_ = matrix(kStreams, kStreams*kHidden);
  const Tensor wide_in_ = matrix(kWide, kHidden), wide_out_ = matrix(kHidden, kWide),
               router_ = matrix(kExperts, kHidden), shared_in_ = matrix(kHidden, kHidden);
  const Tensor norm_ = v_.fill(kF32, {1, kHidden}, 1), slab_ = matrix(kExperts, 3 * kInter * kHidden);
  const Tensor slots_ = v_.put(DType::i32, {kExperts}, {3, 1, 0, 2, -1, 7, 6, 5});
  const Tensor x_ = v_.blank(kBf16, {1, kHidden}), y_ = v_.blank(kBf16, {1, kHidden}),
               wide_ = v_.blank(kBf16, {1, kWide}), logits_ = v_.blank(kF32, {1, kStreams}),
               scores_ = v_.blank(kBf16, {1, kExperts}), ids_ = v_.blank(DType::i32, {1, kTopK}),
               weights_ = v_.blank(kF32, {1, kTopK}), parts_ = v_.blank(kBf16, {kTopK, kHidden}),
               present_ = v_.fill(DType::u8, {1, kTopK}, 0), shared_ = v_.blank(kBf16, {1, kHidden});
};

// What this card would choose, and what a 2080 Ti would.
const std::vector<std::optional<int>> kPlans = {std::nullopt, 75};

std::string plan_name(const CudaBackend& backend) {
  return fmt::format("{}, plans of sm_{}", backend.caps().name, backend.caps().sm);
}

}  // namespace

TEST_CASE("every_case_passes_on_native_and_forced_plans_and_repeats_its_bits") {
  if (no_device()) return;
  struct Candidate {
    explicit Candidate(std::optional<int> force_sm) : backend(0, force_sm), mirror(backend, int64_t{1} << 30) {}
    CudaBackend backend;
    DeviceMirror mirror;
    double worst = 0;
    std::string worst_case;
  };
  std::vector<std::unique_ptr<Candidate>> candidates;
  for (const std::optional<int> force_sm : kPlans) candidates.push_back(std::make_unique<Candidate>(force_sm));
  for (const OpCase& test : all_op_cases()) {
    const PreparedCase prepared(test);
    for (const auto& candidate : candidates) {
      CAPTURE(plan_name(candidate->backend));
      const CaseResult result = prepared.run(candidate->backend.ops(), candidate->mirror);
      CHECK_MESSAGE(result.passed(), result.failure);
      CHECK_MESSAGE(prepared.run(candidate->backend.ops(), candidate->mirror).output_hash == result.output_hash,
                    test.name);
      if (result.error_over_bound <= candidate->worst) continue;
      candidate->worst = result.error_over_bound;
      candidate->worst_case = test.name;
    }
  }
  for (const auto& candidate : candidates)
    MESSAGE(plan_name(candidate->backend), ": largest error ", candidate->worst, " of its bound, in ",
            candidate->worst_case);
}

TEST_CASE("few_rows_have_the_bits_of_the_cpu") {
  if (no_device()) return;
  for (const std::optional<int> force_sm : kPlans) {
    CudaBackend backend(0, force_sm);
    DeviceMirror mirror(backend);
    HostMirror host;
    cpu::CpuOps cpu_ops({.threads = 2});
    // With so few rows no run of experts can be longer.
    for (const char* op : {"linear", "swiglu_experts", "swiglu_routed"}) {
      int64_t compared = 0;
      for (const OpCase& test : op_cases(op)) {
        if (test.tensors[0].shape[0] > kCanonicalRowsMax) continue;
        CHECK_MESSAGE(run_case(test, backend.ops(), mirror).output_hash == run_case(test, cpu_ops, host).output_hash,
                      test.name);
        ++compared;
      }
      CHECK(compared > 2);
    }
  }
}

// On this card's own plans kernels may start while the ones before them still run, on those of sm_80 none does; for one
// row they are the same kernels otherwise.
TEST_CASE("kernels_that_start_early_read_what_those_before_them_wrote") {
  if (no_device()) return;
  constexpr int kTokens = 40;
  CudaBackend early(0), in_turn(0, 80);
  TokenChain chain(early), expected(in_turn);
  for (const int tokens : {1, kTokens}) {
    const std::vector<double> stack = expected.run(tokens);
    CHECK(std::none_of(stack.begin(), stack.end(), [](double x) { return std::isnan(x); }));
    for (int round = 0; round < 20; ++round) CHECK(chain.run(tokens) == stack);
  }
}

TEST_CASE("silu_has_the_bits_of_the_canonical_one") {
  if (no_device()) return;
  CudaBackend backend(0);
  DeviceMirror mirror(backend);
  OpValues v(backend.ops(), mirror);
  // Each sign, exponent and upper seven bits, before lower halves at the ends and in between.
  constexpr int64_t kTops = 1 << 16, kRows = 256, kColumns = kTops / kRows;
  std::vector<uint32_t> lows = {0, 1, 2, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
  CaseRandom random("lower halves");
  while (lows.size() < 128) lows.push_back(static_cast<uint32_t>(random.below(1 << 16)));
  std::vector<float> in(kTops), out(kTops);
  const Tensor t = v.blank(DType::f32, {kRows, kColumns});
  int64_t wrong = 0;
  for (const uint32_t low : lows) {
    for (uint32_t top = 0; top < kTops; ++top) in[top] = std::bit_cast<float>(top << 16 | low);
    mirror.upload(t.data(), in.data(), t.bytes());
    v.run(ScaledSiluArgs{.x = t, .out = t});
    mirror.download(out.data(), t.data(), t.bytes());
    for (size_t i = 0; i < in.size(); ++i) {
      if (std::isnan(in[i]) ? std::isnan(out[i])
                            : std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(canonical_silu(in[i])))
        continue;
      if (++wrong == 1) CHECK_MESSAGE(out[i] == canonical_silu(in[i]), "first of ", fmt::format("{:a}", in[i]));
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("scratch_planned_for_aligned_pointers_is_enough_for_others") {
  if (no_device()) return;
  for (const std::optional<int> force_sm : kPlans)
    for (const Math math : {Math::native, Math::scaled_fp16}) {
      // Short rows against many columns: what the columns need in scratch is most of it.
      constexpr int64_t kRows = 16, kColumns = 4096, kDepth = 8, kExperts = 32, kInter = 64, kTop = 2;
      const auto at = [](uintptr_t offset, DType dtype, std::initializer_list<int64_t> shape) {
        return Tensor(reinterpret_cast<void*>((uintptr_t{1} << 20) + offset), dtype, shape);
      };
      const auto check_plans = [&](const auto& args_at) {
        CudaBackend backend(0, force_sm);
        CAPTURE(plan_name(backend));
        backend.ops().set_planning(true);
        backend.ops()(args_at(0));
        const int64_t planned = backend.ops().scratch_peak_bytes();
        backend.ops()(args_at(2));
        CHECK(backend.ops().scratch_peak_bytes() == planned);
      };
      check_plans([&](uintptr_t offset) {
        return LinearArgs{.x = at(offset, DType::bf16, {kRows, kDepth}),
                          .w = at(0, DType::bf16, {kColumns, kDepth}),
                          .out = at(0, DType::bf16, {kRows, kColumns}),
                          .math = math};
      });
      check_plans([&](uintptr_t offset) {
        return SwigluRoutedArgs{.x = at(offset, DType::bf16, {kRows, kDepth}),
                                .ids = at(0, DType::i32, {kRows, kTop}),
                                .slab = at(0, DType::bf16, {kExperts, 3 * kInter * kDepth}),
                                .slots = at(0, DType::i32, {kExperts}),
                                .out = at(0, DType::bf16, {kRows * kTop, kDepth}),
                                .present = at(0, DType::u8, {kRows, kTop}),
                                .intermediate = kInter,
                                .math = math};
      });
    }
}

TEST_CASE("rows_that_fill_the_device_arrive_whole") {
  if (no_device()) return;
  CudaBackend backend(0);
  DeviceMirror mirror(backend);
  OpValues v(backend.ops(), mirror);
  constexpr int64_t kRows = 1100;
  for (const int64_t n : {4096, 4097}) {  // several pieces for each thread, aligned and not
    CAPTURE(n);
    std::vector<double> x;
    for (int64_t i = 0; i < kRows * n; ++i) x.push_back(static_cast<double>(i * 7 % 251));
    const Tensor out = v.blank(DType::f32, {kRows, n});
    v.run(CopyArgs{.x = v.put(DType::bf16, {kRows, n}, x), .out = out});
    CHECK(v.take(out) == x);
    mirror.release_all();
  }
}

TEST_CASE("the_alignment_of_a_row_changes_no_bit_of_its_norm") {
  if (no_device()) return;
  CudaBackend backend(0);
  DeviceMirror mirror(backend);
  OpValues v(backend.ops(), mirror);
  for (const int64_t n : {128, 2560}) {
    CAPTURE(n);
    CaseRandom random("alignment");
    std::vector<double> x;
    for (int64_t i = 0; i < n; ++i) x.push_back(random.normal());
    const Tensor w = v.fill(DType::f32, {1, n}, 0.25);
    const auto norm = [&](const Tensor& row) {
      const Tensor out = v.blank(DType::bf16, {1, 1, n});
      v.run(RmsNormArgs{.x = row, .w = w, .out = out});
      return v.take(out);
    };
    const std::vector<double> aligned = norm(v.put(DType::bf16, {1, 1, n}, x));
    x.insert(x.begin(), 0.0);
    CHECK(norm(v.put(DType::bf16, {1, 1, n + 1}, x).narrow(2, 1, n)) == aligned);
  }
}

TEST_CASE("a_nan_reaches_what_depends_on_it") {
  if (no_device()) return;
  CudaBackend backend(0);
  DeviceMirror mirror(backend);
  OpValues v(backend.ops(), mirror);
  const Tensor gated = v.blank(DType::f32, {1, 1, 2});
  v.run(MulSigmoidArgs{
      .x = v.fill(DType::f32, {1, 1, 2}, 1), .gate = v.put(DType::f32, {1, 1, 2}, {NAN, 0}), .out = gated});
  CHECK(std::isnan(v.take(gated)[0]));
  CHECK(v.take(gated)[1] == 0.5);
  const Tensor ids = v.blank(DType::i32, {1, 3}), weights = v.blank(DType::f32, {1, 3});
  v.run(RouterTopkArgs{.logits = v.put(DType::f32, {1, 4}, {1, NAN, 3, 2}), .ids = ids, .weights = weights});
  std::vector<double> chosen = v.take(ids);
  std::sort(chosen.begin(), chosen.end());
  CHECK(chosen == std::vector<double>{1, 2, 3});  // experts that exist, each once
  for (const double weight : v.take(weights)) CHECK(std::isnan(weight));
}

#define OFL_CUDA_TRAP_TEST(name)                 \
  TEST_CASE(#name) {                             \
    if (no_device()) return;                     \
    for (const std::optional<int> sm : kPlans) { \
      CudaBackend backend(0, sm);                \
      CAPTURE(plan_name(backend));               \
      DeviceMirror mirror(backend);              \
      OpValues values(backend.ops(), mirror);    \
      name(values);                              \
    }                                            \
  }
OFL_FOR_EACH_OP_TRAP(OFL_CUDA_TRAP_TEST)
OFL_FOR_EACH_HANDED_CASE(OFL_CUDA_TRAP_TEST)

TEST_CASE("device_memory_that_cannot_be_had_is_refused_with_what_is_free") {
  if (no_device()) return;
  CudaBackend backend(0);
  try {
    static_cast<void>(backend.allocate(int64_t{1} << 50, "a test"));
    FAIL("a pebibyte was given");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resource);
    CHECK(error.message().find("for a test") != std::string::npos);
    CHECK(error.message().find("are free") != std::string::npos);
  }
  CHECK(backend.allocate(1 << 20, "a test").bytes() == 1 << 20);  // the refusal left no error behind
}

TEST_CASE("copies_and_calls_of_a_lane_keep_their_order") {
  if (no_device()) return;
  CudaBackend backend(0);
  backend.create_events(2);
  constexpr int64_t kBytes = 8 << 20;
  const Buffer host = backend.allocate_host(kBytes, "a test"), device = backend.allocate(kBytes, "a test");
  const Tensor tensor(device.data(), DType::u8, {kBytes});
  struct Filler {
    std::byte* data;
    int next = 0;
  } filler{static_cast<std::byte*>(host.data())};
  const auto fill = [](void* context) {
    auto& f = *static_cast<Filler*>(context);
    ++f.next;
    std::fill_n(f.data, kBytes, static_cast<std::byte>(f.next));
  };
  for (int round = 1; round <= 4; ++round) {
    Lane& lane = backend.copy_lane();
    lane.wait(1);
    lane.call(fill, &filler);
    lane.copy_in({static_cast<const std::byte*>(host.data()), static_cast<size_t>(kBytes)}, tensor);
    lane.record(0);
    backend.compute_lane().wait(0);
    std::vector<std::byte> back(kBytes);
    backend.download(tensor, back);
    backend.compute_lane().record(1);
    CHECK(std::all_of(back.begin(), back.end(), [&](std::byte b) { return b == static_cast<std::byte>(round); }));
  }
}
