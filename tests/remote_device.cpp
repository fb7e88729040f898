#include "remote_device.h"

#include <sys/mman.h>

#include <cstring>
#include <deque>

#include "cpu/cpu_ops.h"

namespace offload {

// The host may touch the device's memory while one lives.
class RemoteDevice::Open {
 public:
  explicit Open(RemoteDevice& device) : device_(device) {
    if (device_.is_closed_ && device_.open_++ == 0) set(PROT_READ | PROT_WRITE);
  }
  ~Open() {
    if (device_.is_closed_ && --device_.open_ == 0) set(PROT_NONE);
  }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

 private:
  void set(int protection) {
    for (const std::span<std::byte> buffer : device_.buffers_)
      OFL_ASSERT(mprotect(buffer.data(), buffer.size(), protection) == 0);
  }

  RemoteDevice& device_;
};

class RemoteDevice::RemoteLane final : public Lane {
 public:
  RemoteLane(RemoteDevice& device, bool is_copy) : device_(device), is_copy_(is_copy) {}

  void copy_in(std::span<const std::byte> host, const Tensor& device) override {
    OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
    OFL_ASSERT(device_.holds(device.data(), device.bytes()) && !device_.holds(host.data(), 1));
    issue([this, host, device] {
      if (is_copy_ && device_.on_copy_) device_.on_copy_(host.data());
      std::memcpy(device.data(), host.data(), host.size());
    });
  }
  void call(void (*function)(void*), void* context) override {
    issue([function, context] { function(context); });
  }
  void record(int event) override {
    const uint64_t generation = ++at(event).issued;
    issue([this, event, generation] { at(event).reached = generation; });
  }
  void wait(int event) override {
    issue([] {}, event, at(event).issued);
  }
  void drain() override { device_.drain(*this); }

  // Nothing but ops is repeated.
  void issue(Work work, int event = -1, uint64_t generation = 0) {
    OFL_ASSERT(device_.recording_ == nullptr);
    enqueue({std::move(work), event, generation});
  }
  void issue_op(Work work) {
    if (device_.recording_ != nullptr) device_.recording_->push_back(work);
    enqueue({std::move(work), -1, 0});
  }
  bool empty() const { return queue_.empty(); }
  bool can_move() const {
    return !queue_.empty() &&
           (queue_.front().event < 0 || at(queue_.front().event).reached >= queue_.front().generation);
  }
  void move() {
    const Command command = std::move(queue_.front());
    queue_.pop_front();
    command.work();
  }

 private:
  struct Command {
    Work work;
    int event;  // to be reached first, or -1
    uint64_t generation;
  };

  void enqueue(Command command) {
    device_.check_alive();
    queue_.push_back(std::move(command));
    device_.move_some();
  }
  Event& at(int event) const { return device_.events_.at(static_cast<size_t>(event)); }

  RemoteDevice& device_;
  bool is_copy_;
  std::deque<Command> queue_;
};

// Host arrays of arguments are read at the call; everything else when the lane comes to it.
class RemoteDevice::RemoteOps final : public Ops {
 public:
  explicit RemoteOps(RemoteDevice& device) : device_(device), inner_({.threads = 1}) {}

 protected:
#define OFL_REMOTE_OP(Args, name)                          \
  void execute(const Args& args) override {                \
    enqueue(args);                                         \
  }                                                        \
  int64_t scratch_bytes(const Args& args) const override { \
    inner_.set_planning(true);                             \
    inner_(args);                                          \
    inner_.set_planning(false);                            \
    return inner_.scratch_peak_bytes();                    \
  }
  OFL_FOR_EACH_OP(OFL_REMOTE_OP)
#undef OFL_REMOTE_OP

 private:
  template <typename Args>
  void enqueue(const Args& args) {
    device_.compute_->issue_op([this, args] { run(args); });
  }
  void enqueue(const LinearArgs& args) {
    require_here(args.x);
    require_here(args.w);
    require_here(args.out);
    device_.compute_->issue_op([this, args] { run(args); });
  }
  void enqueue(const SwigluExpertsArgs& args) {
    require_here(args.x);
    require_here(args.out);
    for (const ExpertRun& run : args.runs) device_.zero_copy_runs_ += device_.holds(run.gate_up, 1) ? 0 : 1;
    device_.compute_->issue_op([this, args, runs = std::vector(args.runs.begin(), args.runs.end()),
                                rows = std::vector(args.rows.begin(), args.rows.end()),
                                out_rows = std::vector(args.out_rows.begin(), args.out_rows.end())] {
      SwigluExpertsArgs own = args;
      own.runs = runs;
      own.rows = rows;
      own.out_rows = out_rows;
      run(own);
    });
  }
  template <typename Args>
  void run(const Args& args) {
    inner_.set_scratch(scratch());
    inner_(args);
  }
  void require_here(const Tensor& tensor) const {
    OFL_ASSERT(tensor.elements() == 0 || device_.holds(tensor.data(), 1));
  }

  RemoteDevice& device_;
  mutable cpu::CpuOps inner_;
};

// Ranks meet when their devices have come to this point, and read each other's memory until all leave.
class RemoteDevice::RemoteCollective final : public Collective {
 public:
  RemoteCollective(RemoteDevice& device, std::unique_ptr<Collective> end) : device_(device), end_(std::move(end)) {}

  void reserve(int64_t elements) override { end_->reserve(elements); }
  void all_reduce_sum(const Tensor& tensor) override {
    const auto sum = [this, tensor] {
      const Open open(device_);
      end_->all_reduce_sum(tensor);
    };
    if (device_.sums_) return device_.compute_->issue_op(sum);
    device_.drain(*device_.compute_);
    sum();
  }
  bool runs_on_device(int64_t) const override { return device_.sums_; }
  bool all_equal(uint64_t value) override {
    device_.drain(*device_.compute_);  // sums and hosts have one place to meet
    return end_->all_equal(value);
  }
  void abort() noexcept override { end_->abort(); }
  void recover() noexcept override { end_->recover(); }

 private:
  RemoteDevice& device_;
  std::unique_ptr<Collective> end_;
};

RemoteDevice::RemoteDevice(Options options)
    : is_closed_(options.is_closed),
      sums_(options.sums),
      reads_pinned_memory_(options.reads_pinned_memory),
      free_bytes_(options.free_bytes),
      state_(options.seed * 2 + 1),
      ops_(std::make_unique<RemoteOps>(*this)),
      compute_(std::make_unique<RemoteLane>(*this, false)),
      copy_(std::make_unique<RemoteLane>(*this, true)) {}

RemoteDevice::~RemoteDevice() {
  OFL_ASSERT(buffers_.empty());
}

Buffer RemoteDevice::allocate(int64_t bytes, std::string_view) {
  if (bytes == 0) return {};
  if (before_allocate_) before_allocate_();
  void* data = mmap(nullptr, static_cast<size_t>(bytes), is_closed_ && open_ == 0 ? PROT_NONE : PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  OFL_ASSERT(data != MAP_FAILED);
  buffers_.emplace_back(static_cast<std::byte*>(data), static_cast<size_t>(bytes));
  return {*this, data, bytes};
}

Buffer RemoteDevice::allocate_host(int64_t bytes, std::string_view) {
  if (bytes == 0) return {};
  if (before_allocate_) before_allocate_();
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  OFL_ASSERT(data != MAP_FAILED);
  return {*this, data, bytes};
}

// As a GPU's: what is under way ends first.
void RemoteDevice::release(void* data, int64_t bytes) noexcept {
  repeated_.clear();
  try {
    drain(*compute_);
    drain(*copy_);
  } catch (const std::exception&) {  // the failure is thrown by whoever uses the device next
  }
  std::erase_if(buffers_, [&](const std::span<std::byte> buffer) { return buffer.data() == data; });
  munmap(data, static_cast<size_t>(bytes));
}

Ops& RemoteDevice::ops() {
  return *ops_;
}
void RemoteDevice::repeat(uint64_t key, const std::function<void()>& body) {
  const auto [at, is_new] = repeated_.try_emplace(key);
  if (!is_new) {
    ++repeats_;
    for (const Work& work : at->second) compute_->issue(work);
    return;
  }
  recording_ = &at->second;
  try {
    body();
  } catch (...) {
    recording_ = nullptr;
    repeated_.erase(key);
    throw;
  }
  recording_ = nullptr;
}

Lane& RemoteDevice::compute_lane() {
  return *compute_;
}
Lane& RemoteDevice::copy_lane() {
  return *copy_;
}
void RemoteDevice::create_events(int count) {
  events_.resize(static_cast<size_t>(count));
}

bool RemoteDevice::holds(const void* data, int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const std::span<std::byte> buffer : buffers_)
    if (begin >= buffer.data() && begin + bytes <= buffer.data() + buffer.size()) return true;
  return false;
}

void RemoteDevice::upload(std::span<const std::byte> host, const Tensor& device) {
  if (host.empty()) return;
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  OFL_ASSERT(holds(device.data(), device.bytes()) && !holds(host.data(), 1));
  drain(*compute_);
  const Open open(*this);
  std::memcpy(device.data(), host.data(), host.size());
}

void RemoteDevice::download(const Tensor& device, std::span<std::byte> host) {
  if (host.empty()) return;
  OFL_ASSERT(device.contiguous() && static_cast<int64_t>(host.size()) == device.bytes());
  OFL_ASSERT(holds(device.data(), device.bytes()) && !holds(host.data(), 1));
  drain(*compute_);
  {
    const Open open(*this);
    std::memcpy(host.data(), device.data(), host.size());
  }
  if (on_download_) on_download_(device, host);
}

void RemoteDevice::fill_zero(const Tensor& device) {
  drain(*compute_);
  const Open open(*this);
  std::memset(device.data(), 0, static_cast<size_t>(device.bytes()));
}

std::unique_ptr<Collective> RemoteDevice::wrap(std::unique_ptr<Collective> end) {
  return std::make_unique<RemoteCollective>(*this, std::move(end));
}

void RemoteDevice::check_alive() const {
  if (failure_) std::rethrow_exception(failure_);
}

void RemoteDevice::drain(RemoteLane& lane) {
  OFL_ASSERT(recording_ == nullptr);
  check_alive();
  const Open open(*this);
  while (!lane.empty()) OFL_ASSERT(move_one());  // else the lanes wait for one another for ever
  check_alive();
}

void RemoteDevice::move_some() {
  if (draw() % 4 != 0) return;
  const Open open(*this);
  for (uint64_t moves = draw() % 8; moves > 0 && move_one(); --moves) {
  }
  check_alive();
}

bool RemoteDevice::move_one() {
  const bool compute_can = compute_->can_move(), copy_can = copy_->can_move();
  if (!compute_can && !copy_can) return false;
  RemoteLane& lane = compute_can && (!copy_can || draw() % 2 == 0) ? *compute_ : *copy_;
  try {
    lane.move();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  return true;
}

uint64_t RemoteDevice::draw() {  // xorshift64
  state_ ^= state_ << 13;
  state_ ^= state_ >> 7;
  state_ ^= state_ << 17;
  return state_ >> 11;
}

}  // namespace offload
