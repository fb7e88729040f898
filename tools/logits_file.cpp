#include "logits_file.h"

#include <fmt/format.h>
#include <bit>
#include <cmath>

#include "core/base.h"
#include "core/checkpoint.h"

namespace offload::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

// u64 length and a JSON header padded with blanks to a fixed size, so that it can be written last. The longest header,
// with every number at 19 digits, has 220 bytes.
constexpr size_t kHeaderBytes = 256;

std::string header(int64_t rows, int64_t vocab) {
  const int64_t logits_bytes = rows * vocab * 4, end = logits_bytes + rows * 4;
  std::string json = fmt::format(R"({{"logits":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}},)"
                                 R"("ids":{{"dtype":"I32","shape":[{}],"data_offsets":[{},{}]}}}})",
                                 rows, vocab, logits_bytes, rows, logits_bytes, end);
  const uint64_t size = kHeaderBytes - sizeof(uint64_t);
  OFL_ASSERT(json.size() <= size);
  json.resize(size, ' ');
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + json;
}

}  // namespace

LogitsFile::LogitsFile(std::string path, int64_t vocab) : file_("--logits-out", std::move(path)), vocab_(vocab) {
  file_.write(std::string(kHeaderBytes, ' '));
}

void LogitsFile::add(int32_t id, std::span<const float> logits) {
  OFL_ASSERT(static_cast<int64_t>(logits.size()) == vocab_);
  file_.write(std::as_bytes(logits));
  ids_.push_back(id);
}

void LogitsFile::finish() {
  file_.write(std::as_bytes(std::span(ids_)));
  file_.overwrite(0, header(static_cast<int64_t>(ids_.size()), vocab_));
  file_.finish();
}

ReferenceLogits read_logits_file(std::string_view flag, const std::string& path, int64_t vocab) {
  const Checkpoint file = Checkpoint::open(path);
  const TensorEntry &logits = file.at("logits"), &ids = file.at("ids");
  const std::string shown = fmt::format("{} {}", flag, printable(path, 4096));
  if (logits.dtype != DType::f32 || logits.shape.size() != 2 || logits.shape[1] != vocab || logits.shape[0] < 1)
    throw_error(ErrorCode::usage, "{}: logits is {} [{}]; expected F32 [rows, {}], the model's vocabulary", shown,
                dtype_name(logits.dtype), fmt::join(logits.shape, ", "), vocab);
  if (ids.dtype != DType::i32 || ids.shape != std::vector<int64_t>{logits.shape[0]})
    throw_error(ErrorCode::usage, "{}: ids is {} [{}]; expected I32 [{}], one for each row of logits", shown,
                dtype_name(ids.dtype), fmt::join(ids.shape, ", "), logits.shape[0]);
  ReferenceLogits out{std::vector<int32_t>(static_cast<size_t>(ids.shape[0])), file.read_as_f32(logits)};
  for (size_t i = 0; i < out.logits.size(); ++i)
    if (!std::isfinite(out.logits[i]))
      throw_error(ErrorCode::usage, "{}: logit {} of row {} is {}; expected finite numbers", shown,
                  i % static_cast<size_t>(vocab), i / static_cast<size_t>(vocab), out.logits[i]);
  file.read(ids, 0, std::as_writable_bytes(std::span(out.ids)));
  for (const int32_t id : out.ids)
    if (id < 0 || id >= vocab)
      throw_error(ErrorCode::usage, "{}: id {} is outside the model's vocabulary 0..{}", shown, id, vocab - 1);
  return out;
}

}  // namespace offload::tools
