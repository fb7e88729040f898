// The two phases of a sequence: its prompt, many tokens at once, and decoding, few at a time.
#ifndef OFFLOAD_CORE_PHASE_H_
#define OFFLOAD_CORE_PHASE_H_

#include <cstdint>

namespace offload {

enum class Phase : uint8_t { prefill, decode };

}  // namespace offload

#endif  // OFFLOAD_CORE_PHASE_H_
