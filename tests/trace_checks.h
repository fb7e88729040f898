// What every file of a trace must hold, whoever wrote it. For tests.
#ifndef OFFLOAD_TESTS_TRACE_CHECKS_H_
#define OFFLOAD_TESTS_TRACE_CHECKS_H_

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"

namespace offload {

inline int64_t trace_ns(const Json& microseconds) {
  return std::llround(microseconds.get<double>() * 1000);
}

// By lane: times never go back, and an event lies inside the one that is open or begins after its end.
inline void check_lanes(const Json& document) {
  std::map<int64_t, std::vector<std::pair<int64_t, int64_t>>> open;
  std::map<int64_t, int64_t> last;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const auto tid = event["tid"].get<int64_t>();
    const int64_t begin = trace_ns(event["ts"]), end = begin + trace_ns(event["dur"]);
    REQUIRE(begin >= last[tid]);
    last[tid] = begin;
    auto& stack = open[tid];
    while (!stack.empty() && stack.back().second <= begin) stack.pop_back();
    if (!stack.empty()) REQUIRE(end <= stack.back().second);
    stack.push_back({begin, end});
  }
}

// "rank 0/copy" by tid.
inline std::map<int64_t, std::string> lane_names(const Json& document) {
  std::map<int64_t, std::string> processes, lanes;
  for (const Json& event : document["traceEvents"]) {
    if (event["name"] == "process_name") processes[event["pid"].get<int64_t>()] = event["args"]["name"];
    if (event["name"] == "thread_name")
      lanes[event["tid"].get<int64_t>()] =
          processes[event["pid"].get<int64_t>()] + "/" + event["args"]["name"].get<std::string>();
  }
  return lanes;
}

// Complete events of the lanes called "PROCESS/name".
inline std::vector<Json> events_on(const Json& document, const std::string& name) {
  const std::map<int64_t, std::string> lanes = lane_names(document);
  std::vector<Json> found;
  for (const Json& event : document["traceEvents"])
    if (event["ph"] == "X" && lanes.at(event["tid"].get<int64_t>()).ends_with("/" + name)) found.push_back(event);
  return found;
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_TRACE_CHECKS_H_
