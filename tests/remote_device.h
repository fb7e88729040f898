// RemoteDevice: a backend whose memory is not the host's and whose work is late, to hold the engine to what a GPU asks.
//
// Each lane is a queue. A seeded draw moves them: sometimes as work is issued, and as far as needed when the host
// waits, so that the order is whatever events and lanes allow, never that of the calls. On request its memory is closed
// to the host (PROT_NONE) but while a lane moves, which is slow. Ops are those of the CPU backend, with its bits.
// Confined to its rank's thread; the same seed moves alike.
#ifndef OFFLOAD_TESTS_REMOTE_DEVICE_H_
#define OFFLOAD_TESTS_REMOTE_DEVICE_H_

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/backend.h"
#include "core/collective.h"

namespace offload {

class RemoteDevice final : public Backend {
 public:
  struct Options {
    uint64_t seed = 1;
    bool is_closed = false;
    bool sums = false;  // over ranks: its compute lane does them and its host waits for none
    bool reads_pinned_memory = true;
    std::optional<int64_t> free_bytes = {};  // nothing: its memory counts as the host's where the budget is concerned
  };
  explicit RemoteDevice(Options options);
  ~RemoteDevice() override;

  std::string_view name() const override { return "remote"; }
  bool uses_host_memory() const override { return !free_bytes_; }
  std::optional<int64_t> free_bytes() override { return free_bytes_; }
  bool reads_pinned_memory() const override { return reads_pinned_memory_; }
  Buffer allocate(int64_t bytes, std::string_view tag) override;
  Buffer allocate_host(int64_t bytes, std::string_view tag) override;  // always open to the host
  Ops& ops() override;
  // When the key comes again, the ops of its first time run, with the arguments that they had then.
  void repeat(uint64_t key, const std::function<void()>& body) override;
  void create_events(int count) override;
  Lane& compute_lane() override;
  Lane& copy_lane() override;
  void upload(std::span<const std::byte> host, const Tensor& device) override;
  void download(const Tensor& device, std::span<std::byte> host) override;
  void fill_zero(const Tensor& device) override;

  // `end`, made to wait for this device and to reach its memory. Both outlive the result.
  std::unique_ptr<Collective> wrap(std::unique_ptr<Collective> end);

  // Called before each allocation; may throw.
  void set_before_allocate(std::function<void()> hook) { before_allocate_ = std::move(hook); }
  // Called when a copy lane's copy from `host` runs; may throw, which fails the device for good.
  void set_on_copy(std::function<void(const std::byte* host)> hook) { on_copy_ = std::move(hook); }
  // Told what the host has read.
  void set_on_download(std::function<void(const Tensor& device, std::span<const std::byte> host)> hook) {
    on_download_ = std::move(hook);
  }
  // Times that a key came again.
  int64_t repeats() const { return repeats_; }
  // Experts that the ops computed out of memory that is not the device's.
  int64_t zero_copy_runs() const { return zero_copy_runs_; }

 private:
  class RemoteLane;
  class RemoteOps;
  class RemoteCollective;
  class Open;

  void release(void* data, int64_t bytes) noexcept override;
  bool holds(const void* data, int64_t bytes) const;
  void drain(RemoteLane& lane);
  void move_some();
  bool move_one();
  void check_alive() const;
  uint64_t draw();

  struct Event {
    uint64_t issued = 0, reached = 0;
  };

  using Work = std::function<void()>;

  bool is_closed_, sums_, reads_pinned_memory_;
  std::optional<int64_t> free_bytes_;
  uint64_t state_;
  std::unique_ptr<RemoteOps> ops_;
  std::unique_ptr<RemoteLane> compute_, copy_;
  std::vector<Event> events_;
  std::vector<std::span<std::byte>> buffers_;
  int open_ = 0;
  std::exception_ptr failure_;
  std::unordered_map<uint64_t, std::vector<Work>> repeated_;
  std::vector<Work>* recording_ = nullptr;  // of the key whose body runs
  int64_t repeats_ = 0;
  int64_t zero_copy_runs_ = 0;
  std::function<void()> before_allocate_;
  std::function<void(const std::byte*)> on_copy_;
  std::function<void(const Tensor&, std::span<const std::byte>)> on_download_;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_REMOTE_DEVICE_H_
