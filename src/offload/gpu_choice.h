// Which GPUs a process sees, and which of them each rank gets.
//
// Pure, but for read_gpus(), which reads /proc below a root that tests replace. Knows no CUDA: what the driver lets the
// process see is handed in.
#ifndef OFFLOAD_OFFLOAD_GPU_CHOICE_H_
#define OFFLOAD_OFFLOAD_GPU_CHOICE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace offload {

// One of the machine's GPUs.
struct GpuIdentity {
  std::string pci;   // "0000:17:00.0": domain and all, as cards of two domains may share the rest
  std::string uuid;  // "GPU-..."
};

// The machine's GPUs in PCI order, as the driver lists them; none where it lists none (no driver, some containers).
std::vector<GpuIdentity> read_gpus(const std::string& root = "/");

// Indices into `all` of what CUDA_VISIBLE_DEVICES leaves, in its order, with devices counted in PCI order: numbers or
// beginnings of UUIDs, up to the first that names no device; none when one is named twice. Nothing: all of them.
std::vector<int> visible_gpus(std::span<const GpuIdentity> all, std::optional<std::string_view> visible_devices);

// Why `visible_devices` leaves nothing of `all`, naming the variable; "" where it leaves something.
std::string why_none_visible(std::span<const GpuIdentity> all, std::optional<std::string_view> visible_devices);

// The GPUs that the driver lets this process see, by ordinal, and the oldest generation that kernels exist for.
struct VisibleGpus {
  std::vector<int> sms;  // 61, 75, 90, ...
  int sm_min = 75;

  int count() const { return static_cast<int>(sms.size()); }
  bool is_usable(int gpu) const { return sms[static_cast<size_t>(gpu)] >= sm_min; }
  std::vector<int> usable() const;
  // "GPU 0 (sm_61) is older than sm_75 and not used"; "" where all are usable.
  std::string left_out() const;
};

// The visible device of each of `ranks` ranks. They are dealt over `gpus` in turn, so that several may share one;
// without `gpus` each rank gets a usable device of its own. Throws Error{usage}: a device that is not visible or not
// usable, or named twice; fewer devices than ranks and no `gpus` that says to share them.
std::vector<int> gpus_of_ranks(int ranks, const VisibleGpus& visible, std::span<const int> gpus,
                               std::optional<std::string_view> visible_devices);

// What a rank's device is like.
struct GpuTraits {
  std::string name;
  int sm = 0;  // 75, 90
  int64_t memory_bytes = 0;
};
// What a user should know of ranks whose devices differ, one line each.
std::vector<std::string> uneven_gpu_notes(std::span<const GpuTraits> of_ranks);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_GPU_CHOICE_H_
