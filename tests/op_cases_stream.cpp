#include "op_case_families.h"

namespace offload {

void append_stream_cases(std::vector<OpCase>&) {}

}  // namespace offload
