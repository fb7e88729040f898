#include "op_case_families.h"

namespace offload {

void append_moe_cases(std::vector<OpCase>&) {}

}  // namespace offload
