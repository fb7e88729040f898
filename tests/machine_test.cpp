#include "offload/machine.h"

#include <doctest/doctest.h>

#include <random>

#include "simulation_cases.h"

namespace offload::machine_test {

namespace {

constexpr std::string_view kSmall = R"({
  "name": "m",
  "device": {"count": 2, "memory_gib": 8, "memory_gib_s": 100, "gemm_tflops": {"bf16": 1, "fp16": 2}},
  "link": {"h2d_gib_s": 10},
  "host": {"cores": 4, "dram_gib_s": 20},
  "collective": [{"bytes": 10, "us": 1}, {"bytes": 20, "us": 2}]
})";

// The message with which `text` is refused, or "".
std::string refusal(std::string_view text) {
  try {
    parse_machine(text, "m.json");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::input);
    return error.message();
  }
  return "";
}

std::string with(std::string_view from, std::string_view to) {
  std::string text(kSmall);
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

// Every number of `json` as "a.b" or "a[0]" (of an array entry: the entry).
void collect_numbers(const Json& json, const std::string& path, std::vector<std::string>& out) {
  for (const auto& [key, value] : json.items()) {
    const std::string name = path.empty() ? key : path + "." + key;
    if (value.is_number()) out.push_back(name);
    if (value.is_object() && key != "sources") collect_numbers(value, name, out);
    if (value.is_array())
      for (size_t i = 0; i < value.size(); ++i) out.push_back(fmt::format("{}[{}]", name, i));
  }
}

}  // namespace

TEST_CASE("a_machine_file_gives_rates_in_si_units_and_neutral_defaults") {
  const Machine machine = parse_machine(kSmall, "m.json");
  CHECK(machine.device.memory_bytes_per_s == 100 * kGibibyte);
  CHECK(machine.device.memory_bytes == int64_t{8} << 30);
  CHECK(machine.device.gemm_flops[static_cast<size_t>(GemmMath::fp16)] == 2e12);
  CHECK(machine.device.launch_gap_s == 0);
  CHECK(machine.link.additive == 1);
  CHECK(machine.host.dram_with_h2d_bytes_per_s == 0);
  CHECK(machine.host.plan_s == 0);
  CHECK(machine.host.launch_s == 0);
  CHECK(machine.collective[1].duration_s == doctest::Approx(2e-6));
  CHECK_FALSE(machine.calibration.has_value());
}

TEST_CASE("the_published_machines_are_read_and_written_without_loss") {
  for (const char* name : {"rtx2080ti_x4", "h200", "h200_x2"}) {
    const std::string path = fmt::format("{}/configs/machines/{}.json", OFFLOAD_SOURCE_DIR, name);
    const Machine machine = read_machine(path);
    const std::string text = machine_text(machine);
    CHECK(machine_text(parse_machine(text, "again")) == text);
    CHECK(machine.sources.size() > 10);
  }
}

TEST_CASE("every_number_of_a_published_machine_has_a_source_and_every_source_a_number") {
  for (const char* name : {"rtx2080ti_x4", "h200", "h200_x2"}) {
    const std::string path = fmt::format("{}/configs/machines/{}.json", OFFLOAD_SOURCE_DIR, name);
    const Json json = parse_json(read_text_file(path, 1 << 20), path);
    std::vector<std::string> numbers;
    collect_numbers(json, "", numbers);
    for (const std::string& number : numbers) {
      // What names the model of a calibration, and fields that state nothing, need none.
      const bool is_neutral = number == "calibration.hidden" || number == "calibration.layers" ||
                              number == "calibration.experts" || number == "calibration.world" ||
                              (number == "device.count" && json["device"]["count"] == 1);
      INFO(path << " " << number);
      CHECK((is_neutral || json["sources"].contains(number)));
    }
    for (const auto& item : json["sources"].items()) {
      const std::string& key = item.key();
      INFO(path << " " << key);
      CHECK(std::find(numbers.begin(), numbers.end(), key) != numbers.end());
    }
  }
}

TEST_CASE("a_bad_machine_file_is_refused_by_field") {
  const auto check = [](const std::string& text, std::string_view part) {
    const std::string message = refusal(text);
    INFO(text << "\n" << message);
    CHECK(message.find(part) != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
  };
  check("", "m.json");
  check("[]", "the file must be an object");
  check("{}", "name is missing");
  check(with("\"memory_gib\": 8", "\"memory_gib\": 0"), "device.memory_gib is 0, expected 0.001 to");
  check(with("\"memory_gib\": 8", "\"memory_gib\": \"8\""), "memory_gib must be a number");
  check(with("\"memory_gib_s\": 100,", ""), "device.memory_gib_s is missing");
  check(with("\"memory_gib_s\": 100", "\"memory_gib_s\": -1"), "memory_gib_s is -1");
  check(with("\"memory_gib_s\": 100", "\"memory_gib_s\": 1e300"), "memory_gib_s is 1e+300");
  check(with("\"memory_gib_s\": 100", "\"memory_gib_s\": 1e999"), "m.json");
  check(with("\"count\": 2", "\"count\": 2.5"), "count must be an integer");
  check(with("\"count\": 2", "\"count\": 18446744073709551615"), "count must be an integer");
  check(with("\"count\": 2", "\"count\": 65"), "device.count is 65, expected 1 to 64");
  check(with("\"bf16\": 1,", ""), "device.gemm_tflops.bf16 is missing");
  check(with("\"bf16\": 1,", "\"bf61\": 1, \"bf16\": 1,"), "device.gemm_tflops.bf61 is no field");
  check(with("\"device\": {", "\"device\": 3, \"x\": {"), "device must be an object");
  check(with("\"h2d_gib_s\"", "\"h2d_gb_s\""), "link.h2d_gib_s is missing");
  check(with("\"h2d_gib_s\": 10", "\"h2d_gib_s\": 10, \"additive\": 1.5"), "link.additive is 1.5, expected 0 to 1");
  check(with("\"collective\": [", "\"collective\": [1, "), "collective[0] must be an object");
  check(with("\"collective\": [", "\"collective\": {}, \"x\": ["), "collective must be an array");
  check(with("\"bytes\": 20", "\"bytes\": 10"), "collective[1].bytes is 10, expected more than the 10");
  check(with("\"us\": 2", "\"us\": 0.5"), "collective[1].us is less");
  check(with("\"name\": \"m\"", "\"name\": \"m\", \"sources\": {\"a\": 1}"), "sources.a must be a string");
  check(with("\"name\": \"m\"", "\"name\": \"m\", \"\\u001b[31m\": 1"), "is no field of a machine file");
  check(with(", {\"bytes\": 20, \"us\": 2}", ", {\"bytes\": 20, \"us\": 2}], \"host\": ["), "m.json");
  std::string without(kSmall);
  without.erase(without.find(",\n  \"collective\""), std::string(without).size());
  check(without + "}", "collective is empty, expected durations of an all-reduce over 2 devices");
}

TEST_CASE("mutated_machine_files_are_read_or_refused_never_more") {
  const std::string text = read_text_file(OFFLOAD_SOURCE_DIR "/configs/machines/rtx2080ti_x4.json", 1 << 20);
  std::mt19937_64 random(1);
  int64_t refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string mutant = text;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % mutant.size();
      if (random() % 2 == 0) mutant[at] = static_cast<char>(random());
      if (random() % 3 == 0) mutant.erase(at, random() % 8);
      if (random() % 3 == 0) mutant.insert(at, std::string(1 + random() % 20, static_cast<char>('0' + random() % 10)));
    }
    refused += refusal(mutant).empty() ? 0 : 1;
  }
  CHECK(refused > 500);
}

}  // namespace offload::machine_test
