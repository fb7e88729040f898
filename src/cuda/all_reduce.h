// The kernels of an all-reduce over ranks of one process: sums in rank order in FP32, so that every rank, every run and
// every way that the numbers travel give the same bits.
//
// Owns nothing. Both only enqueue; all memory is the caller's (see group_collective.h).
#ifndef OFFLOAD_CUDA_ALL_REDUCE_H_
#define OFFLOAD_CUDA_ALL_REDUCE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/tensor.h"
#include "cuda/device.h"

namespace offload::cuda {

// Ranks of a group, at most.
inline constexpr int kGroupMost = 64;

// Two FP32 numbers on their way to another rank, each with the number of its all-reduce beside it. Eight bytes arrive
// together on every link, so a number is there when its mark is: no fence, no flag, one trip.
struct alignas(16) Packet {
  uint32_t first, first_mark, second, second_mark;
};
constexpr int64_t packets_for(int64_t elements) {
  return (elements + 1) / 2;
}

// How far a rank's device has come; in its memory, zero at the start. The kernels count, so that a captured graph
// counts on when it is launched again.
struct GroupClock {
  uint32_t done = 0;         // all-reduces
  uint32_t blocks_done = 0;  // of the one under way
  uint32_t gave_up = 0;      // not 0: all later ones do nothing
};

// What a rank's device and the host tell each other; page-locked host memory.
struct GroupWord {
  uint32_t abort = 0;        // by the host: waits end, now and later
  uint32_t done = 0;         // by the device: all-reduces done
  uint32_t stalled_at = 0;   // by the device: the number of the one that it gave up, after waiting too long
  uint32_t stalled_for = 0;  // and 1 + the rank that did not come
};

// tensor = the sum over ranks of their tensors, where each rank's device runs this kernel and waits in it for the
// others. F32 or BF16. REQUIRES: the ranks' devices differ, or one that waits may keep another from starting.
struct WaitingSum {
  void* tensor = nullptr;
  int64_t elements = 0;
  int rank = 0, world = 1;
  // Packets [2][half_packets], used in turn: where this rank writes, once each, and where rank q's arrive for it.
  Packet* out[kGroupMost] = {};
  int outs = 0;
  const Packet* in[kGroupMost] = {};
  int64_t half_packets = 0;  // at least packets_for(elements)
  GroupClock* clock = nullptr;
  GroupWord* word = nullptr;
  int64_t stall_ns = 0;  // after which it gives up and leaves the rest of the tensor as it is
};
void waiting_sum(const WaitingSum& args, DType dtype, cudaStream_t stream);

// The first `count` elements of each `out` = their sum over in[0..ins). F32 or BF16, aligned to four elements; the
// arrays may be the same ones.
struct SliceSum {
  const void* in[kGroupMost] = {};
  void* out[kGroupMost] = {};
  int ins = 0, outs = 0;
  int64_t count = 0;
};
void slice_sum(const SliceSum& args, DType dtype, cudaStream_t stream);

// bytes[i] = a number of (seed, i); and how many of them differ from that, added to *faults. For proving a path.
void write_pattern(uint32_t* words, int64_t count, uint32_t seed, cudaStream_t stream);
void count_pattern_faults(const uint32_t* words, int64_t count, uint32_t seed, uint32_t* faults, cudaStream_t stream);

}  // namespace offload::cuda

#endif  // OFFLOAD_CUDA_ALL_REDUCE_H_
