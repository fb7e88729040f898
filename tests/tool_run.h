// What the tests of the programs ask of a run: its JSON, or that it was refused.
#ifndef OFFLOAD_TESTS_TOOL_RUN_H_
#define OFFLOAD_TESTS_TOOL_RUN_H_

#include <doctest/doctest.h>

#include <string_view>

#include "child_process.h"
#include "core/json.h"

namespace offload {

inline Json json_of(const Run& run) {
  INFO(run.err);
  REQUIRE(run.exit_code == 0);
  return parse_json(run.out, "standard output");
}

// `part` must stand in the message, and nothing on standard output.
inline void check_refused(const Run& run, std::string_view part, int exit_code) {
  CAPTURE(run.err);
  CHECK(run.exit_code == exit_code);
  CHECK(run.out.empty());
  CHECK(run.err.find(part) != std::string::npos);
}

}  // namespace offload

#endif  // OFFLOAD_TESTS_TOOL_RUN_H_
