#include "stored_model.h"

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/checkpoint.h"

namespace offload {

StoredFolder::StoredFolder() {
  path_ = (std::filesystem::temp_directory_path() / "offload_model_XXXXXX").string();
  if (mkdtemp(path_.data()) == nullptr) throw_error(ErrorCode::internal, "{}: cannot be made", path_);
}

StoredFolder::~StoredFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void StoredFolder::write(std::string_view name, std::string_view text) const {
  std::ofstream out(file(name), std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!out.good()) throw_error(ErrorCode::internal, "{}: cannot be written", file(name));
}

float StoredTensor::value(int64_t i) const {
  if (dtype == DType::bf16) {
    bf16 code;
    std::memcpy(&code, bytes.data() + i * 2, 2);
    return to_float(code);
  }
  OFL_ASSERT(dtype == DType::f32);
  float out = 0;
  std::memcpy(&out, bytes.data() + i * 4, 4);
  return out;
}

void StoredTensor::set(int64_t i, float value) {
  if (dtype == DType::bf16) {
    const bf16 code = to_bf16(value);
    std::memcpy(bytes.data() + i * 2, &code, 2);
    return;
  }
  OFL_ASSERT(dtype == DType::f32);
  std::memcpy(bytes.data() + i * 4, &value, 4);
}

StoredTensor StoredTensor::as_f32() const {
  StoredTensor out{DType::f32, shape, std::vector<std::byte>(static_cast<size_t>(elements()) * 4)};
  for (int64_t i = 0; i < elements(); ++i) out.set(i, value(i));
  return out;
}

void write_safetensors(const std::string& path, const StoredTensors& tensors) {
  Json header = Json::object();
  int64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto end = at + static_cast<int64_t>(tensor.bytes.size());
    header[name] = {{"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), 8);  // little-endian, as all hosts that this runs on
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto& [name, tensor] : tensors)
    out.write(reinterpret_cast<const char*>(tensor.bytes.data()), static_cast<std::streamsize>(tensor.bytes.size()));
  if (!out.good()) throw_error(ErrorCode::internal, "{}: cannot be written", path);
}

StoredTensor join_rows(const std::vector<const StoredTensor*>& parts) {
  StoredTensor out = *parts.front();
  for (size_t i = 1; i < parts.size(); ++i) {
    OFL_ASSERT(parts[i]->dtype == out.dtype && parts[i]->shape.size() == out.shape.size());
    out.shape[0] += parts[i]->shape[0];
    out.bytes.insert(out.bytes.end(), parts[i]->bytes.begin(), parts[i]->bytes.end());
  }
  return out;
}

StoredModel StoredModel::read(const std::string& model_dir) {
  StoredModel model;
  model.config = parse_json(read_text_file(model_dir + "/config.json", 1 << 20), "config.json");
  const Checkpoint checkpoint = Checkpoint::open(model_dir);
  for (const TensorEntry& entry : checkpoint.tensors()) {
    StoredTensor tensor{entry.dtype, entry.shape, std::vector<std::byte>(static_cast<size_t>(entry.bytes))};
    checkpoint.read(entry, 0, tensor.bytes);
    model.tensors.emplace(entry.name, std::move(tensor));
  }
  return model;
}

StoredModel StoredModel::demo() {
  return read(OFFLOAD_SOURCE_DIR "/models/demo-qwen4-exp");
}

StoredTensor& StoredModel::at(const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw_error(ErrorCode::internal, "the model has no tensor {}", name);
  return found->second;
}

StoredTensor StoredModel::take(const std::string& name) {
  StoredTensor tensor = std::move(at(name));
  tensors.erase(name);
  return tensor;
}

void StoredModel::rename(const std::function<std::string(const std::string&)>& change) {
  StoredTensors renamed;
  for (auto& [name, tensor] : tensors) renamed.emplace(change(name), std::move(tensor));
  tensors = std::move(renamed);
}

void StoredModel::for_each_ending(std::string_view ending, const std::function<void(StoredTensor&)>& change) {
  bool found = false;
  for (auto& [name, tensor] : tensors) {
    if (!name.ends_with(ending)) continue;
    change(tensor);
    found = true;
  }
  if (!found) throw_error(ErrorCode::internal, "the model has no tensor *{}", ending);
}

void StoredModel::write(const StoredFolder& folder, int files) const {
  folder.write("config.json", config.dump());
  if (files == 1) return write_safetensors(folder.file("model.safetensors"), tensors);
  std::vector<StoredTensors> parts(static_cast<size_t>(files));
  Json map = Json::object();
  size_t next = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = next++ % parts.size();
    map[name] = fmt::format("model-{:05}-of-{:05}.safetensors", part + 1, files);
    parts[part].emplace(name, tensor);
  }
  for (size_t i = 0; i < parts.size(); ++i)
    write_safetensors(folder.file(fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files)), parts[i]);
  folder.write("model.safetensors.index.json", Json{{"metadata", Json::object()}, {"weight_map", map}}.dump());
}

}  // namespace offload
