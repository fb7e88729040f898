#include "offload/tensor_reader.h"

#include "core/base.h"

namespace offload {

ReadReport read_tensors(const Checkpoint& checkpoint, std::span<const ReadRequest> requests,
                        DirectReaderOptions options, const LoadProgressSink& progress) {
  std::vector<ReadFile> files;
  for (int i = 0; i < checkpoint.files(); ++i)
    files.push_back({checkpoint.file_path(i), checkpoint.file_descriptor(i)});
  options.name_at = [&checkpoint](int file, int64_t offset) -> std::string {
    for (const TensorEntry& tensor : checkpoint.tensors())
      if (tensor.file_index == file && offset >= tensor.offset && offset < tensor.offset + tensor.bytes)
        return fmt::format("tensor {}", printable(tensor.name));
    return "";
  };
  return DirectReader(std::move(files), std::move(options)).read(requests, progress);
}

}  // namespace offload
