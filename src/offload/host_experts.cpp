#include "offload/host_experts.h"

#include <algorithm>

namespace offload {

void HostExperts::plan(const SwigluExpertsArgs& args) {
  Arena staging;
  staging.take(args.x.dtype(), {args.x.dim(0), args.x.dim(1)});
  staging.take(args.out.dtype(), {args.out.dim(0), args.out.dim(1)});
  staging_bytes_ = std::max(staging_bytes_, staging.peak_bytes());
  out_rows_.reserve(static_cast<size_t>(args.out.dim(0)));
  ops_.set_planning(true);
  ops_(args);
  ops_.set_planning(false);
}

void HostExperts::allocate() {
  memory_ = HostMemory(bytes(), "experts on the host");
  ops_.set_scratch(Tensor(memory_.data() + staging_bytes_, DType::u8, {ops_.scratch_peak_bytes()}));
  ops_.reset_cost();
}

void HostExperts::fetch(Backend& backend, const Tensor& x) {
  backend.download(x, memory_.span().first(static_cast<size_t>(x.bytes())));
}

void HostExperts::run(Backend& backend, const SwigluExpertsArgs& args) {
  Arena staging(memory_.data(), staging_bytes_);
  SwigluExpertsArgs own = args;
  own.x = staging.take(args.x.dtype(), {args.x.dim(0), args.x.dim(1)});  // where fetch() put it
  own.out = staging.take(args.out.dtype(), {args.out.dim(0), args.out.dim(1)});
  ops_(own);

  out_rows_.clear();
  for (const ExpertRun& run : args.runs)
    for (int64_t i = run.begin; i < run.begin + run.count; ++i)
      out_rows_.push_back(args.out_rows[static_cast<size_t>(i)]);
  std::sort(out_rows_.begin(), out_rows_.end());
  for (size_t begin = 0, end = 0; begin < out_rows_.size(); begin = end) {  // neighbours go together
    do ++end;
    while (end < out_rows_.size() && out_rows_[end] == out_rows_[end - 1] + 1);
    const auto count = static_cast<int64_t>(end - begin);
    const Tensor rows = own.out.narrow(0, out_rows_[begin], count);
    backend.compute_lane().copy_in({static_cast<const std::byte*>(rows.data()), static_cast<size_t>(rows.bytes())},
                                   args.out.narrow(0, out_rows_[begin], count));
  }
}

}  // namespace offload
