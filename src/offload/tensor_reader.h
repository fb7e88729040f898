// Tensors of a checkpoint into host memory, through a DirectReader.
#ifndef OFFLOAD_OFFLOAD_TENSOR_READER_H_
#define OFFLOAD_OFFLOAD_TENSOR_READER_H_

#include <span>

#include "core/checkpoint.h"
#include "offload/direct_reader.h"

namespace offload {

// `requests` count the checkpoint's files. Messages name the tensor: `options.name_at` is filled in here. Throws as
// DirectReader::read() does.
ReadReport read_tensors(const Checkpoint& checkpoint, std::span<const ReadRequest> requests,
                        DirectReaderOptions options, const LoadProgressSink& progress);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_TENSOR_READER_H_
