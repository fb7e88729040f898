// Ranks on CUDA devices for tests: a backend each and the group that joins them.
#ifndef OFFLOAD_TESTS_CUDA_GROUP_H_
#define OFFLOAD_TESTS_CUDA_GROUP_H_

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "cuda/group_collective.h"
#include "offload/rank_team.h"

namespace offload {

// The device of each rank.
using Layout = std::vector<int>;

inline std::string layout_text(const Layout& layout) {
  return fmt::format("ranks on devices {}", fmt::join(layout, ", "));
}

// Two and four ranks on one device; with more devices one rank on each, and two.
inline std::vector<Layout> layouts() {
  const cuda::DeviceCount devices = cuda::count_devices();
  if (devices.count == 0) MESSAGE("skipped: no CUDA device: ", devices.why_none);
  std::vector<Layout> all;
  if (devices.count >= 1) all = {{0, 0}, {0, 0, 0, 0}};
  if (devices.count < 2) return all;
  Layout each, twice;
  for (int d = 0; d < devices.count; ++d) each.push_back(d);
  for (int d = 0; d < 2 * devices.count; ++d) twice.push_back(d % devices.count);
  all.push_back({0, 1});
  if (each != all.back()) all.push_back(each);
  all.push_back(twice);
  return all;
}

class CudaGroup {
 public:
  explicit CudaGroup(const Layout& layout, const cuda::GroupOptions& options = {}, std::optional<int> force_sm = {}) {
    for (const int device : layout) backends_.push_back(std::make_unique<cuda::CudaBackend>(device, force_sm));
    group_ = std::make_unique<cuda::DeviceGroup>(backends(), options);
    for (int rank = 0; rank < world(); ++rank) ends_.push_back(group_->end(rank));
    team_ = std::make_unique<RankTeam>(world());
  }

  int world() const { return static_cast<int>(backends_.size()); }
  cuda::DeviceGroup& group() { return *group_; }
  cuda::CudaBackend& backend(int rank) { return *backends_[static_cast<size_t>(rank)]; }
  Collective& end(int rank) { return *ends_[static_cast<size_t>(rank)]; }
  std::vector<cuda::CudaBackend*> backends() const {
    std::vector<cuda::CudaBackend*> all;
    for (const auto& backend : backends_) all.push_back(backend.get());
    return all;
  }

  // work(rank) on every rank's thread, as an engine runs it. Rethrows the first cause, after recovery.
  void run(const std::function<void(int)>& work) {
    const auto bound = [&](int rank) {
      backend(rank).bind_thread();
      work(rank);
    };
    try {
      team_->run(bound, [&](int rank) { end(rank).abort(); });
    } catch (...) {
      end(0).recover();
      throw;
    }
  }

 private:
  std::vector<std::unique_ptr<cuda::CudaBackend>> backends_;
  std::unique_ptr<cuda::DeviceGroup> group_;
  std::vector<std::unique_ptr<Collective>> ends_;
  std::unique_ptr<RankTeam> team_;
};

}  // namespace offload

#endif  // OFFLOAD_TESTS_CUDA_GROUP_H_
