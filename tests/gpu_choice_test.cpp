// Which GPUs a process sees and which of them each rank gets.
#include <doctest/doctest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/json.h"
#include "offload/gpu_choice.h"

namespace offload::gpu_choice_test {

namespace {

const std::string kCases = OFFLOAD_SOURCE_DIR "/tests/data/gpus/visible_devices.json";

template <typename Call>
std::string usage_error(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::usage);
    return error.message();
  }
  return "";
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("published_cases_of_visible_devices_get_the_ranks_they_ask_for_or_an_error_that_names_the_cause") {
  const Json document = parse_json(read_text_file(kCases, 1 << 20), kCases);
  std::vector<GpuIdentity> all;
  std::vector<GpuTraits> traits;
  for (const Json& device : document.at("devices_in_pci_order")) {
    all.push_back({device.at("pci").get<std::string>(), device.at("uuid").get<std::string>()});
    const std::string cc = device.at("cc").get<std::string>();
    traits.push_back({device.at("name").get<std::string>(), 10 * (cc[0] - '0') + (cc[2] - '0'),
                      device.at("mem_gib").get<int64_t>() << 30});
  }
  int cases = 0;
  for (const Json& each : document.at("cases")) {
    ++cases;
    std::optional<std::string> env;
    if (!each.at("env").is_null()) env = each.at("env").get<std::string>();
    CAPTURE(env.value_or("unset"));
    const auto ranks = each.at("tp").get<int>();
    const std::vector<int> visible = visible_gpus(all, env);
    VisibleGpus seen;
    for (const int gpu : visible) seen.sms.push_back(traits[static_cast<size_t>(gpu)].sm);
    const Json& expected = each.at("expect");
    if (expected.is_array()) {
      CHECK(why_none_visible(all, env) == "");
      std::vector<int> found;
      std::vector<GpuTraits> found_traits;
      for (const int gpu : gpus_of_ranks(ranks, seen, {}, env)) {
        found.push_back(visible[static_cast<size_t>(gpu)]);
        found_traits.push_back(traits[static_cast<size_t>(found.back())]);
      }
      CHECK(found == expected.get<std::vector<int>>());
      const std::string note = each.value("note", "");
      const std::vector<std::string> notes = uneven_gpu_notes(found_traits);
      if (has(note, "22 and 11 GiB")) {
        REQUIRE(notes.size() == 1);
        CHECK(has(notes[0], "22.00 GiB, 11.00 GiB"));
      } else if (has(note, "7.5 and 8.9")) {
        REQUIRE(notes.size() == 2);
        CHECK(has(notes[1], "sm_75, sm_89: kernels are chosen for each"));
      }
    } else if (has(expected.get<std::string>(), "names the variable")) {
      CHECK(visible.empty());
      CHECK(has(why_none_visible(all, env), fmt::format("CUDA_VISIBLE_DEVICES is \"{}\"", *env)));
    } else {
      CHECK(expected.get<std::string>() == "error: 4 ranks asked, 2 devices visible");
      const std::string error = usage_error([&] { gpus_of_ranks(ranks, seen, {}, env); });
      CHECK(has(error, "4 ranks asked, 2 devices visible"));
      CHECK(has(error, "CUDA_VISIBLE_DEVICES is \"0,1\""));
      CHECK(has(error, "--gpus 0,1 has ranks share"));
    }
  }
  CHECK(cases == 9);
}

TEST_CASE("a_list_of_visible_devices_ends_at_the_first_that_names_none_and_one_named_twice_hides_all") {
  const std::vector<GpuIdentity> all = {{"0000:17:00.0", "GPU-1a2b3c4d-1"}, {"0000:65:00.0", "GPU-1a2b3c99-2"}};
  CHECK(visible_gpus(all, "0,7,1") == std::vector<int>{0});
  CHECK(visible_gpus(all, "1, 0") == std::vector<int>{1, 0});
  CHECK(visible_gpus(all, "GPU-1a2b3c9,0") == std::vector<int>{1, 0});
  CHECK(visible_gpus(all, "GPU-1a2b3c") == std::vector<int>{});  // both begin so
  CHECK(visible_gpus(all, "0,0") == std::vector<int>{});
  CHECK(visible_gpus(all, "none") == std::vector<int>{});
  CHECK(visible_gpus(all, {}) == std::vector<int>{0, 1});
  CHECK(why_none_visible({}, "7") == "");  // a container that lists no GPU proves nothing
}

TEST_CASE("ranks_share_the_gpus_that_were_named_in_turn") {
  const std::vector<int> two = {2, 0}, one = {1};
  const VisibleGpus three{.sms = {75, 86, 75}}, single{.sms = {75}};
  CHECK(gpus_of_ranks(4, three, two, {}) == std::vector<int>{2, 0, 2, 0});
  CHECK(gpus_of_ranks(4, three, one, {}) == std::vector<int>{1, 1, 1, 1});
  CHECK(gpus_of_ranks(1, three, two, {}) == std::vector<int>{2});
  CHECK(gpus_of_ranks(2, three, {}, {}) == std::vector<int>{0, 1});
  const std::vector<int> outside = {3}, twice = {1, 1};
  CHECK(has(usage_error([&] { gpus_of_ranks(1, three, outside, {}); }), "--gpus names GPU 3"));
  CHECK(has(usage_error([&] { gpus_of_ranks(1, three, twice, {}); }), "GPU 1 twice"));
  CHECK(has(usage_error([&] { gpus_of_ranks(2, single, {}, {}); }), "2 ranks asked, 1 device visible"));
}

TEST_CASE("a_gpu_older_than_the_kernels_is_passed_over_and_said") {
  const VisibleGpus mixed{.sms = {61, 75, 52, 86}}, old{.sms = {61}}, none{};
  CHECK(gpus_of_ranks(1, mixed, {}, {}) == std::vector<int>{1});
  CHECK(gpus_of_ranks(2, mixed, {}, {}) == std::vector<int>{1, 3});
  CHECK(mixed.left_out() == "GPUs 0 (sm_61), 2 (sm_52) are older than sm_75 and not used");
  CHECK(old.left_out() == "GPU 0 (sm_61) is older than sm_75 and not used");
  CHECK(none.left_out() == "");
  CHECK(VisibleGpus{.sms = {75, 90}}.left_out() == "");
  const std::vector<int> named = {1, 2};
  CHECK(has(usage_error([&] { gpus_of_ranks(2, mixed, named, {}); }), "--gpus names GPU 2, which is of sm_52"));
  const std::string fewer = usage_error([&] { gpus_of_ranks(3, mixed, {}, {}); });
  CHECK(has(fewer, "3 ranks asked, 2 devices visible, GPUs 0 (sm_61), 2 (sm_52) are older"));
  CHECK(has(fewer, "--gpus 1,3 has ranks share a GPU"));
  CHECK(has(usage_error([&] { gpus_of_ranks(1, old, {}, {}); }), "not used; --device cpu needs none"));
}

TEST_CASE("the_drivers_list_is_read_in_pci_order_with_domains_apart") {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / fmt::format("offload-gpus-{}", getpid());
  for (const auto& [pci, uuid] :
       {std::pair{"0001:17:00.0", "GPU-b"}, std::pair{"0000:65:00.0", "GPU-c"}, std::pair{"0000:17:00.0", "GPU-a"}}) {
    const std::filesystem::path folder = root / "proc/driver/nvidia/gpus" / pci;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "information")
        << "Model: \t\t NVIDIA GeForce RTX 2080 Ti\nIRQ:   \t\t 77\nGPU UUID: \t " << uuid << "\nVideo BIOS: \t ??\n";
  }
  const std::vector<GpuIdentity> gpus = read_gpus(root.string());
  std::filesystem::remove_all(root);
  REQUIRE(gpus.size() == 3);
  CHECK(gpus[0].pci == "0000:17:00.0");
  CHECK(gpus[0].uuid == "GPU-a");
  CHECK(gpus[1].uuid == "GPU-c");
  CHECK(gpus[2].uuid == "GPU-b");
  CHECK(read_gpus("/nowhere").empty());
}

}  // namespace offload::gpu_choice_test
