// Backend: one device's memory and its Ops. src/cpu and src/cuda implement it; nothing below tools/ names them.
//
// A backend is confined to the thread of its rank. Its own transfers are for loading, for results and for the small
// arrays of a step; the hot path moves experts through the copy lane.
#ifndef OFFLOAD_CORE_BACKEND_H_
#define OFFLOAD_CORE_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/ops.h"
#include "core/tensor.h"

namespace offload {

class Backend;

// Device memory, returned when it goes. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend& owner, void* data, int64_t bytes) : owner_(&owner), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  inline ~Buffer();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) {
    std::swap(owner_, other.owner_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  Backend* owner_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// An in-order queue of device work that runs beside the others. Events order lanes among each other, never time: an
// event names a point of a lane. A failure of a lane's work is thrown by a later call on any lane of the backend.
class Lane {
 public:
  virtual ~Lane() = default;

  // device = host bytes. REQUIRES: contiguous, as large; both stay until the copy is done. Host memory that is neither
  // pinned nor of allocate_host() may be read at once, so it must not be what a call() still has to write.
  virtual void copy_in(std::span<const std::byte> host, const Tensor& device) = 0;
  // function(context) on the host, in the lane's order.
  virtual void call(void (*function)(void*), void* context) = 0;
  // `event` is reached when everything issued on this lane so far is done.
  virtual void record(int event) = 0;
  // What is issued on this lane later starts after the latest record of `event` (at once when there is none).
  virtual void wait(int event) = 0;
  // Returns when everything issued so far is done.
  virtual void drain() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;  // "cpu", "cuda:0"
  // Whether what allocate() gives is host memory, which host code may read and which counts as such.
  virtual bool uses_host_memory() const = 0;
  // Whether ops may be given host memory that was pinned for the device, where it lies.
  virtual bool reads_pinned_memory() const { return true; }

  // Device memory that allocate() could give now; nothing where it is host memory.
  virtual std::optional<int64_t> free_bytes() { return {}; }

  // First call of a thread that takes the backend over.
  virtual void bind_thread() {}

  // Memory aligned to Arena::kAlignment, of undefined content. `tag` says what for ("weights"), for messages. Throws
  // Error{resource} naming the tag, the bytes asked for and the remedy.
  virtual Buffer allocate(int64_t bytes, std::string_view tag) = 0;
  // The same in host memory that Lane::copy_in copies from without holding the host up. For small buffers.
  virtual Buffer allocate_host(int64_t bytes, std::string_view tag) = 0;

  virtual Ops& ops() = 0;

  // Calls `body`, which has ops run and does nothing else that can be seen, or has the device run again at once what
  // body had it run when the same key came last. REQUIRES: equal keys mean equal ops with equal arguments.
  virtual void repeat(uint64_t key, const std::function<void()>& body) {
    static_cast<void>(key);
    body();
  }

  // The lane that the ops run on, and one for copies. Events are 0..count-1; created once, before any lane is used.
  virtual void create_events(int count) = 0;
  virtual Lane& compute_lane() = 0;
  virtual Lane& copy_lane() = 0;

  // Contiguous tensors only, after all that was issued on the compute lane. upload() returns when the host bytes may be
  // reused, and what is issued later sees them; download() returns when the bytes have arrived.
  virtual void upload(std::span<const std::byte> host, const Tensor& device) = 0;
  virtual void download(const Tensor& device, std::span<std::byte> host) = 0;
  virtual void fill_zero(const Tensor& device) = 0;

 private:
  friend class Buffer;
  virtual void release(void* data, int64_t bytes) noexcept = 0;
};

inline Buffer::~Buffer() {
  if (data_ != nullptr) owner_->release(data_, bytes_);
}

}  // namespace offload

#endif  // OFFLOAD_CORE_BACKEND_H_
