// All-reduce kernels.
//
// waiting_sum: y = sum over q = 0..world-1 of x_q, a few KiB. One thread takes two elements (a packet) at a time: it
// stores them to each peer, then waits for each peer's. Bytes moved per rank: twice the tensor's to each peer. Bounded
// by one trip of the link plus the launch.
//
// slice_sum: one rank's share of a large all-reduce, four elements a thread. Bytes moved: (ins + outs) x the share;
// bounded by the link to the peers.
#include <algorithm>

#include "cuda/all_reduce.h"
#include "cuda/kernel.cuh"

namespace offload::cuda {
namespace {

constexpr int kWaitThreads = 512;
// All of a waiting kernel's blocks must run at once on the smallest card.
constexpr unsigned kWaitBlocksMost = 32;
constexpr uint32_t kPollsBetweenLooks = 1024;
constexpr int kSumThreads = 256;
constexpr unsigned kSumBlocksMost = 264;

__device__ inline int64_t now_ns() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Neither is kept in a first-level cache; each half of the packet is read or written at once.
__device__ inline void store_packet(Packet* to, float first, float second, uint32_t mark) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(__float_as_uint(first)), "r"(mark),
               "r"(__float_as_uint(second)), "r"(mark)
               : "memory");
}
__device__ inline Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.first), "=r"(packet.first_mark), "=r"(packet.second), "=r"(packet.second_mark)
               : "l"(from)
               : "memory");
  return packet;
}

struct Wait {
  volatile GroupWord* word;
  volatile GroupClock* clock;
  int64_t stall_ns, begin_ns;
  uint32_t mark;

  // Whether to go on. Looking costs a trip over the link, so it is done now and then.
  __device__ bool goes_on(int peer) const {
    if (clock->gave_up != 0) return false;
    if (word->abort == 0 && now_ns() - begin_ns <= stall_ns) return true;
    if (word->abort == 0) {
      word->stalled_for = static_cast<uint32_t>(peer) + 1;
      word->stalled_at = mark;
    }
    clock->gave_up = 1;
    return false;
  }
};

__device__ bool receive(const Packet* from, int peer, const Wait& wait, float& first, float& second) {
  for (uint32_t polls = 1;; ++polls) {
    const Packet packet = load_packet(from);
    if (packet.first_mark == wait.mark && packet.second_mark == wait.mark) {
      first = __uint_as_float(packet.first);
      second = __uint_as_float(packet.second);
      return true;
    }
    if (polls % kPollsBetweenLooks == 0 && !wait.goes_on(peer)) return false;
  }
}

template <typename T>
__global__ __launch_bounds__(kWaitThreads) void waiting_sum_kernel(const WaitingSum args) {
  volatile GroupClock* clock = args.clock;
  if (clock->gave_up != 0) return;
  // Every block reads it before the last one to end moves it on.
  const uint32_t mark = clock->done + 1;
  const Wait wait{args.word, clock, args.stall_ns, now_ns(), mark};
  const int64_t half = (mark & 1u) * args.half_packets;
  const int64_t packets = packets_for(args.elements), step = static_cast<int64_t>(gridDim.x) * kWaitThreads;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWaitThreads + threadIdx.x;
  T* const tensor = static_cast<T*>(args.tensor);
  const auto second_of = [&](int64_t i) { return 2 * i + 1 < args.elements ? load_float(tensor + 2 * i + 1) : 0.0f; };

  for (int64_t i = begin; i < packets; i += step) {
    const float first = load_float(tensor + 2 * i), second = second_of(i);
    for (int o = 0; o < args.outs; ++o) store_packet(args.out[o] + half + i, first, second, mark);
  }
  for (int64_t i = begin; i < packets; i += step) {
    const float own_first = load_float(tensor + 2 * i), own_second = second_of(i);
    float first_sum = 0.0f, second_sum = 0.0f;
    bool all_came = true;
    for (int q = 0; q < args.world && all_came; ++q) {
      float first = own_first, second = own_second;
      if (q != args.rank) all_came = receive(args.in[q] + half + i, q, wait, first, second);
      first_sum += first;
      second_sum += second;
    }
    if (!all_came) break;
    store_float(tensor + 2 * i, first_sum);
    if (2 * i + 1 < args.elements) store_float(tensor + 2 * i + 1, second_sum);
  }

  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(&args.clock->blocks_done, 1u) + 1 != gridDim.x) return;
  args.clock->blocks_done = 0;
  if (clock->gave_up != 0) return;
  clock->done = mark;
  static_cast<volatile GroupWord*>(args.word)->done = mark;
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};

template <typename T>
__global__ __launch_bounds__(kSumThreads) void slice_sum_kernel(const SliceSum args) {
  const int64_t fours = args.count / 4, step = static_cast<int64_t>(gridDim.x) * kSumThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  for (int64_t i = thread; i < fours; i += step) {
    float sums[4] = {};
    for (int q = 0; q < args.ins; ++q) {
      const Four<T> x = reinterpret_cast<const Four<T>*>(args.in[q])[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] += load_float(&x.v[e]);
    }
    Four<T> y;
#pragma unroll
    for (int e = 0; e < 4; ++e) store_float(&y.v[e], sums[e]);
    for (int o = 0; o < args.outs; ++o) reinterpret_cast<Four<T>*>(args.out[o])[i] = y;
  }
  const int64_t rest = 4 * fours + thread;
  if (rest >= args.count) return;
  float sum = 0.0f;
  for (int q = 0; q < args.ins; ++q) sum += load_float(static_cast<const T*>(args.in[q]) + rest);
  for (int o = 0; o < args.outs; ++o) store_float(static_cast<T*>(args.out[o]) + rest, sum);
}

__device__ inline uint32_t pattern(uint32_t seed, int64_t i) {
  uint32_t v = (static_cast<uint32_t>(i) + seed) * 0x9e3779b9u;
  v = (v ^ (v >> 15)) * 0x85ebca6bu;
  return v ^ (v >> 13);
}

__global__ void write_pattern_kernel(uint32_t* words, int64_t count, uint32_t seed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) words[i] = pattern(seed, i);
}

__global__ void pattern_faults_kernel(const uint32_t* words, int64_t count, uint32_t seed, uint32_t* faults) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count && static_cast<const volatile uint32_t*>(words)[i] != pattern(seed, i)) atomicAdd(faults, 1u);
}

}  // namespace

void waiting_sum(const WaitingSum& args, DType dtype, cudaStream_t stream) {
  OFL_ASSERT(packets_for(args.elements) <= args.half_packets && args.world <= kGroupMost);
  const unsigned blocks = std::min(kWaitBlocksMost, blocks_for(packets_for(args.elements), kWaitThreads));
  with_float_type(
      dtype, [&](auto type) { launch(waiting_sum_kernel<decltype(type)>, blocks, kWaitThreads, 0, stream, args); });
}

void slice_sum(const SliceSum& args, DType dtype, cudaStream_t stream) {
  OFL_ASSERT(args.ins <= kGroupMost && args.outs <= kGroupMost);
  const unsigned blocks = std::min(kSumBlocksMost, blocks_for(args.count, 4 * kSumThreads));
  with_float_type(dtype,
                  [&](auto type) { launch(slice_sum_kernel<decltype(type)>, blocks, kSumThreads, 0, stream, args); });
}

void write_pattern(uint32_t* words, int64_t count, uint32_t seed, cudaStream_t stream) {
  launch(write_pattern_kernel, blocks_for(count, kSumThreads), kSumThreads, 0, stream, words, count, seed);
}

void count_pattern_faults(const uint32_t* words, int64_t count, uint32_t seed, uint32_t* faults, cudaStream_t stream) {
  launch(pattern_faults_kernel, blocks_for(count, kSumThreads), kSumThreads, 0, stream, words, count, seed, faults);
}

}  // namespace offload::cuda
