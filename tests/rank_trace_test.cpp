// The trace of a real run: what it holds, and that recording it changes nothing else.
#include "offload/rank_trace.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <thread>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_ops.h"
#include "cpu/thread_collective.h"
#include "golden.h"
#include "offload/engine.h"
#include "offload/policy_replay.h"
#include "trace_checks.h"

namespace offload::rank_trace_test {

namespace {

constexpr int64_t kLayers = 8;
constexpr size_t kDecoded = 3;

struct TracedRun {
  int ranks = 1;
  ShardForm shard = ShardForm::expert;
  int64_t slots = 0;
  int64_t trace_events = 1 << 16;
};

// The demo over a prompt in two chunks and some tokens behind it.
class Rig {
 public:
  explicit Rig(const TracedRun& run) : group_(run.ranks) {
    EngineOptions options;
    options.model_dir = Golden::model_dir();
    options.context = 256;
    options.chunk = 16;
    options.prefill_group = 16;  // a step for each chunk
    options.shard = run.shard;
    options.cache = {.slots = run.slots};
    options.trace_events = run.trace_events;
    std::vector<Backend*> backends;
    std::vector<Collective*> ends;
    for (int rank = 0; rank < run.ranks; ++rank) {
      backends_.push_back(
          std::make_unique<cpu::CpuBackend>(std::make_unique<cpu::CpuOps>(cpu::CpuOpsOptions{.threads = 1})));
      backends.push_back(backends_.back().get());
      if (run.ranks > 1) {
        ends_.push_back(group_.end(rank));
        ends.push_back(ends_.back().get());
      }
    }
    engine_ = std::make_unique<Engine>(options, Devices(backends, ends));
  }

  Engine& engine() { return *engine_; }
  cpu::CpuBackend& backend(int rank) { return *backends_[static_cast<size_t>(rank)]; }

  static constexpr int64_t kSteps = 2 + static_cast<int64_t>(kDecoded);  // two chunks

  std::vector<float> run() {
    std::vector<int32_t> prompt(20);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(17 * i + 5);
    Sequence sequence = engine_->new_sequence();
    std::vector<float> out;
    const auto keep = [&](int64_t, std::span<const float> logits) {
      out.insert(out.end(), logits.begin(), logits.end());
    };
    engine_->feed(sequence, prompt, Engine::LogitRows::last, keep);
    for (size_t i = 0; i < kDecoded; ++i)
      engine_->feed(sequence, std::span(prompt).subspan(i, 1), Engine::LogitRows::last, keep);
    return out;
  }

  Json document() { return parse_json(trace_json(engine_->trace()), "trace"); }

  int64_t copied_bytes() const {
    int64_t bytes = 0;
    for (int r = 0; r < engine_->world(); ++r) bytes += engine_->rank(r).executor().copied_bytes();
    return bytes;
  }

 private:
  cpu::ThreadGroup group_;
  std::vector<std::unique_ptr<Collective>> ends_;
  std::vector<std::unique_ptr<cpu::CpuBackend>> backends_;
  std::unique_ptr<Engine> engine_;
};

// Complete events by lane and name.
std::map<std::string, std::map<std::string, int64_t>> counts(const Json& document) {
  const std::map<int64_t, std::string> lanes = lane_names(document);
  std::map<std::string, std::map<std::string, int64_t>> found;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == "X") ++found[lanes.at(event["tid"].get<int64_t>())][event["name"].get<std::string>()];
  return found;
}

}  // namespace

TEST_CASE("a_run_fills_the_lanes_of_every_rank_with_its_ops_copies_all_reduces_and_steps") {
  for (const TracedRun& run : {TracedRun{}, TracedRun{.slots = 12}, TracedRun{.ranks = 2, .slots = 12},
                               TracedRun{.ranks = 4, .shard = ShardForm::slice, .slots = 40}}) {
    CAPTURE(run.ranks);
    CAPTURE(run.slots);
    Rig rig(run);
    rig.run();
    const Json document = rig.document();
    CHECK(document["otherData"]["dropped_events"] == 0);
    check_lanes(document);
    CHECK(std::ssize(lane_names(document)) == 4 * run.ranks);
    const auto found = counts(document);
    int64_t copies = 0, copied = 0;
    for (int r = 0; r < run.ranks; ++r) {
      const auto lane = [&](const char* name) {
        const auto at = found.find(fmt::format("rank {}/{}", r, name));
        return at == found.end() ? std::map<std::string, int64_t>{} : at->second;
      };
      CHECK(lane("compute")["router_topk"] == kLayers * Rig::kSteps);
      CHECK(lane("compute")["moe_combine"] == kLayers * Rig::kSteps);
      CHECK(lane("collective")["all_reduce"] == (run.ranks == 1 ? 0 : 2 * kLayers * Rig::kSteps));
      CHECK(lane("host")["step"] == Rig::kSteps);
      CHECK(lane("host")["layer"] == kLayers * Rig::kSteps);
      CHECK(lane("host")["wait_logits"] == 1 + static_cast<int64_t>(kDecoded));
      CHECK(lane("host")["wait_ranks"] == (run.ranks == 1 ? 0 : Rig::kSteps));
      copies += lane("copy")["copy"] + lane("copy")["look_ahead"];
    }
    for (const Json& event : events_on(document, "copy")) {
      copied += event["args"]["bytes"].get<int64_t>();
      CHECK(event["args"]["layer"].get<int64_t>() < kLayers);
      CHECK(event["args"]["expert"].get<int64_t>() < 32);
    }
    CHECK(copied == rig.copied_bytes());
    CHECK((copies > 0) == (run.slots > 0));
  }
}

TEST_CASE("the_host_waits_at_most_once_per_layer_and_step_and_the_trace_says_where") {
  Rig rig({.ranks = 2, .slots = 12});
  rig.run();
  const Json document = rig.document();
  const std::map<int64_t, std::string> lanes = lane_names(document);
  // Of each rank, the steps so far and then the waits of the step by layer.
  std::map<std::string, std::map<std::pair<int64_t, int64_t>, int64_t>> waits;
  std::map<std::string, int64_t> steps;
  for (const Json& event : events_on(document, "host")) {
    const std::string name = event["name"], lane = lanes.at(event["tid"].get<int64_t>());
    if (name == "step") ++steps[lane];
    if (name.starts_with("wait_") && event["args"].contains("layer"))
      ++waits[lane][{steps[lane], event["args"]["layer"].get<int64_t>()}];
  }
  REQUIRE(waits.size() == 2);
  for (const auto& [lane, of_lane] : waits) {
    CHECK(std::ssize(of_lane) == kLayers * Rig::kSteps);
    for (const auto& [where, count] : of_lane) CHECK(count == 1);
  }
}

TEST_CASE("a_copy_lies_on_its_lane_between_its_issue_and_its_run_however_the_lane_dawdles") {
  Rig rig({.slots = 6});
  std::atomic<int> copies = 0;
  rig.backend(0).lanes().set_before_copy([&] {
    if (++copies % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
  });
  rig.run();
  const Json document = rig.document();
  check_lanes(document);
  int64_t slow = 0;
  for (const Json& event : events_on(document, "copy")) slow += trace_ns(event["dur"]) >= 300'000;
  CHECK(slow >= copies / 5 - Rig::kSteps);  // a step fetches its table rows on that lane too, and past the hook
}

TEST_CASE("a_trace_changes_no_bit_and_none_is_kept_without_being_asked_for") {
  const std::vector<float> expected = Rig({.slots = 12, .trace_events = 0}).run();
  Rig traced({.slots = 12}), plain({.slots = 12, .trace_events = 0}), tight({.slots = 12, .trace_events = 100});
  CHECK(traced.run() == expected);
  CHECK(plain.run() == expected);
  CHECK(tight.run() == expected);
  CHECK(plain.engine().trace().empty());
  REQUIRE(tight.engine().trace().size() == 1);
  CHECK(tight.engine().trace()[0]->events() == 100);
  CHECK(tight.engine().trace()[0]->events() + tight.engine().trace()[0]->dropped() ==
        traced.engine().trace()[0]->events());
  traced.engine().clear_trace();
  CHECK(traced.engine().trace()[0]->events() == 0);
  CHECK(traced.run() == expected);
  CHECK(counts(traced.document())["rank 0/host"]["step"] == Rig::kSteps);
}

TEST_CASE("recorded_routing_replays_to_the_hits_and_misses_of_the_run") {
  for (const TracedRun& run : {TracedRun{.slots = 6}, TracedRun{.slots = 60}, TracedRun{.ranks = 2, .slots = 20},
                               TracedRun{.ranks = 2, .shard = ShardForm::slice, .slots = 20}}) {
    CAPTURE(run.ranks);
    CAPTURE(run.slots);
    Rig rig(run);
    Engine& engine = rig.engine();
    CHECK(engine.routing_shape() == RoutingShape{kLayers, 32, 4});
    RoutingRecorder recorder(engine.routing_shape(), Rig::kSteps, engine.chunk(), 20 + kDecoded);
    engine.record_routing(&recorder);
    rig.run();
    engine.record_routing(nullptr);
    CHECK_FALSE(recorder.full());
    const RoutingTrace trace = parse_trace(serialize_trace(recorder.trace()), "t");
    REQUIRE(trace.steps() == Rig::kSteps);
    for (int r = 0; r < run.ranks; ++r) {
      const ExpertPolicy& used = *engine.rank(r).executor().policy();
      ExpertPolicy fresh(used.options());
      const Replay replayed = replay(fresh, trace, 0, trace.steps());
      for (const auto& [phase, counts] :
           {std::pair(Phase::prefill, replayed.prefill.counts), std::pair(Phase::decode, replayed.decode.counts)}) {
        CHECK(counts.hits == used.counts(phase).hits);
        CHECK(counts.misses == used.counts(phase).misses);
        CHECK(counts.copies_lookahead == used.counts(phase).copies_lookahead);
      }
      CHECK(replayed.copies() * engine.residency().local_shape().block_bytes() ==
            engine.rank(r).executor().copied_bytes());
    }
  }
}

TEST_CASE("a_run_that_fails_leaves_a_trace_of_what_ended") {
  Rig rig({.ranks = 2, .slots = 6});
  std::atomic<int> copies = 0;
  rig.backend(1).lanes().set_before_copy([&] {
    if (++copies == 20) throw Error(ErrorCode::device, "the link broke");
  });
  CHECK_THROWS_AS(rig.run(), Error);
  const Json document = rig.document();
  check_lanes(document);
  const auto found = counts(document);
  CHECK(found.at("rank 1/copy").at("copy") < 20);
  CHECK(found.at("rank 0/compute").at("router_topk") > 0);
}

}  // namespace offload::rank_trace_test
