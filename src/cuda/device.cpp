#include "cuda/device.h"

#include <algorithm>

#include "cuda/compiled_sm.h"

namespace offload::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::device;
  throw_error(code, "{}: {} (CUDA error {})", what, cudaGetErrorString(status), static_cast<int>(status));
}

namespace {

int sm_of(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "reading a device's generation");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "reading a device's generation");
  return 10 * major + minor;
}

}  // namespace

DeviceCaps forced_to(DeviceCaps caps, int sm) {
  caps.sm = std::min(caps.sm, sm);
  if (caps.sm < 80) caps.shared_bytes = std::min<int64_t>(caps.shared_bytes, 64 << 10);
  return caps;
}

DeviceCount count_devices() {
  DeviceCount devices;
  const cudaError_t status = cudaGetDeviceCount(&devices.count);
  if (status == cudaSuccess && devices.count > 0) {
    for (int device = 0; device < devices.count; ++device) devices.sms.push_back(sm_of(device));
    return devices;
  }
  devices.count = 0;
  devices.why_none = status == cudaSuccess ? "no device is visible" : cudaGetErrorString(status);
  static_cast<void>(cudaGetLastError());
  int driver = 0;  // 0: there is none, which the runtime calls too old
  if (status == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    devices.why_none = "no NVIDIA driver is installed";
  return devices;
}

DeviceCaps query_device(int ordinal, std::optional<int> force_sm) {
  const DeviceCount devices = count_devices();
  if (ordinal < 0 || ordinal >= devices.count)
    throw_error(ErrorCode::usage, "CUDA device {} does not exist; there are {}{}{}", ordinal, devices.count,
                devices.count == 0 ? ": " : "", devices.why_none);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal), "reading a device's properties");
  check(cudaSetDevice(ordinal), "choosing the device");
  DeviceCaps caps;
  caps.device = ordinal;
  caps.device_sm = devices.sms[static_cast<size_t>(ordinal)];
  caps.name = properties.name;
  caps.pci = fmt::format("{:04x}:{:02x}:{:02x}.0", properties.pciDomainID, properties.pciBusID, properties.pciDeviceID);
  caps.uuid = "GPU-";
  for (size_t i = 0; i < sizeof properties.uuid.bytes; ++i)
    caps.uuid += fmt::format("{}{:02x}", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                             static_cast<unsigned char>(properties.uuid.bytes[i]));
  caps.multiprocessors = properties.multiProcessorCount;
  caps.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  caps.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  int reads_pinned = 0;
  check(cudaDeviceGetAttribute(&reads_pinned, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal),
        "reading a device's properties");
  caps.reads_pinned_memory = reads_pinned != 0;
  if (caps.device_sm < kSmMin)
    throw_error(ErrorCode::usage, "CUDA device {} ({}) is of sm_{}; sm_{} (Turing) is the oldest supported", ordinal,
                caps.name, caps.device_sm, kSmMin);
  caps.sm = std::min(caps.device_sm, compiled_sm());
  caps.is_90a = compiled_for_90a();
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  caps.is_cuda_13 = std::min(driver, CUDART_VERSION) >= 13000;
  return forced_to(caps, force_sm.value_or(caps.sm));
}

}  // namespace offload::cuda
