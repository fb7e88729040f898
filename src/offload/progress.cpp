#include "offload/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "offload/machine.h"

namespace offload {
namespace {

constexpr double kSampleSeconds = 0.1;  // closer updates replace one another, so that the window stays short

}  // namespace

LoadProgress ProgressMeter::update(int64_t done_bytes, double now_s) {
  const int64_t done = std::clamp<int64_t>(done_bytes, 0, std::max<int64_t>(0, total_));
  if (window_.size() >= 2 && now_s - window_[window_.size() - 2].at_s < kSampleSeconds) window_.pop_back();
  window_.push_back({now_s, done});
  while (window_.size() > 2 && now_s - window_[1].at_s >= kWindowSeconds) window_.pop_front();

  LoadProgress progress{.done = done, .total = total_};
  const double seconds = now_s - window_.front().at_s;
  const auto bytes = static_cast<double>(done - window_.front().done);
  if (seconds > 0 && bytes > 0) progress.bytes_per_s = bytes / seconds;
  if (done >= total_) {
    progress.seconds_left = 0;
  } else if (progress.bytes_per_s > 0) {
    progress.seconds_left = static_cast<double>(total_ - done) / progress.bytes_per_s;
  }
  return progress;
}

std::string progress_text(const LoadProgress& progress) {
  std::string text = fmt::format("{:.1f} of {:.1f} GiB, {:.2f} GiB/s", static_cast<double>(progress.done) / kGib,
                                 static_cast<double>(progress.total) / kGib, progress.bytes_per_s / kGib);
  if (progress.seconds_left) text += fmt::format(", {:.0f} s left", std::ceil(*progress.seconds_left));
  return text;
}

}  // namespace offload
