// ProgressMeter: from bytes done and the time to a rate and the time left.
//
// Pure: the time is passed in, nothing is printed.
#ifndef OFFLOAD_OFFLOAD_PROGRESS_H_
#define OFFLOAD_OFFLOAD_PROGRESS_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace offload {

struct LoadProgress {
  int64_t done = 0;   // bytes, at most total
  int64_t total = 0;  // bytes
  double bytes_per_s = 0;
  std::optional<double> seconds_left = {};  // nothing until a rate is known
};

class ProgressMeter {
 public:
  // The rate is that of the last kWindowSeconds: it follows a disk that slows down, and does not flicker.
  static constexpr double kWindowSeconds = 10;

  explicit ProgressMeter(int64_t total_bytes) : total_(total_bytes) {}

  // `done_bytes` in all at time `now_s` of a clock that does not go back.
  LoadProgress update(int64_t done_bytes, double now_s);

 private:
  struct Sample {
    double at_s;
    int64_t done;
  };
  int64_t total_;
  std::deque<Sample> window_;
};

// "12.3 of 56.3 GiB, 1.20 GiB/s, 37 s left"
std::string progress_text(const LoadProgress& progress);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_PROGRESS_H_
