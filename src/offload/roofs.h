// What a device can do at most, as the yardstick of benchmarks, and how far two measurements of it lie apart. Values
// alone: measuring is the backends'.
#ifndef OFFLOAD_OFFLOAD_ROOFS_H_
#define OFFLOAD_OFFLOAD_ROOFS_H_

namespace offload {

struct Roofs {
  double read_bytes_per_s = 0;     // of the device's memory
  double flops_per_s = 0;          // FP32 FMAs on a CPU, a large 16-bit GEMM on a GPU; an FMA is two
  double link_bytes_per_s = 0;     // host to device, page-locked; 0 on a CPU
  double m16n8k8_flops_per_s = 0;  // of the matrix instruction of Turing's plan; 0 where another plan is used
};

// The better of two measurements, roof by roof.
Roofs better_of(const Roofs& a, const Roofs& b);

// |b / a - 1|
double drift(double a, double b);
// The largest of the roofs'; those that `a` lacks do not count.
double drift(const Roofs& a, const Roofs& b);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_ROOFS_H_
