// The op contracts: every computation that a model is made of, as a formula with stated effects and rounding points.
//
// An op is an argument struct, check() that states its preconditions, cost() that states its bytes and flops, and one
// execute() per backend. Conventions, which bind every backend:
//
// * A is the activation dtype, F32 or BF16: the dtype of `x`, or what the struct says. rnd(v) rounds v to A, to nearest
//   even (nothing for F32).
// * `rounding` says where a formula rounds. Rounding::reference: at every rnd below, as the published implementations
//   do (R-mode of the model specifications). Rounding::fused: the chain stays in FP32 and only rnd! (the store of the
//   result) rounds (F-mode). With A = F32 the two are the same computation.
// * Sums accumulate in FP32 or better, in an order that does not depend on the thread count; same arguments, same bits.
// * Weights of matrices are BF16 or F32 and are never rounded; small vectors (norms, gates) are F32.
// * Tensors are described as [rows, ...]; every dimension but the last may be strided unless a struct says contiguous.
//   Inputs are never written. Rows that a formula does not name are neither read nor written.
// * rows may be 0: then nothing happens.
//
// Ops is confined to the thread that owns it. It does not allocate: scratch comes from an arena sized by planning.
#ifndef OFFLOAD_CORE_OPS_H_
#define OFFLOAD_CORE_OPS_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "core/arena.h"
#include "core/product_math.h"
#include "core/tensor.h"

namespace offload {

enum class Rounding : uint8_t { reference, fused };

// Bytes that must cross the memory interface at least once, and floating-point operations (an FMA is two).
struct Cost {
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t flops = 0;

  Cost& operator+=(const Cost& other) {
    bytes_read += other.bytes_read;
    bytes_written += other.bytes_written;
    flops += other.flops;
    return *this;
  }
};

// out[r] = x[r], converted to out's dtype. x, out [rows, n].
struct CopyArgs {
  Tensor x, out;
};

// out[r][c * n + j] = table[ids[r]][j] for c = 0..copies-1, converted to out's dtype (exact or one rounding).
// table [rows_table, n], ids I32 [rows], out [rows, copies * n]. REQUIRES: 0 <= ids[r] < rows_table (the caller
// checks).
struct GatherRowsArgs {
  Tensor table, ids, out;
  int64_t copies = 1;
};

// out[m][n] = rnd!(sum_k x[m][k] * w[n][k]); rounds to out's dtype, which is A or F32.
// x [m, k], w [n, k] contiguous, out [m, n]. For m <= kCanonicalRowsMax the sum has the canonical order (see
// canonical.h). `math` says in which numbers (product_math.h).
struct LinearArgs {
  Tensor x, w, out;
  Math math = Math::native;
};

// out[r][g][j] = rnd!(x[r][g][j] * rsqrt(mean_j(x[r][g][:]^2) + eps) * weight'), weight' = 1 + w (one_plus) or w
// (plain, where reference rounding also rounds the normalised value before the product). x, out [rows, groups, n]; w
// F32 [1, n] (shared by the groups) or [groups, n].
enum class NormWeight : uint8_t { one_plus, plain };
struct RmsNormArgs {
  Tensor x, w, out;
  float eps = 1e-6f;
  NormWeight weight = NormWeight::one_plus;
  Rounding rounding = Rounding::fused;
};

// out = rnd!(silu(rnd(x * scale))), silu(t) = t * sigmoid(t). x, out [rows, n]; out may be x itself.
struct ScaledSiluArgs {
  Tensor x, out;
  float scale = 1.0f;
  Rounding rounding = Rounding::fused;
};

// out[r][j] = rnd!(silu(gate)[j] * up[j]); reference rounding: rnd(rnd(silu(gate[j])) * up[j]). gate = the first half
// of x's last dimension, up = the second. A is the dtype of out. x [rows, 2n] A or F32, out [rows, n] A.
struct SwigluArgs {
  Tensor x, out;
  Rounding rounding = Rounding::fused;
};

// out = rnd!(x + y). All [rows, n] of dtype A; out may be x or y itself.
struct AddArgs {
  Tensor x, y, out;
};

// out[r][h][j] = rnd!(x[r][h][j] * rnd(sigmoid(gate[r][h][j]))). All [rows, heads, n]; out may be x itself.
struct MulSigmoidArgs {
  Tensor x, gate, out;
  Rounding rounding = Rounding::fused;
};

// --- hyper-connections: a stack of `streams` residual streams, stream-major: element c * n + j ---

// out[r][j] = rnd!((1 / streams) * sum_c rnd(rnd(sigmoid(u[r][c*n+j])) * x[r][c*n+j])), summed over c = 0, 1, ... in
// FP32. x (normalised stack), u [rows, streams * n]; out [rows, n].
struct StreamMixArgs {
  Tensor x, u, out;
  int64_t streams = 0;
  Rounding rounding = Rounding::fused;
};

// stack[r][c*n+j] = rnd!(stack[r][c*n+j] + rnd(y[r][j] * inj[r][c])), inj = rnd(2 * rnd(sigmoid(rnd(logit /
// streams)))). stack [rows, streams * n] A, updated in place; y [rows, n] A; logits [rows, streams] A or F32.
struct StreamWriteArgs {
  Tensor stack, y, logits;
  int64_t streams = 0;
  Rounding rounding = Rounding::fused;
};

// The read of a hyper-connection in one op, for few rows: with the ops above and their roundings, streams * n = width,
//   normed = rms_norm(stack as [rows, streams, n]; norm, eps, one_plus), to A
//   gate = linear(scaled_silu(linear(normed, down), 1 / streams), up), out = stream_mix(normed, gate)
//   logits = linear(normed, inject), when inject is given
// stack [rows, width] A; norm F32 [streams, n]; down [lowrank, width], up [width, lowrank], inject [streams, width] or
// empty, of one dtype; out [rows, n] A; logits [rows, streams] A or F32, empty without inject. REQUIRES: rows <=
// kCanonicalRowsMax.
struct HyperReadArgs {
  Tensor stack, norm, down, up, inject, out, logits;
  int64_t streams = 0;
  float eps = 1e-6f;
  Rounding rounding = Rounding::fused;
};

// --- convolution and recurrence ---

// Causal depthwise convolution over rows, then SiLU:
//   s[t][ch] = rnd(sum_{j=0..taps-1} w[ch][j] * X[t - dilation * (taps-1-j)][ch]),  out = rnd!(silu(s))
// where X[t] is x[t] for t >= 0 and history[history_rows + t] for t < 0; history_rows = dilation * (taps - 1).
// Afterwards history holds the last history_rows rows of (history ++ x), oldest first.
// x, out [rows, channels] A (out is not x); w [channels, taps] BF16 or F32 contiguous; history [history_rows, channels]
// A contiguous.
struct CausalConvSiluArgs {
  Tensor x, w, history, out;
  int64_t dilation = 1;
  Rounding rounding = Rounding::fused;
};

// The least log-decay g that chunks need tell from others: exp(g) is 0 long before, and sums of lesser ones would have
// too few digits left for the other rows'.
inline constexpr float kLogDecayLeast = -65536.0f;

// Gated delta rule over rows t, all in FP32, per value head h with key head kappa = h / (value_heads / key_heads):
//   q, k = L2-normalised (v * rsqrt(sum v^2 + 1e-6)) slices of qkv; q *= key_dim^-1/2; beta = rnd(sigmoid(b[h]));
//   g = -exp(a_log[h]) * softplus(a[h] + dt_bias[h]), softplus(t) = t for t > 20
//   M <- exp(g) M;  delta = beta (v - M^T k);  M <- M + k delta^T;  out = rnd!(M^T q)
// chunk_rows = 0 runs the recurrence; N > 0 runs the equal chunked form over chunks of N rows starting at row 0
// (exp(G_i - G_l) is evaluated only for l <= i, of a g below kLogDecayLeast as of that).
// qkv [rows, 2 * key_heads * key_dim + value_heads * value_dim] A laid out q | k | v, head-major; a, b [rows,
// value_heads] A; a_log, dt_bias F32 [value_heads]; state F32 [value_heads, key_dim, value_dim] contiguous, in and out;
// out [rows, value_heads * value_dim] A.
struct GatedDeltaArgs {
  Tensor qkv, a, b, a_log, dt_bias, state, out;
  int64_t key_heads = 0;
  int64_t chunk_rows = 0;
  Rounding rounding = Rounding::fused;
};

// out = rnd!(rnd(w[j] * rnd(x * rsqrt(mean_j(x^2) + eps))) * act(z)); act = sigmoid or silu, in FP32, itself not
// rounded. x, z, out [rows, heads, n] A; w F32 [n].
enum class Gate : uint8_t { sigmoid, silu };
struct GatedNormArgs {
  Tensor x, z, w, out;
  float eps = 1e-6f;
  Gate gate = Gate::sigmoid;
  Rounding rounding = Rounding::fused;
};

// --- rotary positions and attention ---

// out[r][i][0] = round_to(scale * cos(p * inv_freq[i])), out[r][i][1] the same of sin, with p = first + r * step: the
// angle is one FP32 product of the integer position. inv_freq F32 [half], out F32 [rows, half, 2].
struct RopeTableArgs {
  Tensor inv_freq, out;
  int64_t first = 0;
  int64_t step = 1;
  float scale = 1.0f;
  DType round_to = DType::f32;
};

// Per row and head: y = rnd(x * rsqrt(mean(x^2) + eps) * (1 + w)) when w is given, else x; then rotate-half over the
// first 2 * half entries: o[i] = rnd!(rnd(y[i] c_i) + rnd(-y[i+half] s_i)), o[i+half] = rnd!(rnd(y[i+half] c_i) +
// rnd(y[i] s_i)); the rest passes. x, out [rows, heads, n]; w F32 [n] or empty; table F32 [rows, half, 2] of
// rope_table. out may be x.
struct NormRopeArgs {
  Tensor x, w, table, out;
  float eps = 1e-6f;
  Rounding rounding = Rounding::fused;
};

// out[b][j] = rnd!(mean of x[b * pool + i][j] over i = 0..pool-1). x [blocks * pool, n], out [blocks, n].
struct MeanPoolArgs {
  Tensor x, out;
  int64_t pool = 0;
};

// out[r][b] = (sum_h max(0, q[r][h] . keys[b])) * scale in FP32 for the blocks complete at row r: b < (first + r + 1) /
// ratio; other entries are not written. q [rows, heads, n] A, keys [blocks, n] A, out F32 [rows, blocks_max].
struct BlockScoresArgs {
  Tensor q, keys, out;
  int64_t first = 0;  // position of row 0
  int64_t ratio = 0;  // positions per block
  float scale = 1.0f;
};

// Per row: the min(budget, nb) blocks of highest score among the nb = (first + r + 1) / ratio complete ones, ties to
// the lower block, written in ascending block order to blocks[r][0..counts[r]). Rows with nb <= budget take all blocks
// and their scores are not read. scores F32 [rows, blocks_max], blocks I32 [rows, budget], counts I32 [rows].
struct BlockTopkArgs {
  Tensor scores, blocks, counts;
  int64_t first = 0;
  int64_t ratio = 0;
};

// Softmax attention of row r (position first + r) over its visible positions P(r), grouped-query: query head h reads
// key/value head h / (heads / kv_heads). out[r][h] = rnd!(sum_p rnd(softmax_p(rnd(rnd(q . k_p) * scale))) v_p).
// P(r): without `blocks` all positions <= first + r; with it, the positions of blocks blocks[r][0..counts[r]) (each
// `ratio` long) and the incomplete tail block. Softmax in FP32, positions in ascending order. An empty P(r) gives
// zeros. Positions outside P(r) are not read. q, out [rows, heads, n] A; k, v [positions, kv_heads, n] A, holding at
// least first + rows positions.
struct AttentionArgs {
  Tensor q, k, v, out;
  Tensor blocks, counts;  // I32 [rows, budget], I32 [rows]; empty for dense causal attention
  int64_t first = 0;
  int64_t ratio = 0;
  float scale = 1.0f;
  Rounding rounding = Rounding::fused;
};

// --- mixture of experts ---

// Softmax over all E logits in FP32; the K of largest logit (so that probabilities which FP32 cannot tell apart, or
// which underflow, have an order), equal logits to the lower id, in descending order:
// ids[r][s], weights[r][s] = round_to(p / sum of the K) when normalise, else round_to(p).
// logits [rows, E] A or F32; ids I32 [rows, K]; weights F32 [rows, K].
struct RouterTopkArgs {
  Tensor logits, ids, weights;
  bool normalise = true;
  DType round_to = DType::f32;
};

// One expert's weights and the slice of SwigluExpertsArgs::rows / out_rows that it serves.
struct ExpertRun {
  const void* gate_up = nullptr;  // [2 * intermediate, hidden] contiguous, gate rows first
  const void* down = nullptr;     // [hidden, intermediate] contiguous
  int64_t begin = 0;
  int64_t count = 0;
};

// For each run and i in [begin, begin + count): with t = x[rows[i]],
//   h = rnd!(swiglu(rnd(gate_up t)))  (A; see SwigluArgs),  out[out_rows[i]] = rnd!(down h)   (out's dtype: A or F32)
// In calls of up to kCanonicalRowsMax tokens every run sums in the canonical order and evaluates SiLU canonically
// (canonical.h), so it has the same bits on every backend and ISA level; in calls of more a backend may sum runs as
// short in the order of its tiles. Rows of out that no run names are left alone.
// `math` says in which numbers the three products of a run compute (product_math.h); h is rounded to A between them.
// x [tokens, hidden] A; rows, out_rows: host arrays; out [slots, hidden]; weights of dtype `weight_dtype`.
struct SwigluExpertsArgs {
  Tensor x, out;
  std::span<const ExpertRun> runs;
  std::span<const int32_t> rows, out_rows;
  int64_t intermediate = 0;
  DType weight_dtype = DType::bf16;
  Rounding rounding = Rounding::fused;
  Math math = Math::native;
};

// swiglu_experts with the routing and the experts' places in device memory, so that no host need know them. Slot s of
// row r goes through expert e = ids[r][s], which lies in row slots[e] of the slab: gate_up [2 * intermediate, hidden],
// then down [hidden, intermediate].
//   out[r * K + s] = what swiglu_experts computes of x[r], all of an expert being one run;  present[r][s] = 1
// An expert in no row (slots[e] < 0) is not of this rank: its rows of out are left alone, present[r][s] = 0.
// x [rows, hidden] A; ids I32 [rows, K], each in [0, experts); slab [*, 3 * intermediate * hidden] BF16 or F32; slots
// I32 [experts]; out [rows * K, hidden] A or F32; present U8 [rows, K]. ids, slots and present contiguous.
struct SwigluRoutedArgs {
  Tensor x, ids, slab, slots, out, present;
  int64_t intermediate = 0;
  Rounding rounding = Rounding::fused;
  Math math = Math::native;
};

// routed[r][j] = sum over slots s = 0, 1, ... with present[r][s] of weights[r][s] * parts[r * K + s][j], in FP32;
// out = rnd!(rnd(routed) + rnd(rnd(sigmoid(gate[r])) * shared[r][j])), or rnd!(routed) without `shared`.
// parts [rows * K, n] BF16 or F32; rows that are not present are not read. weights F32 [rows, K]; present U8 [rows, K]
// or empty (all present); shared [rows, n] and gate [rows, 1] BF16 or F32; gate may be empty (then sigmoid(gate) is 1);
// out [rows, n]. A is the dtype of out: an F32 partial sum that other ranks add to is not rounded.
struct MoeCombineArgs {
  Tensor parts, weights, present, shared, gate, out;
  Rounding rounding = Rounding::fused;
};

// --- n-gram embedding gate ---

// Per row and stream c: s = rnd(rnd(sum_j rnd(key[c][j] * query[c][j])) / sqrt(n)); g = rnd(sqrt(max(|s|, floor))) *
// sign(s) with floor = rnd(1e-6) and sign(0) = 0; out[c][j] = rnd!(rnd(sigmoid(g)) * value[j]). key, query, out [rows,
// streams, n] A; value [rows, n] A.
struct SignedRootGateArgs {
  Tensor key, query, value, out;
  Rounding rounding = Rounding::fused;
};

// --- choice ---

// Per row the k largest, largest first, equal ones (0 equals -0) to the lower index: values[r][s] = x[r][ids[r][s]], +0
// where that is a zero. A row that holds a NaN or +inf has no such order: its ids are all -1, its values left alone.
// x F32 [rows, n]; values F32, ids I32 [rows, k], 1 <= k <= min(n, kTopkMax).
inline constexpr int64_t kTopkMax = 256;  // several times what samplers keep; one block of threads orders so many
struct TopkArgs {
  Tensor x, values, ids;
};

// X-list of the ops: argument struct, name.
#define OFL_FOR_EACH_OP(X)                \
  X(CopyArgs, copy)                       \
  X(GatherRowsArgs, gather_rows)          \
  X(LinearArgs, linear)                   \
  X(RmsNormArgs, rms_norm)                \
  X(ScaledSiluArgs, scaled_silu)          \
  X(SwigluArgs, swiglu)                   \
  X(AddArgs, add)                         \
  X(MulSigmoidArgs, mul_sigmoid)          \
  X(StreamMixArgs, stream_mix)            \
  X(StreamWriteArgs, stream_write)        \
  X(HyperReadArgs, hyper_read)            \
  X(CausalConvSiluArgs, causal_conv_silu) \
  X(GatedDeltaArgs, gated_delta)          \
  X(GatedNormArgs, gated_norm)            \
  X(RopeTableArgs, rope_table)            \
  X(NormRopeArgs, norm_rope)              \
  X(MeanPoolArgs, mean_pool)              \
  X(BlockScoresArgs, block_scores)        \
  X(BlockTopkArgs, block_topk)            \
  X(AttentionArgs, attention)             \
  X(RouterTopkArgs, router_topk)          \
  X(SwigluExpertsArgs, swiglu_experts)    \
  X(SwigluRoutedArgs, swiglu_routed)      \
  X(MoeCombineArgs, moe_combine)          \
  X(SignedRootGateArgs, signed_root_gate) \
  X(TopkArgs, topk)

// The contract functions, one overload per op: check() asserts the preconditions (a violation is a bug of the caller),
// cost() gives bytes and flops, op_name() the label used in traces and benchmarks.
#define OFL_DECLARE_OP(Args, name)                  \
  void check(const Args& args);                     \
  Cost cost(const Args& args);                      \
  constexpr std::string_view op_name(const Args*) { \
    return #name;                                   \
  }
OFL_FOR_EACH_OP(OFL_DECLARE_OP)
#undef OFL_DECLARE_OP

// Watches a lane for attribution: called right before and after each op that runs, on the lane's thread. Not for the
// serving path, and of no use for quoted speeds: a device must be waited for to be timed.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void op_begins() = 0;
  virtual void op_ended(std::string_view name, const Cost& cost) = 0;
};

// Executes ops in program order on one lane of a backend: tensors are touched when the lane comes to the op, host
// arrays among the arguments are read before the call returns. In planning mode nothing runs: the same calls size the
// scratch and add up the costs.
class Ops {
 public:
  virtual ~Ops() = default;

  template <typename Args>
  void operator()(const Args& args) {
    check(args);
    const Cost one = cost(args);
    cost_ += one;
    if (planning_) {
      const int64_t bytes = scratch_bytes(args);
      if (is_aside_) scratch_aside_bytes_ = std::max(scratch_aside_bytes_, bytes);
      scratch_peak_bytes_ = std::max(scratch_peak_bytes_, bytes);
      return;
    }
    if (observer_ != nullptr) observer_->op_begins();
    execute(args);
    if (observer_ != nullptr) observer_->op_ended(op_name(&args), one);
  }

  // A point of the ops' order for the next beside().
  virtual void mark() {}
  // Issues the ops of `body`, which may run beside those issued since mark(); later ops come after both. REQUIRES: body
  // reads nothing written since mark(), and nothing issued since then touches what body writes.
  void beside(const std::function<void()>& body) {
    OFL_ASSERT(!is_aside_);
    is_aside_ = true;
    try {
      run_aside(body);
    } catch (...) {
      is_aside_ = false;
      throw;
    }
    is_aside_ = false;
  }

  void set_planning(bool planning) { planning_ = planning; }
  bool planning() const { return planning_; }
  int64_t scratch_peak_bytes() const { return scratch_peak_bytes_; }
  void reset_scratch_peak() { scratch_peak_bytes_ = scratch_aside_bytes_ = 0; }
  void set_scratch(Tensor scratch) { scratch_ = scratch; }  // U8 [scratch_peak_bytes()], 64-byte aligned
  const Cost& total_cost() const { return cost_; }
  void reset_cost() { cost_ = {}; }
  void add_cost(const Cost& cost) { cost_ += cost; }                 // of ops that a device ran again by itself
  void set_observer(OpObserver* observer) { observer_ = observer; }  // null: none; outlives the ops it watches
  bool observed() const { return observer_ != nullptr; }

 protected:
#define OFL_EXECUTE_OP(Args, name)                   \
  virtual void execute(const Args& args) = 0;        \
  virtual int64_t scratch_bytes(const Args&) const { \
    return 0;                                        \
  }
  OFL_FOR_EACH_OP(OFL_EXECUTE_OP)
#undef OFL_EXECUTE_OP
  const Tensor& scratch() const {
    return scratch_;
  }

  // A backend that has one scratch for all runs ops beside others only when they need none.
  virtual void run_aside(const std::function<void()>& body) {
    body();
  }
  int64_t scratch_aside_bytes() const {
    return scratch_aside_bytes_;
  }  // most that an op of run_aside() was planned with

 private:
  bool planning_ = false;
  bool is_aside_ = false;
  int64_t scratch_peak_bytes_ = 0, scratch_aside_bytes_ = 0;
  Tensor scratch_;
  Cost cost_;
  OpObserver* observer_ = nullptr;
};

}  // namespace offload

#endif  // OFFLOAD_CORE_OPS_H_
