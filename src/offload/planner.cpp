#include "offload/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace offload {
namespace {

// Device context, library handles, fragmentation: assumed, half a GiB.
constexpr int64_t kReserveBytes = int64_t{1} << 29;
constexpr int64_t kDecodeSteps = 96;
constexpr int64_t kSlotsMin = 2;  // one fills while the other is read
constexpr double kImprovement = 1.1;

// One candidate with its bytes; judged by the simulated time of the request.
struct Candidate {
  SimOptions options;
  PlanMemory memory;
  Simulation result;
  double request_s = std::numeric_limits<double>::infinity();
};

double request_seconds(const Simulation& result, const PlanRequest& request) {
  double seconds = 0;
  if (result.prefill.tokens > 0) seconds += static_cast<double>(request.prompt_tokens) / result.prefill.tokens_per_s();
  if (result.decode.tokens > 0) seconds += static_cast<double>(request.decode_tokens) / result.decode.tokens_per_s();
  return seconds;
}

class Search {
 public:
  Search(const Machine& machine, const ModelSpec& spec, const PlanRequest& request, const RoutingTrace& trace,
         const std::function<void()>& progress);

  Plan run();

 private:
  int64_t slot_bytes(ShardForm shard) const;
  int64_t slots_of_all(ShardForm shard) const;
  int64_t group_of(const SimOptions& options) const;
  // Fills in memory and slots. Returns whether it fits.
  bool fit(Candidate& candidate, int64_t budget) const;
  double judge(Candidate& candidate, const CostModel& costs);
  // Keeps the better one.
  void consider(const SimOptions& options);
  int64_t longest_prompt_step() const;
  std::vector<int64_t> chunks() const;
  void search_form(ShardForm shard);
  [[noreturn]] void refuse() const;
  void add_levers(Plan& plan);

  const Machine& machine_;
  const PlanRequest& request_;
  const RoutingTrace& trace_;
  const std::function<void()>& progress_;
  StepProgrammer programmer_;
  CostModel costs_;
  bool is_calibrated_;
  int64_t budget_, decode_warm_ = 0, candidates_ = 0;
  std::optional<Candidate> best_, best_of_form_;
};

int64_t context_of(const ModelSpec& spec, const PlanRequest& request, const RoutingTrace& trace) {
  if (request.prompt_tokens < 1 || request.decode_tokens < 0)
    throw_error(ErrorCode::usage, "a request of {} prompt tokens and {} more, expected 1 or more and 0 or more",
                request.prompt_tokens, request.decode_tokens);
  int64_t rows = 0;  // at most, if the trace is one prompt and its answer
  for (int64_t s = 0; s < trace.steps(); ++s) rows += trace.rows(s);
  const int64_t context = std::max(rows, request.prompt_tokens + request.decode_tokens);
  if (context > spec.context_max)
    throw_error(ErrorCode::usage, "{} positions are needed, the model has {}: shorten the prompt or the trace", context,
                spec.context_max);
  return context;
}

Search::Search(const Machine& machine, const ModelSpec& spec, const PlanRequest& request, const RoutingTrace& trace,
               const std::function<void()>& progress)
    : machine_(machine),
      request_(request),
      trace_(trace),
      progress_(progress),
      programmer_(spec, request.world, context_of(spec, request, trace)),
      costs_(machine, request.math, request.world),
      is_calibrated_(costs_.calibrate(programmer_)),
      budget_(request.vram_bytes > 0 ? request.vram_bytes : machine.device.memory_bytes) {
  if (budget_ > machine.device.memory_bytes)
    throw_error(ErrorCode::usage, "--vram-budget {:.2f} GiB: a device of \"{}\" has {:.2f}",
                static_cast<double>(budget_) / kGib, machine.name,
                static_cast<double>(machine.device.memory_bytes) / kGib);
  int64_t decode_steps = 0;
  for (int64_t s = 0; s < trace.steps(); ++s) decode_steps += trace.phase(s) == Phase::decode ? 1 : 0;
  decode_warm_ = decode_steps / 2;
  if (trace.steps() == 0) throw_error(ErrorCode::usage, "the routing trace is empty; record at least one step");
}

int64_t Search::slot_bytes(ShardForm shard) const {
  const int64_t bytes = programmer_.expert_shape().block_bytes();
  return shard == ShardForm::slice ? bytes / request_.world : bytes;
}

int64_t Search::slots_of_all(ShardForm shard) const {
  const RoutingShape shape = programmer_.routing_shape();
  const int64_t held =
      shard == ShardForm::slice ? shape.experts : (shape.experts + request_.world - 1) / request_.world;
  return shape.layers * held;
}

// By layers, the whole prompt is one group of whole chunks.
int64_t Search::group_of(const SimOptions& options) const {
  if (options.order == PrefillOrder::chunk_major) return options.chunk;
  const int64_t chunks = (request_.prompt_tokens + options.chunk - 1) / options.chunk;
  return std::min(chunks * options.chunk, programmer_.context());
}

bool Search::fit(Candidate& candidate, int64_t budget) const {
  SimOptions& options = candidate.options;
  const int64_t rows = std::min(options.chunk, programmer_.context());
  const RoutingShape shape = programmer_.routing_shape();
  // Beside the blocks' own workspace: SwiGLU outputs of all routed rows; of slices, the other half of F32 parts.
  const ExpertShape expert = programmer_.expert_shape();
  const int64_t part_width = options.shard == ShardForm::slice ? expert.hidden : 0;
  const int64_t activated = rows * shape.top_k * (expert.intermediate + part_width) * 2;
  candidate.memory = {.budget = budget,
                      .reserve = std::min(kReserveBytes, budget / 16),
                      .weights = programmer_.weight_bytes(),
                      .sequence = programmer_.sequence_bytes(),
                      .workspace = programmer_.workspace_bytes(rows) + activated,
                      .stacks = programmer_.stack_bytes(group_of(options), options.chunk)};
  const int64_t all = slots_of_all(options.shard), left = budget - candidate.memory.total();
  const int64_t slots = left <= 0 ? 0 : std::min(all, left / slot_bytes(options.shard));
  candidate.memory.slots = slots * slot_bytes(options.shard);
  options.policy.slots = slots;
  return costs_.has_link() ? slots >= std::min(kSlotsMin, all) : slots == all;
}

double Search::judge(Candidate& candidate, const CostModel& costs) {
  candidate.result = simulate(costs, programmer_, candidate.options, trace_);
  candidate.request_s = request_seconds(candidate.result, request_);
  if (progress_) progress_();
  return candidate.request_s;
}

void Search::consider(const SimOptions& options) {
  Candidate candidate{.options = options, .memory = {}, .result = {}};
  if (!fit(candidate, budget_)) return;
  ++candidates_;
  if (judge(candidate, costs_) < (best_of_form_ ? best_of_form_->request_s : candidate.request_s + 1))
    best_of_form_ = candidate;
}

int64_t Search::longest_prompt_step() const {
  int64_t longest = 1;
  for (int64_t s = 0; s < trace_.steps(); ++s)
    if (trace_.phase(s) == Phase::prefill) longest = std::max(longest, trace_.rows(s));
  return longest;
}

// Powers of two up to the longest prompt step.
std::vector<int64_t> Search::chunks() const {
  const int64_t longest = longest_prompt_step();
  std::vector<int64_t> out;
  for (int64_t chunk = std::min<int64_t>(512, longest); chunk < longest && chunk <= 32768; chunk *= 2)
    out.push_back(chunk);
  if (longest <= 32768) out.push_back(longest);
  return out;
}

// One setting after another, each with the best of those before: chunk, then order, look-ahead and host share.
void Search::search_form(ShardForm shard) {
  best_of_form_.reset();
  SimOptions options{.shard = shard};
  options.decode_warm = decode_warm_;
  for (const int64_t chunk : chunks()) {
    options.chunk = chunk;
    consider(options);
  }
  if (!best_of_form_) return;
  const auto vary = [&](auto&& change) {
    SimOptions varied = best_of_form_->options;
    change(varied);
    consider(varied);
  };
  vary([](SimOptions& varied) { varied.order = PrefillOrder::layer_major; });
  if (costs_.has_link()) {
    for (const int layers : {0, 2}) vary([&](SimOptions& varied) { varied.policy.lookahead_layers = layers; });
    if (costs_.has_host())
      for (const int64_t permille : {250, 500, 750, 1000})
        vary([&](SimOptions& varied) { varied.policy.host_permille = permille; });
  }
  if (!best_ || best_of_form_->request_s < best_->request_s) best_ = best_of_form_;
}

void Search::refuse() const {
  Candidate least{.options = {}, .memory = {}, .result = {}};
  least.options.chunk = chunks().front();
  least.options.shard = request_.world > 1 ? ShardForm::slice : ShardForm::expert;
  fit(least, budget_);
  const PlanMemory& memory = least.memory;
  const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / kGib; };
  const int64_t needed_slots = costs_.has_link() ? kSlotsMin : slots_of_all(least.options.shard);
  std::string remedies = "a shorter prompt";
  if (request_.world < machine_.device.count) remedies += ", more ranks";
  remedies += budget_ < machine_.device.memory_bytes ? ", a larger --vram-budget" : " or devices with more memory";
  throw_error(
      ErrorCode::resource,
      "nothing fits: weights {:.3f} GiB, state of {} positions {:.3f}, workspace of {} rows {:.3f}, reserve "
      "{:.3f} and {} slots {:.3f} make {:.3f} of {:.3f} per rank: {}",
      gib(memory.weights), programmer_.context(), gib(memory.sequence), least.options.chunk, gib(memory.workspace),
      gib(memory.reserve), needed_slots, gib(needed_slots * slot_bytes(least.options.shard)),
      gib(memory.total() - memory.slots + needed_slots * slot_bytes(least.options.shard)), gib(budget_), remedies);
}

void Search::add_levers(Plan& plan) {
  const Simulation& base = plan.predicted;
  const auto gain = [](double now, double then) { return now > 0 ? then / now - 1 : 0; };
  const auto try_lever = [&](const char* input, const Machine& machine, int64_t budget) {
    Candidate candidate{.options = plan.options, .memory = {}, .result = {}};
    if (!fit(candidate, budget)) return;
    judge(candidate, costs_.on(machine));
    plan.levers.push_back({input, gain(base.prefill.tokens_per_s(), candidate.result.prefill.tokens_per_s()),
                           gain(base.decode.tokens_per_s(), candidate.result.decode.tokens_per_s()),
                           gain(candidate.request_s, plan.request_s)});
  };
  const auto improve = [&](const char* input, auto&& change) {
    Machine machine = machine_;
    change(machine);
    try_lever(input, machine, budget_);
  };
  improve("device.memory_gib_s", [](Machine& m) { m.device.memory_bytes_per_s *= kImprovement; });
  improve("device.gemm_tflops", [](Machine& m) {
    for (double& flops : m.device.gemm_flops) flops *= kImprovement;
  });
  if (machine_.device.launch_gap_s > 0)
    improve("device.launch_gap_us", [](Machine& m) { m.device.launch_gap_s /= kImprovement; });
  if (costs_.has_link()) improve("link.h2d_gib_s", [](Machine& m) { m.link.h2d_bytes_per_s *= kImprovement; });
  if (request_.world > 1)
    improve("collective", [](Machine& m) {
      for (CollectivePoint& point : m.collective) point.duration_s /= kImprovement;
    });
  if (machine_.host.wait_s > 0) improve("host.wait_us", [](Machine& m) { m.host.wait_s /= kImprovement; });
  if (machine_.host.plan_s > 0) improve("host.plan_us", [](Machine& m) { m.host.plan_s /= kImprovement; });
  if (machine_.host.launch_s > 0) improve("host.launch_us", [](Machine& m) { m.host.launch_s /= kImprovement; });
  if (plan.options.policy.host_permille > 0)
    improve("host.dram_gib_s", [](Machine& m) {
      m.host.dram_bytes_per_s *= kImprovement;
      m.host.dram_with_h2d_bytes_per_s *= kImprovement;
    });
  if (plan.options.policy.slots < plan.experts_per_rank)
    try_lever("vram", machine_, std::llround(static_cast<double>(budget_) * kImprovement));
  std::stable_sort(plan.levers.begin(), plan.levers.end(),
                   [](const Lever& a, const Lever& b) { return a.request_gain > b.request_gain; });
}

Plan Search::run() {
  search_form(ShardForm::expert);
  if (request_.world > 1) search_form(ShardForm::slice);
  if (!best_) refuse();
  Plan plan{.options = best_->options,
            .memory = best_->memory,
            .prefill_group = group_of(best_->options),
            .slot_bytes = slot_bytes(best_->options.shard),
            .experts_per_rank = slots_of_all(best_->options.shard),
            .is_calibrated = is_calibrated_,
            .predicted = best_->result,
            .request_s = best_->request_s,
            .candidates = candidates_,
            .levers = {},
            .notes = {}};
  if (!costs_.has_link())
    plan.notes.emplace_back(
        "the machine file has no link: experts lie where the device reads them; no look-ahead and no "
        "host share were tried");
  else if (!costs_.has_host())
    plan.notes.emplace_back("the machine file has no host.dram_gib_s: running experts on the host was not tried");
  if (const int64_t longest = longest_prompt_step(); longest < std::min<int64_t>(request_.prompt_tokens, 32768))
    plan.notes.push_back(fmt::format("the routing has prompts of up to {} tokens, not {}: longer chunks were not tried",
                                     longest, request_.prompt_tokens));
  if (machine_.calibration && !is_calibrated_)
    plan.notes.emplace_back(
        "the machine's calibration is for another model or number of ranks: decode is by the roofs");
  const int64_t experts_bytes = programmer_.routing_shape().layers * programmer_.routing_shape().experts *
                                programmer_.expert_shape().block_bytes();
  if (machine_.host.ram_bytes > 0 && experts_bytes > machine_.host.ram_bytes)
    plan.notes.push_back(fmt::format("the experts take {:.1f} GiB of host memory, the machine has {:.1f}",
                                     static_cast<double>(experts_bytes) / kGib,
                                     static_cast<double>(machine_.host.ram_bytes) / kGib));
  add_levers(plan);
  return plan;
}

}  // namespace

Plan plan_serving(const Machine& machine, const ModelSpec& spec, const PlanRequest& request, const RoutingTrace& trace,
                  const std::function<void()>& progress) {
  return Search(machine, spec, request, trace, progress).run();
}

// The prompt touches as much as was counted on a real one (docs/simulation.md); the answer returns to experts as the
// published hit rates say (docs/policy.md). Equal seeds give both the same popular experts.
RoutingTrace draw_planning_trace(const RoutingShape& shape, int64_t prompt_tokens, uint64_t seed) {
  const DrawnStep prompt{Phase::prefill, prompt_tokens};
  RoutingTrace trace = draw_trace(shape, SkewedRouting{.partner = 0, .topics = 2}, {&prompt, 1}, seed);
  const std::vector<DrawnStep> answer(static_cast<size_t>(kDecodeSteps), DrawnStep{});
  trace.append(draw_trace(shape, SkewedRouting{}, answer, seed));
  return trace;
}

}  // namespace offload
