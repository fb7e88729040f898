#include "parity_run.h"

#include <algorithm>
#include <chrono>

#include "backends.h"
#include "terminal.h"

namespace offload::tools {
namespace {

// An arm's engine, which takes one prompt after the other.
class ForcedRunner {
 public:
  ForcedRunner(const Settings& settings, int64_t context) : devices_(settings) {
    LoadProgress progress(std::string(kParityProgram), fmt::format("arm {}", settings.arm));
    EngineOptions options = settings.engine_options();
    options.context = std::max(context, options.context);
    options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
      stop_if_interrupted();
      progress.update(done_bytes, total_bytes);
    };
    engine_.emplace(options, devices_.devices());
    progress.finish();
    sequence_.emplace(engine_->new_sequence());
  }

  // sink(row, logits) for each of rows.ids.
  void force(const ForcedRows& rows, const Engine::LogitSink& sink) {
    sequence_->reset();
    const auto ids = std::span(rows.ids);
    feed(ids.first(static_cast<size_t>(rows.prompt_tokens)), sink);
    for (auto row = static_cast<size_t>(rows.prompt_tokens); row < ids.size(); ++row) feed(ids.subspan(row, 1), sink);
  }

  // The prompt with `decode_tokens` tokens behind it, each the most likely after those before.
  ForcedRows chain(const std::vector<int32_t>& prompt, int64_t decode_tokens) {
    ForcedRows rows{prompt, static_cast<int64_t>(prompt.size()), {}};
    const Engine::LogitSink keep = [&](int64_t, std::span<const float> logits) {
      rows.logits.insert(rows.logits.end(), logits.begin(), logits.end());
    };
    sequence_->reset();
    feed(prompt, keep);
    const auto vocab = static_cast<size_t>(engine_->spec().vocab);
    for (int64_t i = 0; i < decode_tokens; ++i) {
      rows.ids.push_back(top_two(std::span<const float>(rows.logits).last(vocab)).ids[0]);
      feed(std::span(&rows.ids.back(), 1), keep);
    }
    return rows;
  }

 private:
  // Rows are counted from the start of the sequence.
  void feed(std::span<const int32_t> ids, const Engine::LogitSink& sink) {
    const int64_t first = sequence_->length();
    engine_->feed(
        *sequence_, ids, Engine::LogitRows::all,
        [&](int64_t row, std::span<const float> logits) { sink(first + row, logits); },
        [](size_t, const Tensor&) { stop_if_interrupted(); });
  }

  DeviceSet devices_;
  std::optional<Engine> engine_;
  std::optional<Sequence> sequence_;
};

std::span<const float> row_of(const ForcedRows& rows, int64_t row) {
  const size_t vocab = rows.logits.size() / rows.ids.size();
  return std::span(rows.logits).subspan(static_cast<size_t>(row) * vocab, vocab);
}

// The same tokens with the logits of another run.
std::vector<ForcedRows> forced_on(ForcedRunner& runner, const std::vector<ForcedRows>& prompts) {
  std::vector<ForcedRows> out;
  for (const ForcedRows& prompt : prompts) {
    ForcedRows& rows = out.emplace_back(ForcedRows{prompt.ids, prompt.prompt_tokens, {}});
    rows.logits.reserve(prompt.logits.size());
    runner.force(prompt, [&](int64_t, std::span<const float> logits) {
      rows.logits.insert(rows.logits.end(), logits.begin(), logits.end());
    });
  }
  return out;
}

ArmResult start_result(const Settings& settings, size_t prompts, bool has_oracle) {
  ArmResult result{.arm = settings.arm, .rules = settings.arithmetic.rules, .prompts = {}, .total = {}};
  for (const Arm& arm : bundled_arms())
    if (arm.name == settings.arm) result.status = arm.status;
  result.prompts.resize(prompts);
  for (PromptResult& prompt : result.prompts)
    if (has_oracle) prompt.against_oracle.emplace();
  return result;
}

void add_totals(ArmResult& result) {
  for (const PromptResult& prompt : result.prompts) {
    result.total.add(prompt.against_baseline);
    if (!prompt.against_oracle) continue;
    if (!result.oracle_total) result.oracle_total.emplace();
    result.oracle_total->add(*prompt.against_oracle);
  }
}

struct Compared {
  const std::vector<ForcedRows>& baseline;
  const std::vector<ForcedRows>& oracle;  // empty without one

  void add(ArmResult& result, size_t prompt, int64_t row, std::span<const float> logits) const {
    PromptResult& out = result.prompts[prompt];
    out.against_baseline.add(row, row_of(baseline[prompt], row), logits);
    if (!oracle.empty()) out.against_oracle->add(row, row_of(oracle[prompt], row), logits);
  }
};

ArmResult run_arm(const Settings& settings, int64_t context, const Compared& compared) {
  ForcedRunner runner(settings, context);
  ArmResult result = start_result(settings, compared.baseline.size(), !compared.oracle.empty());
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < compared.baseline.size(); ++i)
    runner.force(compared.baseline[i],
                 [&](int64_t row, std::span<const float> logits) { compared.add(result, i, row, logits); });
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  add_totals(result);
  return result;
}

}  // namespace

ArmScore ParityResult::score(const ArmResult& arm) const {
  ArmScore score{.flips = arm.total.flips(),
                 .rows_not_finite = arm.total.rows_not_finite(),
                 .largest_margin = arm.total.largest_margin()};
  for (size_t i = 0; i < prompts.size(); ++i)
    score.prompts.push_back({prompts[i].name, arm.prompts[i].against_baseline.flips()});
  if (arm.oracle_total) score.oracle = OracleKl{arm.oracle_total->mean_kl(), arm.oracle_total->median_kl()};
  return score;
}

Yardstick ParityResult::yardstick() const {
  Yardstick yardstick;
  for (const ArmResult& arm : arms) {
    if (arm.status != ArmStatus::control) continue;
    yardstick.flips = std::max(yardstick.flips, arm.total.flips());
    yardstick.largest_margin = std::max(yardstick.largest_margin, arm.total.largest_margin());
    yardstick.prompt_flips.resize(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i)
      yardstick.prompt_flips[i] = std::max(yardstick.prompt_flips[i], arm.prompts[i].against_baseline.flips());
  }
  yardstick.baseline = score(baseline).oracle;
  return yardstick;
}

std::vector<std::string> ParityResult::broken_promises() const {
  std::vector<std::string> broken;
  for (const ArmResult& arm : arms) {
    if (arm.status != ArmStatus::strict) continue;
    for (const std::string& fault : faults(arm))
      broken.push_back(fmt::format("{} is marked strict: {}", arm.arm, fault));
  }
  return broken;
}

ParityResult run_parity(const ParityJob& job) {
  int64_t context = job.reference ? static_cast<int64_t>(job.reference->ids.size()) : 0;
  for (const ParityPrompt& prompt : job.prompts)
    context = std::max(context, static_cast<int64_t>(prompt.ids.size()) + job.decode_tokens);

  std::vector<ForcedRows> baseline, oracle;
  if (job.reference) oracle.push_back(*job.reference);
  ParityResult result;
  double baseline_s = 0;
  {
    ForcedRunner runner(job.baseline, context);
    const auto start = std::chrono::steady_clock::now();
    if (job.reference) baseline = forced_on(runner, oracle);
    for (const ParityPrompt& prompt : job.prompts) baseline.push_back(runner.chain(prompt.ids, job.decode_tokens));
    baseline_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  if (job.oracle) {
    ForcedRunner runner(*job.oracle, context);
    oracle = forced_on(runner, baseline);
  }
  for (size_t i = 0; i < baseline.size(); ++i)
    result.prompts.push_back(
        {job.reference ? "reference" : job.prompts[i].name, baseline[i].prompt_tokens, baseline[i].decode_tokens()});
  if (job.reference) result.oracle = "reference";
  if (job.oracle) result.oracle = job.oracle->arm;

  const Compared compared{baseline, oracle};
  result.baseline = start_result(job.baseline, baseline.size(), !oracle.empty());
  result.baseline.seconds = baseline_s;
  for (size_t i = 0; i < baseline.size(); ++i)
    for (int64_t row = 0; row < static_cast<int64_t>(baseline[i].ids.size()); ++row)
      compared.add(result.baseline, i, row, row_of(baseline[i], row));
  add_totals(result.baseline);
  for (const Settings& arm : job.arms) result.arms.push_back(run_arm(arm, context, compared));
  return result;
}

}  // namespace offload::tools
