// A checkpoint of routed experts alone, of any size, for tests and measurements of loading: shards with an index, every
// tensor at an odd offset, content that depends on the tensor's name and the byte's index.
#ifndef OFFLOAD_TESTS_SYNTHETIC_CHECKPOINT_H_
#define OFFLOAD_TESTS_SYNTHETIC_CHECKPOINT_H_

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/experts.h"
#include "core/json.h"

namespace offload {

// A folder that goes with all it holds.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string pattern = (parent / "offload_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw_error(ErrorCode::resource, "{}: {}", pattern, std::strerror(errno));
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path(const std::string& name = "") const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct SyntheticExperts {
  ExpertShape shape;
  int64_t layers = 1;
  bool fused = false;
  int files = 1;

  std::vector<ExpertLayer> expert_layers() const {
    std::vector<ExpertLayer> out;
    for (int64_t i = 0; i < layers; ++i) out.push_back({fmt::format("layers.{}.mlp.experts", i)});
    return out;
  }
};

inline void fill_synthetic(const std::string& name, std::vector<char>& out) {
  uint64_t state = std::hash<std::string>{}(name);
  for (size_t at = 0; at < out.size(); at += 8) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed ^= mixed >> 27;
    std::memcpy(out.data() + at, &mixed, std::min<size_t>(8, out.size() - at));
  }
}

// Writes model-0000k.safetensors and the index; the tensors go to the files in turn.
inline void write_synthetic(const std::string& folder, const SyntheticExperts& model) {
  struct Entry {
    std::string name;
    std::vector<int64_t> shape;
  };
  const ExpertShape& s = model.shape;
  std::vector<std::vector<Entry>> files(static_cast<size_t>(model.files));
  size_t turn = 0;
  const auto add = [&](std::string name, std::vector<int64_t> shape) {
    files[turn++ % files.size()].push_back({"model." + std::move(name), std::move(shape)});
  };
  for (const ExpertLayer& layer : model.expert_layers()) {
    if (model.fused) {
      add(layer.prefix + ".gate_up_proj", {s.experts, 2 * s.intermediate, s.hidden});
      add(layer.prefix + ".down_proj", {s.experts, s.hidden, s.intermediate});
      continue;
    }
    for (int64_t e = 0; e < s.experts; ++e) {
      add(fmt::format("{}.{}.down_proj.weight", layer.prefix, e), {s.hidden, s.intermediate});
      add(fmt::format("{}.{}.gate_proj.weight", layer.prefix, e), {s.intermediate, s.hidden});
      add(fmt::format("{}.{}.up_proj.weight", layer.prefix, e), {s.intermediate, s.hidden});
    }
  }
  Json index = {{"weight_map", Json::object()}};
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string file_name = fmt::format("model-{:05}.safetensors", f);
    Json header = {{fmt::format("odd{}", f), {{"dtype", "U8"}, {"shape", {3}}, {"data_offsets", {0, 3}}}}};
    index["weight_map"][fmt::format("odd{}", f)] = file_name;
    int64_t at = 3;
    for (const Entry& entry : files[f]) {
      int64_t bytes = dtype_bytes(s.dtype);
      for (const int64_t extent : entry.shape) bytes *= extent;
      header[entry.name] = {{"dtype", dtype_name(s.dtype)}, {"shape", entry.shape}, {"data_offsets", {at, at + bytes}}};
      index["weight_map"][entry.name] = file_name;
      at += bytes;
    }
    std::ofstream out(std::filesystem::path(folder) / file_name, std::ios::binary);
    const std::string text = header.dump();
    const uint64_t length = text.size();
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << text << "odd";
    for (const Entry& entry : files[f]) {
      std::vector<char> content(static_cast<size_t>(header[entry.name]["data_offsets"][1].get<int64_t>() -
                                                    header[entry.name]["data_offsets"][0].get<int64_t>()));
      fill_synthetic(entry.name, content);
      out.write(content.data(), static_cast<std::streamsize>(content.size()));
    }
    if (!out.flush()) throw_error(ErrorCode::resource, "{}: cannot be written", file_name);
  }
  std::ofstream(std::filesystem::path(folder) / "model.safetensors.index.json") << index.dump();
}

// An open synthetic checkpoint.
struct OpenSynthetic {
  explicit OpenSynthetic(const std::string& folder)
      : checkpoint(Checkpoint::open(folder)),
        tensors(checkpoint.tensors(), checkpoint.path()),
        source(checkpoint_source(checkpoint, tensors)) {}

  Checkpoint checkpoint;
  TextTensors tensors;
  std::unique_ptr<WeightSource> source;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_SYNTHETIC_CHECKPOINT_H_
