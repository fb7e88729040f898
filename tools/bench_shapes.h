// The ops at the shapes of the published Qwen3.8-Flash-Next: decode at one row, prefill at 512 and, for GPUs, at 8,192.
//
// Decode weights rotate over more memory than any cache holds, as they do in a model. Activations stay in the cache
// where they would.
#ifndef OFFLOAD_TOOLS_BENCH_SHAPES_H_
#define OFFLOAD_TOOLS_BENCH_SHAPES_H_

#include <vector>

#include "bench_memory.h"

namespace offload::tools {

std::vector<BenchCase> published_shapes();

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_BENCH_SHAPES_H_
