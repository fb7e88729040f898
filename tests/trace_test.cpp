#include "offload/trace.h"

#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <new>

#include "core/json.h"
#include "counted_heap.h"
#include "offload/simulator.h"
#include "simulation_cases.h"
#include "trace_checks.h"

namespace offload::trace_test {

namespace {

Json parsed(std::initializer_list<const TraceBuffer*> buffers) {
  const std::vector<const TraceBuffer*> list(buffers);
  return parse_json(trace_json(list), "trace");
}

}  // namespace

TEST_CASE("a_trace_is_json_with_processes_threads_and_nanoseconds") {
  TraceBuffer buffer({{"rank 0", "compute"}, {"rank 0", "copy"}, {"host \"a\"\n", "cores"}}, 16);
  buffer.complete(1, "copy", 1, 1001, {.layer = 2, .expert = 3, .bytes = 4});
  buffer.complete(2, "expert", 5, 5);
  buffer.counter(0, "slots", 7, 42);
  const Json document = parsed({&buffer});
  std::map<std::string, int64_t> seen;
  for (const Json& event : document["traceEvents"]) {
    ++seen[event["ph"].get<std::string>()];
    if (event["name"] == "copy") {
      CHECK(event["ts"] == 0.001);
      CHECK(event["dur"] == 1.0);
      CHECK(event["tid"] == 1);
      CHECK(event["args"] == Json({{"layer", 2}, {"expert", 3}, {"bytes", 4}}));
    }
    if (event["name"] == "expert") CHECK(event["args"] == Json::object());
    if (event["ph"] == "C") CHECK(event["args"]["value"] == 42);
  }
  CHECK(seen["M"] == 5);  // two processes, three threads
  CHECK(seen["X"] == 2);
  CHECK(seen["C"] == 1);
  CHECK(document["otherData"]["dropped_events"] == 0);
}

TEST_CASE("events_come_out_by_time_with_outer_ones_first") {
  TraceBuffer buffer({{"p", "t"}}, 8);
  buffer.complete(0, "inner", 10, 20);
  buffer.complete(0, "outer", 10, 40);
  buffer.complete(0, "last", 40, 41);
  buffer.complete(0, "first", 0, 10);
  const Json document = parsed({&buffer});
  check_lanes(document);
  std::string order;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == "X") order += event["name"].get<std::string>() + " ";
  CHECK(order == "first outer inner last ");
}

TEST_CASE("buffers_of_several_ranks_share_processes_by_name_and_never_threads") {
  TraceBuffer a({{"rank 0", "compute"}, {"host", "cores"}}, 2), b({{"rank 1", "compute"}, {"host", "disk"}}, 2);
  a.complete(0, "x", 0, 1);
  b.complete(0, "x", 0, 1);
  std::map<int64_t, int64_t> pid_of_tid;
  std::map<std::string, int64_t> names;
  const Json document = parsed({&a, &b});
  for (const Json& event : document["traceEvents"]) {
    if (event["name"] == "process_name") ++names[event["args"]["name"].get<std::string>()];
    if (event["name"] == "thread_name")
      CHECK(pid_of_tid.emplace(event["tid"].get<int64_t>(), event["pid"].get<int64_t>()).second);
  }
  CHECK(names == std::map<std::string, int64_t>{{"rank 0", 1}, {"rank 1", 1}, {"host", 1}});
  CHECK(pid_of_tid[1] == pid_of_tid[3]);
}

TEST_CASE("a_full_buffer_drops_and_counts_and_an_empty_one_is_a_document") {
  TraceBuffer buffer({{"p", "t"}}, 2);
  CHECK(parsed({&buffer})["traceEvents"].size() == 2);
  for (int i = 0; i < 5; ++i) buffer.complete(0, "x", i, i + 1);
  CHECK(buffer.events() == 2);
  CHECK(buffer.dropped() == 3);
  CHECK(parsed({&buffer})["otherData"]["dropped_events"] == 3);
  buffer.clear();
  CHECK(buffer.events() == 0);
  CHECK(buffer.dropped() == 0);
  CHECK(parsed({})["traceEvents"].empty());
}

TEST_CASE("an_open_event_stays_where_it_is_and_without_an_end_out_of_the_file") {
  TraceBuffer buffer({{"p", "t"}}, 3, 1000);
  TraceBuffer::Event* const first = buffer.open(0);
  TraceBuffer::Event* const second = buffer.open(0);
  buffer.complete(0, "whole", 3000, 3001);
  CHECK(buffer.open(0) == nullptr);
  CHECK(buffer.dropped() == 1);
  second->name = "second";
  second->begin_ns = 1500;
  second->end_ns = 1600;
  first->name = "first";
  first->begin_ns = 1400;
  const Json document = parsed({&buffer});
  std::string names;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] != "X") continue;
    names += event["name"].get<std::string>() + " ";
    if (event["name"] == "second") CHECK(event["ts"] == 0.5);  // from the origin
  }
  CHECK(names == "second whole ");
}

TEST_CASE("recording_allocates_nothing") {
  TraceBuffer buffer({{"p", "t"}}, 100);
  const int64_t before = heap_allocations();
  for (int i = 0; i < 200; ++i) {
    buffer.complete(0, "x", i, i + 1, {.layer = i});
    buffer.counter(0, "c", i, i);
    static_cast<void>(buffer.open(0));
  }
  buffer.clear();
  CHECK(heap_allocations() == before);
  CHECK(buffer.events() == 0);
}

TEST_CASE("a_simulation_fills_its_lanes_monotone_and_to_the_reported_length") {
  const StepProgrammer programmer(published_model(), 4, 4096);
  const CostModel costs(published_machine(), GemmMath::bf16, 4);
  RoutingTrace trace(programmer.routing_shape());
  append_balanced_steps(trace, 2);
  SimOptions options;
  options.policy.slots = 64;
  TraceBuffer buffer(simulation_lanes(4), 1 << 16);
  const Simulation result = simulate(costs, programmer, options, trace, {.trace = &buffer, .on_event = {}});
  CHECK(buffer.dropped() == 0);
  const Json document = parsed({&buffer});
  check_lanes(document);
  int64_t end = 0, copied = 0;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] != "X") continue;
    if (event["name"] != "look_ahead") end = std::max(end, trace_ns(event["ts"]) + trace_ns(event["dur"]));
    if (event["name"] == "copy" || event["name"] == "look_ahead") copied += event["args"]["bytes"].get<int64_t>();
  }
  CHECK(end == result.decode.ns);
  CHECK(copied == result.decode.copied_bytes);
}

}  // namespace offload::trace_test
