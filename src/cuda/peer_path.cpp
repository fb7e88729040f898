#include "cuda/peer_path.h"

#include "cuda/all_reduce.h"
#include "cuda/device_memory.h"

namespace offload::cuda {
namespace {

constexpr int64_t kPatternWords = 1 << 18;
constexpr int64_t kPatternBytes = kPatternWords * sizeof(uint32_t);

// One device's side of a proof: words that the other writes, words of its own to copy from, a count of what was wrong.
class Side {
 public:
  explicit Side(int device)
      : device_(device), stream_(device), words_(device, 2 * kPatternBytes), faults_(device, sizeof(uint32_t)) {}

  int device() const { return device_; }
  const DeviceStream& stream() const { return stream_; }
  uint32_t* words() const { return words_.as<uint32_t>(); }
  uint32_t* own_words() const { return words() + kPatternWords; }

  void clear() const {
    check(cudaMemsetAsync(words(), 0, 2 * kPatternBytes, stream_.get()), "clearing device memory");
    check(cudaMemsetAsync(faults_.as<void>(), 0, sizeof(uint32_t), stream_.get()), "clearing device memory");
    stream_.sync();
  }
  // Words of `words` that this device does not see as the pattern.
  uint32_t faults_in(const uint32_t* words, uint32_t seed) const {
    const DeviceScope scope(device_);
    count_pattern_faults(words, kPatternWords, seed, faults_.as<uint32_t>(), stream_.get());
    uint32_t faults = 0;
    check(cudaMemcpyAsync(&faults, faults_.as<void>(), sizeof faults, cudaMemcpyDeviceToHost, stream_.get()),
          "copying from the device");
    stream_.sync();
    return faults;
  }

 private:
  int device_;
  DeviceStream stream_;
  DeviceMemory words_, faults_;
};

// `from`'s stores, loads and copies to and from `to`'s memory. "" when all arrived.
std::string lost_between(const Side& from, const Side& to) {
  from.clear();
  to.clear();
  const auto lost = [&](uint32_t faults, const char* what) {
    return faults == 0 ? std::string()
                       : fmt::format("{} of {} words that device {} {} device {} were lost", faults, kPatternWords,
                                     from.device(), what, to.device());
  };
  const DeviceScope scope(from.device());
  write_pattern(to.words(), kPatternWords, 1, from.stream().get());
  from.stream().sync();
  if (std::string why = lost(to.faults_in(to.words(), 1), "stored to"); !why.empty()) return why;
  if (std::string why = lost(from.faults_in(to.words(), 1), "loaded from"); !why.empty()) return why;
  write_pattern(from.own_words(), kPatternWords, 2, from.stream().get());
  check(cudaMemcpyAsync(to.words(), from.own_words(), kPatternBytes, cudaMemcpyDeviceToDevice, from.stream().get()),
        "copying between devices");
  from.stream().sync();
  return lost(to.faults_in(to.words(), 2), "copied to");
}

bool turn_on(int from, int to) {
  const DeviceScope scope(from);
  const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
  if (status == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());  // not sticky
  return status == cudaErrorPeerAccessAlreadyEnabled;
}

void turn_off(int from, int to) {
  const DeviceScope scope(from);
  static_cast<void>(cudaDeviceDisablePeerAccess(to));
  static_cast<void>(cudaGetLastError());
}

}  // namespace

std::string_view reach_name(Reach reach) {
  switch (reach) {
    case Reach::same_device:
      return "the same device";
    case Reach::peer:
      return "peer access, written and verified";
    case Reach::absent:
      return "no peer access";
    case Reach::broken:
      return "broken peer access";
  }
  return "";
}

PeerPath prove_peer_path(int a, int b) {
  if (a == b) return {Reach::same_device, ""};
  for (const auto& [from, to] : {std::pair{a, b}, std::pair{b, a}}) {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, from, to), "asking for peer access");
    if (can == 0) return {Reach::absent, fmt::format("the driver offers device {} no access to device {}", from, to)};
  }
  PeerPath path;
  if (turn_on(a, b) && turn_on(b, a)) {
    const Side side_a(a), side_b(b);
    path.why = lost_between(side_a, side_b);
    if (path.why.empty()) path.why = lost_between(side_b, side_a);
    path.reach = path.why.empty() ? Reach::peer : Reach::broken;
  } else {
    path = {Reach::broken, fmt::format("devices {} and {} offer peer access and refuse to turn it on", a, b)};
  }
  if (path.reach == Reach::peer) return path;
  turn_off(a, b);
  turn_off(b, a);
  return path;
}

}  // namespace offload::cuda
