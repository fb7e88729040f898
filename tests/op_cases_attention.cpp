#include "op_case_families.h"

namespace offload {

void append_attention_cases(std::vector<OpCase>&) {}

}  // namespace offload
