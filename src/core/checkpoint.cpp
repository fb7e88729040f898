#include "core/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>

#include "core/json.h"
#include "core/safetensors.h"

namespace offload {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr int64_t kIndexBytesMax = 100'000'000;  // as for a header: it holds the same names
constexpr int64_t kConversionBytes = 64 << 10;

std::string shown(const std::string& path) {
  return printable(path, 4096);
}

[[noreturn]] void throw_errno(const std::string& path, int error) {
  const bool exhausted = error == EMFILE || error == ENFILE || error == ENOMEM;
  throw_error(exhausted ? ErrorCode::resource : ErrorCode::input, "{}: {}", shown(path), std::strerror(error));
}

// False when nothing is there; throws for every other reason.
bool exists(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT) throw_errno(path, errno);
  return false;
}

// At most `count_max` names and how many more there are, for a message.
template <typename Names>
std::string listed(const Names& names, size_t count_max) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), count_max); ++i)
    text += (i == 0 ? "" : ", ") + printable(std::string_view(names[i]));
  if (names.size() > count_max) text += fmt::format(" and {} more", names.size() - count_max);
  return text;
}

// Refuses a weight_map value that is no path below the folder; "./a" and "b//c" become "a" and "b/c".
std::string shard_name(const std::string& tensor, const Json& value, const std::string& index_path) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty())
    throw_error(ErrorCode::input, "{}: weight_map must name a file for tensor {}", shown(index_path),
                printable(tensor));
  const auto& name = value.get_ref<const std::string&>();
  const std::filesystem::path path(name);
  const bool leaves = path.is_absolute() || std::find(path.begin(), path.end(), "..") != path.end();
  if (leaves || name.find('\0') != std::string::npos)
    throw_error(ErrorCode::input, "{}: weight_map places tensor {} in \"{}\", outside the folder; refused",
                shown(index_path), printable(tensor), printable(name));
  return path.lexically_normal().string();
}

// File name -> the tensors that the index places in it, both sorted.
std::map<std::string, std::vector<std::string>> parse_index(const std::string& text, const std::string& index_path) {
  if (const auto found = text_instead_of_weights(std::string_view(text).substr(0, kFilePrefixBytes));
      found && text.starts_with("version "))
    throw_error(ErrorCode::input, "{}: {}", shown(index_path), *found);
  const Json index = parse_json(text, shown(index_path));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object() || map->empty())
    throw_error(ErrorCode::input, "{}: weight_map must be an object of tensor and file names; fetch the index again",
                shown(index_path));
  std::map<std::string, std::vector<std::string>> shards;
  for (const auto& [tensor, file] : map->items()) shards[shard_name(tensor, file, index_path)].push_back(tensor);
  return shards;
}

// Why a folder without index and without model.safetensors cannot be opened.
[[noreturn]] void throw_no_weights(const std::string& folder) {
  std::vector<std::string> safetensors, gguf;
  bool config = false;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    config = config || name == "config.json";
    if (name.ends_with(".safetensors")) safetensors.push_back(name);
    if (name.ends_with(".gguf")) gguf.push_back(name);
  }
  if (error) throw_errno(folder, error.value());
  std::sort(safetensors.begin(), safetensors.end());
  if (!safetensors.empty())
    throw_error(ErrorCode::input, "{}: holds {} but neither {} nor {}; fetch the index", shown(folder),
                listed(safetensors, 3), kIndexName, kSingleName);
  if (!gguf.empty())
    throw_error(ErrorCode::input,
                "{}: holds {}, but GGUF is not supported by this build yet; give a safetensors folder", shown(folder),
                listed(gguf, 3));
  if (config)
    throw_error(ErrorCode::input, "{}: no weights: found config.json, but neither {} nor {}; fetch the weights",
                shown(folder), kIndexName, kSingleName);
  throw_error(ErrorCode::input, "{}: not a model folder: no config.json and no weights ({} or {})", shown(folder),
              kIndexName, kSingleName);
}

template <typename Target>
Target convert_to(float value) {
  if constexpr (std::is_same_v<Target, float>)
    return value;
  else
    return to_bf16(value);
}

template <typename Source, typename Target>
Target convert(Source value) {
  if constexpr (std::is_same_v<Source, Target>)
    return value;
  else if constexpr (std::is_same_v<Source, float>)
    return convert_to<Target>(value);
  else if constexpr (!std::is_same_v<Source, double>)
    return convert_to<Target>(to_float(value));
  else if constexpr (std::is_same_v<Target, float>)
    return static_cast<float>(value);
  else
    return to_bf16(to_float_odd(value));
}

template <typename Source, typename Target>
std::vector<Target> read_converted(const Checkpoint& checkpoint, const TensorEntry& tensor) {
  constexpr auto source_bytes = static_cast<int64_t>(sizeof(Source));
  std::vector<Target> values(static_cast<size_t>(tensor.bytes / source_bytes));
  std::vector<Source> chunk(static_cast<size_t>(std::min(tensor.bytes, kConversionBytes) / source_bytes));
  for (size_t done = 0; done < values.size();) {
    const std::span<Source> part = std::span(chunk).first(std::min(chunk.size(), values.size() - done));
    checkpoint.read(tensor, static_cast<int64_t>(done) * source_bytes, std::as_writable_bytes(part));
    for (const Source value : part) values[done++] = convert<Source, Target>(value);
  }
  return values;
}

template <typename Target>
std::vector<Target> read_floats(const Checkpoint& checkpoint, const TensorEntry& tensor) {
  if (tensor.dtype == DType::f32) return read_converted<float, Target>(checkpoint, tensor);
  if (tensor.dtype == DType::bf16) return read_converted<bf16, Target>(checkpoint, tensor);
  if (tensor.dtype == DType::f16) return read_converted<fp16, Target>(checkpoint, tensor);
  if (tensor.dtype == DType::f64) return read_converted<double, Target>(checkpoint, tensor);
  throw_error(ErrorCode::input, "{}: tensor {} is {}, expected F32, BF16, F16 or F64",
              shown(checkpoint.file_path(tensor.file_index)), printable(tensor.name), dtype_name(tensor.dtype));
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

size_t common_suffix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin());
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (value_ >= 0) ::close(value_);
}

Checkpoint Checkpoint::open(const std::string& path, ReadFault fault) {
  Checkpoint checkpoint(path, std::move(fault));
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) throw_errno(path, errno);
  if (S_ISDIR(status.st_mode)) {
    checkpoint.open_folder();
  } else {
    checkpoint.open_single(path);
  }
  checkpoint.sort_tensors();
  return checkpoint;
}

Checkpoint::File Checkpoint::open_file(std::string path) {
  // Without O_NONBLOCK a named pipe in the folder would hang here.
  int value = -1;
  do value = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  while (value < 0 && errno == EINTR);
  if (value < 0) throw_errno(path, errno);
  FileDescriptor descriptor(value);
  struct stat status;
  if (::fstat(value, &status) != 0) throw_errno(path, errno);
  if (!S_ISREG(status.st_mode))
    throw_error(ErrorCode::input, "{}: {}, expected a regular file", shown(path),
                S_ISDIR(status.st_mode) ? "is a folder" : "is a pipe, socket or device");
  return {std::move(path), std::move(descriptor), status.st_size};
}

// Bytes read, fewer than out.size() only at the end of the file; -1 with errno when the system fails.
int64_t Checkpoint::read_at(int descriptor, int64_t offset, std::span<std::byte> out) const {
  if (const int error = fault_ ? fault_() : 0; error != 0) {
    errno = error;
    return -1;
  }
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t count =
        ::pread(descriptor, out.data() + done, out.size() - done, offset + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -1;
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return static_cast<int64_t>(done);
}

// `bytes` bytes of a file from `offset` on, fewer when it has become shorter since it was opened.
std::string Checkpoint::read_text(const File& file, int64_t offset, int64_t bytes) const {
  std::string text(static_cast<size_t>(bytes), '\0');
  const int64_t count = read_at(file.descriptor.get(), offset, std::as_writable_bytes(std::span(text)));
  if (count < 0) throw_errno(file.path, errno);
  text.resize(static_cast<size_t>(count));
  return text;
}

std::vector<TensorEntry> Checkpoint::read_header(const File& file) const {
  const std::string origin = shown(file.path);
  const std::string prefix = read_text(file, 0, std::min(file.bytes, kFilePrefixBytes));
  const int64_t bytes = safetensors_header_bytes(prefix, file.bytes, origin);
  const std::string json = read_text(file, 8, bytes);
  if (static_cast<int64_t>(json.size()) != bytes)
    throw_error(ErrorCode::input, "{}: truncated while it was read; fetch it again", origin);
  return parse_safetensors_header(json, file.bytes, origin);
}

void Checkpoint::open_single(const std::string& file_path) {
  File file = open_file(file_path);
  const std::string prefix = read_text(file, 0, std::min(file.bytes, kFilePrefixBytes));
  if (prefix.starts_with("GGUF"))
    throw_error(ErrorCode::input, "{}: GGUF is not supported by this build yet; give a safetensors folder",
                shown(file_path));
  if (file_path.ends_with(".gguf"))
    throw_error(ErrorCode::input, "{}: not a GGUF file: {}", shown(file_path),
                file.bytes == 0
                    ? "it is empty; fetch it again"
                    : text_instead_of_weights(prefix).value_or(
                          "it does not start with \"GGUF\"; give the path of a model file or fetch it again"));
  tensors_ = read_header(file);
  files_.push_back(std::move(file));
}

void Checkpoint::open_folder() {
  const std::string folder = path_.ends_with('/') ? path_ : path_ + '/';
  if (exists(folder + kIndexName)) return open_sharded(folder + kIndexName);
  if (exists(folder + kSingleName)) return open_single(folder + kSingleName);
  throw_no_weights(path_);
}

void Checkpoint::open_sharded(const std::string& index_path) {
  const File index = open_file(index_path);
  if (index.bytes > kIndexBytesMax)
    throw_error(ErrorCode::input, "{}: {} bytes, above the limit of {}", shown(index_path), index.bytes,
                kIndexBytesMax);
  const auto shards = parse_index(read_text(index, 0, index.bytes), index_path);
  const std::string folder = index_path.substr(0, index_path.rfind('/') + 1);

  // All files before any header: who repairs a download wants the whole list.
  std::vector<std::string_view> missing, empty;
  std::vector<File> files;
  for (const auto& [name, tensors] : shards) {
    if (!exists(folder + name)) {
      missing.push_back(name);
      continue;
    }
    files.push_back(open_file(folder + name));
    if (files.back().bytes == 0) empty.push_back(name);
  }
  std::string problems;
  if (!missing.empty()) problems += fmt::format("; missing: {}", listed(missing, 1000));
  if (!empty.empty()) problems += fmt::format("; empty: {}", listed(empty, 1000));
  if (!problems.empty())
    throw_error(ErrorCode::input, "{}: {} of the {} files it names cannot be used{}; fetch them again",
                shown(index_path), missing.size() + empty.size(), shards.size(), problems);

  size_t next = 0;
  for (const auto& [name, tensors] : shards) add_shard(std::move(files[next++]), tensors, index_path);
}

// Keeps the tensors of `file` that are in `names` (sorted); all of them must be there.
void Checkpoint::add_shard(File file, std::span<const std::string> names, std::string_view index_path) {
  std::vector<TensorEntry> entries = read_header(file);
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<std::string> absent, unlisted;
  auto name = names.begin();
  for (TensorEntry& entry : entries) {
    while (name != names.end() && *name < entry.name) absent.push_back(*name++);
    if (name == names.end() || *name != entry.name) {
      unlisted.push_back(std::move(entry.name));
      continue;
    }
    ++name;
    entry.file_index = static_cast<int>(files_.size());
    tensors_.push_back(std::move(entry));
  }
  absent.insert(absent.end(), name, names.end());
  if (!absent.empty())
    throw_error(ErrorCode::input, "{}: lacks {} tensors that {} places in it: {}; fetch both again", shown(file.path),
                absent.size(), kIndexName, listed(absent, 8));
  if (!unlisted.empty())
    warnings_.push_back(fmt::format("{}: {} tensors are not in {} and are left out: {}", shown(file.path),
                                    unlisted.size(), printable(index_path, 4096), listed(unlisted, 8)));
  files_.push_back(std::move(file));
}

void Checkpoint::sort_tensors() {
  std::sort(tensors_.begin(), tensors_.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

const TensorEntry& Checkpoint::at(std::string_view name) const {
  if (const TensorEntry* found = find(name)) return *found;
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const TensorEntry& tensor : tensors_) names.push_back(tensor.name);
  throw_missing_tensor(path_, name, names);
}

void Checkpoint::read(const TensorEntry& tensor, int64_t byte_offset, std::span<std::byte> out) const {
  OFL_ASSERT(byte_offset >= 0 && byte_offset <= tensor.bytes);
  OFL_ASSERT(static_cast<int64_t>(out.size()) <= tensor.bytes - byte_offset);
  const int64_t offset = tensor.offset + byte_offset;
  const int64_t count = read_at(file_descriptor(tensor.file_index), offset, out);
  if (count == static_cast<int64_t>(out.size())) return;
  const std::string reason =
      count < 0 ? std::strerror(errno) : fmt::format("the file ends {} bytes early", std::ssize(out) - count);
  throw_error(ErrorCode::input, "{}: reading {} bytes of tensor {} at byte {} of the file failed: {}",
              shown(file_path(tensor.file_index)), out.size(), printable(tensor.name), offset, reason);
}

std::vector<float> Checkpoint::read_as_f32(const TensorEntry& tensor) const {
  return read_floats<float>(*this, tensor);
}

std::vector<bf16> Checkpoint::read_as_bf16(const TensorEntry& tensor) const {
  return read_floats<bf16>(*this, tensor);
}

std::vector<int64_t> Checkpoint::read_i64(const TensorEntry& tensor) const {
  if (tensor.dtype != DType::i64)
    throw_error(ErrorCode::input, "{}: tensor {} is {}, expected I64", shown(file_path(tensor.file_index)),
                printable(tensor.name), dtype_name(tensor.dtype));
  return read_converted<int64_t, int64_t>(*this, tensor);
}

const std::string& Checkpoint::file_path(int file_index) const {
  OFL_ASSERT(file_index >= 0 && file_index < files());
  return files_[static_cast<size_t>(file_index)].path;
}

int Checkpoint::file_descriptor(int file_index) const {
  OFL_ASSERT(file_index >= 0 && file_index < files());
  return files_[static_cast<size_t>(file_index)].descriptor.get();
}

void throw_missing_tensor(std::string_view origin, std::string_view name, std::span<const std::string_view> names) {
  // Likeness is what both names share at their ends: it finds other prefixes, other suffixes and one changed part.
  std::vector<std::pair<size_t, std::string_view>> ranked;
  for (const std::string_view other : names)
    ranked.emplace_back(common_prefix(name, other) + common_suffix(name, other), other);
  const size_t count = std::min<size_t>(3, ranked.size());
  std::partial_sort(
      ranked.begin(), ranked.begin() + static_cast<ptrdiff_t>(count), ranked.end(),
      [](const auto& a, const auto& b) { return std::pair(b.first, a.second) < std::pair(a.first, b.second); });
  std::vector<std::string_view> nearest;
  for (size_t i = 0; i < count; ++i) nearest.push_back(ranked[i].second);
  throw_error(ErrorCode::input, "{}: tensor {} is missing; {}", printable(origin, 4096), printable(name),
              nearest.empty() ? "the checkpoint has no tensors" : "the nearest names are " + listed(nearest, 3));
}

}  // namespace offload
