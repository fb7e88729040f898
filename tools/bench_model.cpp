#include "bench_model.h"

#include <algorithm>
#include <chrono>

#include "core/models/registry.h"
#include "core/sampler.h"
#include "run_report.h"
#include "terminal.h"

namespace offload::tools {
namespace {

// A phase of one run.
struct Phase {
  double seconds = 0;
  int64_t link_bytes = 0;
  Cost cost;
  BenchHash hash;
};

class Watch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

// One arm: its engine and one sequence that starts again for each run.
class ModelBench::Runner {
 public:
  struct Result {
    Phase prefill, decode;
  };

  Runner(const Settings& settings, const ModelBenchOptions& options)
      : arm_(settings.arm), options_(options), devices_(settings) {
    const int64_t longest = *std::max_element(options.prompt_tokens.begin(), options.prompt_tokens.end());
    LoadProgress progress(std::string(kBenchProgram), printable(settings.model_dir, 4096));
    EngineOptions engine_options = settings.engine_options();
    // A recorder takes a step's layers one after the other.
    if (options.records_routing) {
      engine_options.prefill_group = 1;
      engine_options.overlap_rows_min = INT64_MAX;
    }
    if (engine_options.context == 0) {
      engine_options.context = longest + options.decode_tokens;
      // The engine's own message would name a flag that was not given.
      const ModelSpec spec = load_model_spec(settings.model_dir);
      if (engine_options.context > spec.context_max)
        throw_error(ErrorCode::usage, "--prompt-tokens {} and --decode-tokens {} exceed the model's {} positions",
                    longest, options.decode_tokens, spec.context_max);
    }
    engine_options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
      stop_if_interrupted();
      progress.update(done_bytes, total_bytes);
    };
    engine_.emplace(engine_options, devices_.devices());
    progress.finish();
    if (longest + options.decode_tokens > engine_->context())
      throw_error(ErrorCode::usage, "--prompt-tokens {} and --decode-tokens {} exceed --context {}", longest,
                  options.decode_tokens, engine_->context());
    sequence_.emplace(engine_->new_sequence());
    for (int64_t i = 0; i < longest; ++i)  // Knuth's multiplicative hash spreads the ids
      prompt_.push_back(static_cast<int32_t>((uint64_t{2654435761u} * static_cast<uint64_t>(i + 1) >> 8) %
                                             static_cast<uint64_t>(engine_->spec().vocab)));
  }

  const std::string& arm() const { return arm_; }
  Engine& engine() { return *engine_; }
  Lane& compute_lane() { return devices_.devices().backends.front()->compute_lane(); }

  Result run(int64_t prompt_tokens, OpObserver* prefill_observer = nullptr, OpObserver* decode_observer = nullptr) {
    const auto prompt = std::span(prompt_).first(static_cast<size_t>(prompt_tokens));
    Result result;
    sequence_->reset();
    if (options_.cold_cache) engine_->forget_experts();
    int32_t next = 0;
    result.prefill = phase(prefill_observer, [&](BenchHash& hash) { next = feed(prompt, hash); });
    result.decode = phase(decode_observer, [&](BenchHash& hash) {
      for (int64_t i = 0; i < options_.decode_tokens; ++i) next = feed(std::span(&next, 1), hash);
    });
    return result;
  }

 private:
  template <typename Body>
  Phase phase(OpObserver* observer, const Body& body) {
    devices_.reset_cost();
    if (observer != nullptr) devices_.set_observer(observer);  // else a trace's own stays
    Phase phase;
    const int64_t moved = link_bytes();
    const Watch watch;
    body(phase.hash);
    phase.seconds = watch.seconds();
    phase.link_bytes = link_bytes() - moved;
    phase.cost = devices_.total_cost();
    if (observer != nullptr) devices_.set_observer(nullptr);
    if (sequence_->length() > 0)
      engine_->last_logits([&](int64_t, std::span<const float> logits) { phase.hash.add(std::as_bytes(logits)); });
    return phase;
  }

  int64_t link_bytes() const {
    int64_t bytes = 0;
    for (int r = 0; r < engine_->world(); ++r) {
      const ExpertExecutor& executor = engine_->rank(r).executor();
      bytes += executor.copied_bytes() + executor.zero_copy_bytes();
    }
    return bytes;
  }

  // The token of largest logit behind `tokens`; 0 where there is none. What is timed is what a greedy user waits for.
  int32_t feed(std::span<const int32_t> tokens, BenchHash& hash) {
    stop_if_interrupted();
    Model::LayerTap tap;  // as Session::feed() has it
    if (tokens.size() > 1) tap = [](size_t, const Tensor&) { stop_if_interrupted(); };
    engine_->feed(*sequence_, tokens, Engine::LogitRows::none, {}, tap);
    const std::span<const Logit> largest = engine_->largest_logits(1);
    const int32_t next = largest.empty() ? 0 : largest.front().id;
    hash.add(std::as_bytes(std::span(&next, 1)));
    return next;
  }

  std::string arm_;
  ModelBenchOptions options_;
  DeviceSet devices_;
  std::optional<Engine> engine_;
  std::optional<Sequence> sequence_;
  std::vector<int32_t> prompt_;
};

ModelBench::ModelBench(std::vector<Settings> arms, const ModelBenchOptions& options)
    : arms_(std::move(arms)), options_(options) {
  OFL_ASSERT(!arms_.empty());
  for (const Settings& settings : arms_) {
    const bool known = std::any_of(runners_.begin(), runners_.end(),
                                   [&](const auto& runner) { return runner->arm() == settings.arm; });
    if (!known) runners_.push_back(std::make_unique<Runner>(settings, options_));
  }
}

ModelBench::~ModelBench() = default;

ModelBench::Runner& ModelBench::runner_of(const Settings& settings) {
  return **std::find_if(runners_.begin(), runners_.end(),
                        [&](const auto& runner) { return runner->arm() == settings.arm; });
}

void ModelBench::warm_up() {
  for (int64_t i = 0; i < options_.warmup; ++i)
    for (const auto& runner : runners_)
      for (const int64_t prompt_tokens : options_.prompt_tokens) runner->run(prompt_tokens);
}

ModelBenchResult ModelBench::run() {
  const auto add = [](BenchRow& row, const Phase& phase) {
    if (!row.seconds.empty() && row.hash != phase.hash.value())
      throw_error(ErrorCode::internal, "{}: two runs gave different logits ({:016x}, {:016x})", row.name, row.hash,
                  phase.hash.value());
    row.hash = phase.hash.value();
    row.cost = phase.cost;
    row.link_bytes = phase.link_bytes;
    row.seconds.push_back(phase.seconds);
  };
  const size_t lengths = options_.prompt_tokens.size();
  std::vector<BenchRow> prefill, decode;  // [arms][lengths]
  for (size_t i = 0; i < arms_.size(); ++i) {
    const auto earlier = std::count_if(arms_.begin(), arms_.begin() + static_cast<std::ptrdiff_t>(i),
                                       [&](const Settings& other) { return other.arm == arms_[i].arm; });
    const std::string name = arms_[i].arm + (earlier > 0 ? fmt::format("/{}", earlier + 1) : "");
    for (const int64_t prompt_tokens : options_.prompt_tokens) {
      const std::string at = lengths > 1 ? fmt::format("@{}", prompt_tokens) : "";
      prefill.push_back({.name = "prefill/" + name + at, .tokens = prompt_tokens});
      decode.push_back({.name = "decode/" + name + at, .tokens = options_.decode_tokens});
    }
  }
  warm_up();
  for (int64_t round = 0; round < options_.repeat; ++round) {
    for (size_t i = 0; i < prefill.size(); ++i) {
      const Runner::Result result = runner_of(arms_[i / lengths]).run(options_.prompt_tokens[i % lengths]);
      add(prefill[i], result.prefill);
      add(decode[i], result.decode);
    }
  }

  ModelBenchResult result;
  result.plan = plan_json(arms_.front(), runners_.front()->engine());
  // The first arm against its repetition, at the length that moved most.
  const auto moved = [&](const std::vector<BenchRow>& rows) {
    double most = 0;
    for (size_t i = 0; i < lengths; ++i)
      most = std::max(most, drift(median(rows[i].seconds), median(rows[rows.size() - lengths + i].seconds)));
    return most;
  };
  if (arms_.size() > 1 && arms_.front().arm == arms_.back().arm)
    result.baseline_drift = options_.decode_tokens > 0 ? std::max(moved(prefill), moved(decode)) : moved(prefill);
  result.rows = std::move(prefill);
  if (options_.decode_tokens > 0) result.rows.insert(result.rows.end(), decode.begin(), decode.end());
  return result;
}

RoutingTrace ModelBench::record_routing() {
  Runner& runner = *runners_.front();
  const RoutingShape shape = runner.engine().routing_shape();
  const int64_t chunk = runner.engine().chunk(), prompt_tokens = options_.prompt_tokens.front(),
                rows = prompt_tokens + options_.decode_tokens;
  const int64_t rows_max = std::min(kTraceIdsMax / (shape.layers * shape.top_k), kTraceRowsMax);
  if (rows > rows_max)
    throw_error(ErrorCode::usage,
                "--trace-routing holds at most {} tokens of this model; --prompt-tokens and "
                "--decode-tokens ask for {}",
                rows_max, rows);
  RoutingRecorder recorder(shape, (prompt_tokens + chunk - 1) / chunk + options_.decode_tokens, chunk, rows);
  runner.engine().record_routing(&recorder);
  runner.run(prompt_tokens);
  runner.engine().record_routing(nullptr);
  OFL_ASSERT(!recorder.full());
  return recorder.trace();
}

Engine& ModelBench::trace() {
  warm_up();
  Runner& runner = *runners_.front();
  runner.engine().clear_trace();
  runner.run(options_.prompt_tokens.front());
  return runner.engine();
}

ModelBench::Profile ModelBench::profile() {
  warm_up();
  Profile profile;
  profile.prefill.set_lane(&runners_.front()->compute_lane());
  profile.decode.set_lane(&runners_.front()->compute_lane());
  const Runner::Result result =
      runners_.front()->run(options_.prompt_tokens.front(), &profile.prefill, &profile.decode);
  profile.prefill_s = result.prefill.seconds;
  profile.decode_s = result.decode.seconds;
  return profile;
}

}  // namespace offload::tools
