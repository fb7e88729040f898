// For which generation the kernels that run on the current device were compiled.
#ifndef OFFLOAD_CUDA_COMPILED_SM_H_
#define OFFLOAD_CUDA_COMPILED_SM_H_

namespace offload::cuda {

// 75, 80, 90, ...: instructions of later generations are not in the kernels. Throws Error{device}.
int compiled_sm();
// Whether they are machine code of sm_90a, which holds instructions that no other generation has.
bool compiled_for_90a();

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_COMPILED_SM_H_
