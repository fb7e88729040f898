#include "cuda/group_collective.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "core/rank_meeting.h"
#include "cuda/all_reduce.h"
#include "cuda/device_memory.h"
#include "cuda/nccl_exchange.h"

namespace offload::cuda {
namespace {

constexpr int64_t kHalfPackets = packets_for(DeviceGroup::kWaitingElementsMost);
constexpr int64_t kMailboxPackets = 2 * kHalfPackets;  // of one rank's writing
// What passes through memory of the group's own passes in pieces, so that this memory is small.
constexpr int64_t kStageBytes = int64_t{8} << 20;
constexpr int64_t kScratchBytes = int64_t{32} << 20;
// Shares begin at multiples of so many elements, which the sums load at once.
constexpr int64_t kShareStep = 64;

// Between a PCIe 5 link of its own through host memory (16 MiB in 600 us, two H200 on 2026-11-30) and NVLink (60 us).
constexpr double kSlowBytesPerS = 80e9;
constexpr size_t kSumsMost = 2;  // started and not finished

// A span of a tensor's elements.
struct Share {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};

Share share_of(int rank, int world, int64_t elements) {
  const auto edge = [&](int r) { return r == world ? elements : elements * r / world / kShareStep * kShareStep; };
  return {edge(rank), edge(rank + 1)};
}

// Elements of a type as bytes.
struct Piece {
  std::byte* data = nullptr;
  int64_t elements = 0;
  DType dtype = DType::f32;

  std::span<std::byte> bytes(Share share) const {
    const int64_t size = dtype_bytes(dtype);
    return {data + share.begin * size, static_cast<size_t>(share.count() * size)};
  }
};

}  // namespace

std::string_view group_way_name(GroupWay way) {
  switch (way) {
    case GroupWay::waiting:
      return "waiting";
    case GroupWay::ordered:
      return "ordered";
    case GroupWay::nccl:
      return "nccl";
  }
  return "";
}

WayChoice choose_ways(const std::vector<WaySample>& samples) {
  WayChoice choice;
  for (const WaySample& sample : samples) {
    const double other = std::min(sample.ordered_s.value_or(1e30), sample.nccl_s.value_or(1e30));
    if (sample.waiting_s.value_or(2e30) > other) break;
    choice.waiting_bytes_max = sample.bytes;
  }
  for (auto sample = samples.rbegin(); sample != samples.rend(); ++sample) {
    if (sample->nccl_s.value_or(2e30) > sample->ordered_s.value_or(1e30)) break;
    choice.nccl_bytes_min = sample->bytes;
  }
  if (samples.empty()) return choice;
  const WaySample& largest = samples.back();
  const double seconds = std::min(largest.ordered_s.value_or(1e30), largest.nccl_s.value_or(1e30));
  choice.is_slow = static_cast<double>(largest.bytes) < kSlowBytesPerS * seconds;
  return choice;
}

struct DeviceGroup::State {
  struct Rank {
    CudaBackend* backend;
    cudaStream_t stream;  // that sums are given to now: the compute lane's, or the sum lane's
    DeviceEvent ready, done, computed;
    DeviceEvent summed[kSumsMost];  // of started sums, in turn
    uint64_t started = 0, finished = 0;
    DeviceMemory mailbox, clock, scratch;  // [world] x [2][kHalfPackets]; GroupClock; parts on their way
    Piece shared = {};                     // what the rank brought to the ordered sum in progress
    uint64_t stages = 0;                   // ordered sums so far: of two stages the next is used
    bool reaches_all = true;               // by memory alone

    int device() const { return backend->caps().device; }
  };

  State(std::vector<CudaBackend*> backends, const GroupOptions& group_options);
  ~State() {
    for (const Rank& rank : ranks) rank.backend->set_result_check({});
  }

  int world() const { return static_cast<int>(ranks.size()); }
  Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
  const PeerPath& path(int a, int b) const { return paths[static_cast<size_t>(a * world() + b)]; }
  bool reaches(int a, int b) const {
    const Reach reach = path(a, b).reach;
    return reach == Reach::same_device || reach == Reach::peer;
  }
  std::byte* stage(int rank, uint64_t number) const {
    return stages.as<std::byte>() + (2 * rank + static_cast<int64_t>(number % 2)) * kStageBytes;
  }
  // Where `writer` writes in a mailbox.
  static Packet* packets(const auto& mailbox, int writer) {
    return mailbox.template as<Packet>() + writer * kMailboxPackets;
  }

  void find_paths();
  void take_memory();
  std::vector<WaySample> measure();
  WaySample measure_size(int rank, const DeviceMemory& memory, int64_t bytes);
  double measure_way(int rank, GroupWay way, const Tensor& tensor);

  bool has(GroupWay way, int64_t elements) const;
  GroupWay way_of(int64_t elements, DType dtype) const;
  void all_reduce(int rank, GroupWay way, const Tensor& tensor);
  void wait_and_sum(int rank, const Tensor& tensor);
  void sum_in_order(int rank, const Piece& piece);
  void sum_by_nccl(int rank, const Piece& piece);
  void wait_for(int rank, DeviceEvent Rank::*event);
  void check(int rank) const;
  void abort() noexcept;
  void recover() noexcept;

  GroupOptions options;
  RankMeeting meeting;
  std::vector<Rank> ranks;
  std::vector<PeerPath> paths;  // [world, world]
  bool is_shared = false;       // a device has several ranks
  PinnedMemory words;           // GroupWord by rank
  PinnedMemory mailboxes;       // as a rank's, for readers that the writer does not reach; none where all are reached
  PinnedMemory stages;          // [world, 2, kStageBytes], likewise
  std::unique_ptr<NcclExchange> nccl;
  std::string why_no_nccl;
  WayChoice choice;
  std::vector<WaySample> samples;
};

DeviceGroup::State::State(std::vector<CudaBackend*> backends, const GroupOptions& group_options)
    : options(group_options), meeting(static_cast<int>(backends.size()), group_options.stall_after) {
  if (std::ssize(backends) > kGroupMost)
    throw_error(ErrorCode::usage, "{} ranks on GPUs; at most {} can meet", backends.size(), kGroupMost);
  std::vector<int> devices;
  for (CudaBackend* backend : backends) {
    const int device = backend->caps().device;
    is_shared |= std::find(devices.begin(), devices.end(), device) != devices.end();
    devices.push_back(device);
    ranks.push_back(Rank{.backend = backend,
                         .stream = backend->compute_stream(),
                         .ready = DeviceEvent(device),
                         .done = DeviceEvent(device),
                         .computed = DeviceEvent(device),
                         .summed = {DeviceEvent(device), DeviceEvent(device)},
                         .mailbox = {},
                         .clock = {},
                         .scratch = {}});
  }
  find_paths();
  const bool is_broken =
      std::any_of(paths.begin(), paths.end(), [](const PeerPath& path) { return path.reach == Reach::broken; });
  if (is_shared)
    why_no_nccl = "ranks share a device";
  else if (is_broken)
    why_no_nccl = "it would trust the broken peer access";
  else if (!options.nccl)
    why_no_nccl = "not asked for";
  else
    nccl = NcclExchange::open(devices, why_no_nccl);
  take_memory();
  choice.waiting_bytes_max = is_shared ? 0 : kWaitingElementsMost * dtype_bytes(DType::f32);
  if (options.measure && !is_shared && !options.only) {
    samples = measure();
    choice = choose_ways(samples);
  }
  for (int r = 0; r < world(); ++r) at(r).backend->set_result_check([this, r] { check(r); });
}

void DeviceGroup::State::find_paths() {
  paths.resize(static_cast<size_t>(world() * world()));
  for (int a = 0; a < world(); ++a)
    for (int b = 0; b <= a; ++b) {
      const int device_a = at(a).device(), device_b = at(b).device();
      const PeerPath found =
          device_a == device_b ? PeerPath{Reach::same_device, ""} : options.prove_path(device_a, device_b);
      paths[static_cast<size_t>(a * world() + b)] = paths[static_cast<size_t>(b * world() + a)] = found;
    }
  for (int a = 0; a < world(); ++a)
    for (int b = 0; b < world(); ++b) at(a).reaches_all &= reaches(a, b);
}

void DeviceGroup::State::take_memory() {
  words = PinnedMemory(world() * static_cast<int64_t>(sizeof(GroupWord)));
  const bool all_reach = std::all_of(ranks.begin(), ranks.end(), [](const Rank& rank) { return rank.reaches_all; });
  const int64_t mailbox_bytes = world() * kMailboxPackets * static_cast<int64_t>(sizeof(Packet));
  if (!all_reach) stages = PinnedMemory(2 * world() * kStageBytes);
  if (!all_reach && !is_shared) mailboxes = PinnedMemory(mailbox_bytes);
  for (Rank& rank : ranks) {
    if (is_shared) continue;
    rank.mailbox = DeviceMemory(rank.device(), mailbox_bytes);
    rank.clock = DeviceMemory(rank.device(), sizeof(GroupClock));
    if (nccl) rank.scratch = DeviceMemory(rank.device(), kScratchBytes);
  }
}

bool DeviceGroup::State::has(GroupWay way, int64_t elements) const {
  switch (way) {
    case GroupWay::waiting:
      return !is_shared && elements <= kWaitingElementsMost;
    case GroupWay::ordered:
      return true;
    case GroupWay::nccl:
      return nccl != nullptr;
  }
  return false;
}

GroupWay DeviceGroup::State::way_of(int64_t elements, DType dtype) const {
  const GroupWay way = options.only.value_or(choice.of(elements * dtype_bytes(dtype)));
  return has(way, elements) ? way : GroupWay::ordered;
}

void DeviceGroup::State::all_reduce(int rank, GroupWay way, const Tensor& tensor) {
  const auto in_pieces = [&](int64_t piece_bytes, auto&& sum) {
    const int64_t size = dtype_bytes(tensor.dtype()), step = piece_bytes / size;
    for (int64_t begin = 0; begin < tensor.elements(); begin += step)
      sum(Piece{static_cast<std::byte*>(tensor.data()) + begin * size, std::min(step, tensor.elements() - begin),
                tensor.dtype()});
  };
  switch (way) {
    case GroupWay::waiting:
      return wait_and_sum(rank, tensor);
    case GroupWay::ordered:
      return in_pieces(stages.bytes() > 0 ? kStageBytes : tensor.bytes(),
                       [&](const Piece& piece) { sum_in_order(rank, piece); });
    case GroupWay::nccl:
      return in_pieces(kScratchBytes / 2, [&](const Piece& piece) { sum_by_nccl(rank, piece); });
  }
}

void DeviceGroup::State::wait_and_sum(int rank, const Tensor& tensor) {
  Rank& self = at(rank);
  WaitingSum args{.tensor = tensor.data(),
                  .elements = tensor.elements(),
                  .rank = rank,
                  .world = world(),
                  .half_packets = kHalfPackets,
                  .clock = self.clock.as<GroupClock>(),
                  .word = words.as<GroupWord>() + rank,
                  .stall_ns = std::chrono::nanoseconds(options.stall_after).count()};
  for (int q = 0; q < world(); ++q) {
    if (q == rank) continue;
    const bool direct = reaches(rank, q);
    if (direct) args.out[args.outs++] = packets(at(q).mailbox, rank);
    args.in[q] = direct ? packets(self.mailbox, q) : packets(mailboxes, q);
  }
  if (!self.reaches_all) args.out[args.outs++] = packets(mailboxes, rank);
  waiting_sum(args, tensor.dtype(), self.stream);
}

// The rank's stream goes on when every peer's has come to its last record of `event`, which precedes the last meeting.
void DeviceGroup::State::wait_for(int rank, DeviceEvent Rank::*event) {
  for (int q = 0; q < world(); ++q)
    if (q != rank)
      cuda::check(cudaStreamWaitEvent(at(rank).stream, (at(q).*event).get(), 0), "waiting for another rank");
}

// Each rank sums its share of the elements and writes it into the tensors that it reaches, so no rank touches another's
// share. What a rank does not reach comes and goes through stages in host memory: a stage is used again two sums later,
// when every rank has waited for all to be done with the sum between.
void DeviceGroup::State::sum_in_order(int rank, const Piece& piece) {
  Rank& self = at(rank);
  const uint64_t number = self.stages++;
  const auto staged = [&](int q) { return Piece{stage(q, number), piece.elements, piece.dtype}; };
  const auto copy = [&](std::span<std::byte> from, std::span<std::byte> to) {
    if (!from.empty())
      cuda::check(cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyDefault, self.stream),
                  "copying a part");
  };
  self.shared = piece;
  for (int q = 0; q < world(); ++q) {
    const Share share = share_of(q, world(), piece.elements);
    if (!reaches(rank, q)) copy(piece.bytes(share), staged(rank).bytes(share));
  }
  cuda::check(cudaEventRecord(self.ready.get(), self.stream), "recording an event");
  meeting.wait_for_all(rank);
  wait_for(rank, &Rank::ready);

  const Share mine = share_of(rank, world(), piece.elements);
  SliceSum args{.count = mine.count()};
  for (int q = 0; q < world(); ++q) {
    OFL_ASSERT(at(q).shared.elements == piece.elements && at(q).shared.dtype == piece.dtype);
    const Piece source = reaches(rank, q) ? at(q).shared : staged(q);
    args.in[args.ins++] = source.bytes(mine).data();
    if (reaches(rank, q)) args.out[args.outs++] = at(q).shared.bytes(mine).data();
  }
  if (!self.reaches_all) args.out[args.outs++] = staged(rank).bytes(mine).data();
  slice_sum(args, piece.dtype, self.stream);
  cuda::check(cudaEventRecord(self.done.get(), self.stream), "recording an event");
  meeting.wait_for_all(rank);
  wait_for(rank, &Rank::done);
  for (int q = 0; q < world(); ++q) {
    const Share share = share_of(q, world(), piece.elements);
    if (!reaches(rank, q)) copy(staged(q).bytes(share), piece.bytes(share));
  }
}

// All ranks meet first: one that will not come is found by the host, as a device cannot be freed from NCCL so easily.
void DeviceGroup::State::sum_by_nccl(int rank, const Piece& piece) {
  Rank& self = at(rank);
  const Share mine = share_of(rank, world(), piece.elements);
  // The last share is the largest, by what rounding took from the others.
  const int64_t part_bytes = kScratchBytes / world() / 256 * 256;
  OFL_ASSERT((piece.elements / world() + world() * kShareStep) * dtype_bytes(piece.dtype) <= part_bytes);
  std::vector<std::span<std::byte>> theirs(ranks.size()), ours(ranks.size()), arrived(ranks.size());
  SliceSum args{.outs = 1, .count = mine.count()};
  args.out[0] = piece.bytes(mine).data();
  for (int q = 0; q < world(); ++q) {
    args.in[args.ins++] = q == rank ? args.out[0] : self.scratch.as<std::byte>() + q * part_bytes;
    if (q == rank) continue;
    const auto at_q = static_cast<size_t>(q);
    theirs[at_q] = piece.bytes(share_of(q, world(), piece.elements));
    ours[at_q] = piece.bytes(mine);
    arrived[at_q] = {self.scratch.as<std::byte>() + q * part_bytes, ours[at_q].size()};
  }
  meeting.wait_for_all(rank);
  try {
    nccl->exchange(rank, theirs, arrived, self.stream);
    slice_sum(args, piece.dtype, self.stream);
    nccl->exchange(rank, ours, theirs, self.stream);
  } catch (...) {
    nccl->abort();
    throw;
  }
}

// Throws what has ended the group's work; a device tells of it by its word alone.
void DeviceGroup::State::check(int rank) const {
  std::vector<uint64_t> done;
  const auto read = [](const uint32_t& word) { return *static_cast<const volatile uint32_t*>(&word); };
  const GroupWord* all = words.as<GroupWord>();
  const uint32_t stalled_for = read(all[rank].stalled_for);
  if (stalled_for == 0) {
    if (meeting.aborted()) throw Aborted();
    return;
  }
  for (int q = 0; q < world(); ++q) done.push_back(read(all[q].done));
  throw_error(
      ErrorCode::device,
      "rank {} waited {:.1f} s on {} for rank {} in all-reduce {}; done so far: {}; a device or a rank is stuck", rank,
      std::chrono::duration<double>(options.stall_after).count(), ranks[static_cast<size_t>(rank)].backend->name(),
      stalled_for - 1, read(all[rank].stalled_at), steps_text(done));
}

void DeviceGroup::State::abort() noexcept {
  meeting.abort();
  for (int q = 0; q < world(); ++q) *static_cast<volatile uint32_t*>(&words.as<GroupWord>()[q].abort) = 1;
}

// What a device still has to do ends soon after an abort. A device that is lost says so again in the next step.
void DeviceGroup::State::recover() noexcept {
  for (const Rank& rank : ranks) {
    static_cast<void>(cudaSetDevice(rank.device()));
    static_cast<void>(cudaStreamSynchronize(rank.backend->compute_stream()));
    static_cast<void>(cudaStreamSynchronize(rank.backend->sum_lane().stream()));
  }
  for (Rank& rank : ranks) {
    static_cast<void>(cudaSetDevice(rank.device()));
    for (const DeviceMemory* memory : {&rank.mailbox, &rank.clock})
      if (memory->bytes() > 0)
        static_cast<void>(cudaMemset(memory->as<void>(), 0, static_cast<size_t>(memory->bytes())));
    static_cast<void>(cudaDeviceSynchronize());
    rank.stages = rank.started = rank.finished = 0;
    rank.stream = rank.backend->compute_stream();
  }
  words.clear();
  mailboxes.clear();
  static_cast<void>(cudaSetDevice(ranks.front().device()));
  meeting.recover();
}

class DeviceGroup::End final : public Collective {
 public:
  End(State& state, int rank) : state_(state), rank_(rank) {}

  void reserve(int64_t) override {}

  void all_reduce_sum(const Tensor& tensor) override {
    OFL_ASSERT(tensor.contiguous() && (tensor.dtype() == DType::f32 || tensor.dtype() == DType::bf16));
    if (tensor.elements() == 0) return;
    state_.check(rank_);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(state_.at(rank_).stream, &capture), "asking for a capture");
    const bool is_captured = capture != cudaStreamCaptureStatusNone;
    OFL_ASSERT(!is_captured || (!state_.is_shared && tensor.elements() <= kWaitingElementsMost));
    const GroupWay way = is_captured ? GroupWay::waiting : state_.way_of(tensor.elements(), tensor.dtype());
    state_.all_reduce(rank_, way, tensor);
  }

  void start_sum(const Tensor& tensor) override {
    State::Rank& self = state_.at(rank_);
    OFL_ASSERT(self.started - self.finished < kSumsMost);
    follow_compute();
    self.stream = self.backend->sum_lane().stream();
    all_reduce_sum(tensor);
    check(cudaEventRecord(self.summed[self.started++ % kSumsMost].get(), self.stream), "recording an event");
    self.stream = self.backend->compute_stream();
  }

  void finish_sum() override {
    State::Rank& self = state_.at(rank_);
    OFL_ASSERT(self.finished < self.started);
    check(cudaStreamWaitEvent(self.stream, self.summed[self.finished++ % kSumsMost].get(), 0), "waiting for a sum");
  }

  bool sums_are_slow() const override { return state_.choice.is_slow; }
  bool runs_on_device(int64_t elements) const override {
    return state_.way_of(elements, DType::f32) == GroupWay::waiting;
  }
  Lane* sum_lane() override { return &state_.at(rank_).backend->sum_lane(); }

  void follow_compute() override {
    State::Rank& self = state_.at(rank_);
    check(cudaEventRecord(self.computed.get(), self.backend->compute_stream()), "recording an event");
    check(cudaStreamWaitEvent(self.backend->sum_lane().stream(), self.computed.get(), 0), "waiting for the ops");
  }

  bool all_equal(uint64_t value) override { return state_.meeting.all_equal(rank_, value); }
  void abort() noexcept override { state_.abort(); }
  void recover() noexcept override { state_.recover(); }

 private:
  State& state_;
  int rank_;
};

// --- measuring ---

// Seconds of one all-reduce, of several in a row, as this rank's host sees them.
double DeviceGroup::State::measure_way(int rank, GroupWay way, const Tensor& tensor) {
  using Clock = std::chrono::steady_clock;
  const int warmups = 2, repeats = tensor.bytes() >= (1 << 20) ? 4 : 24;
  auto begin = Clock::now();
  for (int i = -warmups; i < repeats; ++i) {
    if (i == 0) {
      cuda::check(cudaStreamSynchronize(at(rank).stream), "waiting for the device");
      meeting.wait_for_all(rank);
      begin = Clock::now();
    }
    all_reduce(rank, way, tensor);
  }
  cuda::check(cudaStreamSynchronize(at(rank).stream), "waiting for the device");
  check(rank);
  return std::chrono::duration<double>(Clock::now() - begin).count() / repeats;
}

WaySample DeviceGroup::State::measure_size(int rank, const DeviceMemory& memory, int64_t bytes) {
  const Tensor tensor(memory.as<void>(), DType::f32, {bytes / dtype_bytes(DType::f32)});
  WaySample sample{.bytes = bytes};
  if (has(GroupWay::waiting, tensor.elements())) sample.waiting_s = measure_way(rank, GroupWay::waiting, tensor);
  sample.ordered_s = measure_way(rank, GroupWay::ordered, tensor);
  if (nccl) sample.nccl_s = measure_way(rank, GroupWay::nccl, tensor);
  return sample;
}

std::vector<WaySample> DeviceGroup::State::measure() {
  constexpr int64_t kSizes[] = {10 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
  std::vector<WaySample> measured;
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&](int rank) {
    try {
      at(rank).backend->bind_thread();
      const DeviceMemory memory(at(rank).device(), kSizes[std::size(kSizes) - 1]);
      meeting.wait_for_all(rank);  // taking memory may wait for a device that waits for this rank
      for (const int64_t bytes : kSizes) {
        const WaySample sample = measure_size(rank, memory, bytes);
        if (rank == 0) measured.push_back(sample);
      }
      meeting.wait_for_all(rank);  // memory that a peer writes stays until all are done
    } catch (const Error&) {
      abort();
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world(); ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  recover();
  return measured;
}

// --- DeviceGroup ---

DeviceGroup::DeviceGroup(std::vector<CudaBackend*> backends, const GroupOptions& options)
    : state_(std::make_unique<State>(std::move(backends), options)) {}

DeviceGroup::~DeviceGroup() = default;

int DeviceGroup::world() const {
  return state_->world();
}

std::unique_ptr<Collective> DeviceGroup::end(int rank) {
  OFL_ASSERT(rank >= 0 && rank < world());
  return std::make_unique<End>(*state_, rank);
}

bool DeviceGroup::has(GroupWay way, int64_t elements) const {
  return state_->has(way, elements);
}

const WayChoice& DeviceGroup::choice() const {
  return state_->choice;
}

const std::vector<WaySample>& DeviceGroup::samples() const {
  return state_->samples;
}

std::vector<WaySample> DeviceGroup::measure() {
  return state_->measure();
}

const PeerPath& DeviceGroup::path(int a, int b) const {
  return state_->path(a, b);
}

std::string DeviceGroup::describe() const {
  std::vector<int> devices;
  std::vector<std::string_view> reaches;
  const auto add = [](auto& list, auto value) {
    if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
  };
  for (int a = 0; a < world(); ++a) {
    add(devices, state_->at(a).device());
    for (int b = 0; b < a; ++b) add(reaches, reach_name(path(a, b).reach));
  }
  std::string text = fmt::format("{} ranks on {} GPU{}: {}", world(), devices.size(), devices.size() == 1 ? "" : "s",
                                 fmt::join(reaches, ", "));
  const auto size = [](int64_t bytes) {
    return bytes < (1 << 20) ? fmt::format("{} KiB", bytes >> 10) : fmt::format("{} MiB", bytes >> 20);
  };
  if (choice().waiting_bytes_max > 0) text += fmt::format("; kernels wait up to {}", size(choice().waiting_bytes_max));
  if (!state_->nccl)
    text += fmt::format("; no NCCL: {}", state_->why_no_nccl);
  else if (choice().nccl_bytes_min == INT64_MAX)
    text += "; NCCL is slower";
  else
    text += fmt::format("; NCCL from {}", size(choice().nccl_bytes_min));
  return text;
}

}  // namespace offload::cuda
