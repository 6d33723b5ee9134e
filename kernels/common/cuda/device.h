#pragma once

// What the host side of every CUDA family needs: errors passed on, and what the device can do.
// Every unit includes this, so that it includes little itself: <atomic> and <mutex> would cost each
// of them two seconds to compile. SharedCount stands for the one, device.cu keeps the other.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

namespace tidegate::kernels {

#define TIDEGATE_RETURN_IF_CUDA_ERROR(expression)                 \
  do {                                                            \
    if (cudaError_t error = (expression); error != cudaSuccess) { \
      return error;                                               \
    }                                                             \
  } while (false)

struct DeviceLimits {
  int multiprocessors = 0;
  int major = 0;
  int shared_bytes = 0;  // that one block may use
};

/// What planners take for a block's shared memory is at most this: on a large chip, tests set it to
/// what a small one has, while nothing runs.
inline int shared_bytes_limit = std::numeric_limits<int>::max();

inline cudaError_t read_device_limits(DeviceLimits* limits) {
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device);
  };
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->multiprocessors, cudaDevAttrMultiProcessorCount));
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->major, cudaDevAttrComputeCapabilityMajor));
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      read(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  if (limits->shared_bytes > shared_bytes_limit) {
    limits->shared_bytes = shared_bytes_limit;
  }
  return cudaSuccess;
}

/// A number that many threads find out for themselves and leave for each other.
class SharedCount {
 public:
  int load() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }
  void store(int value) { __atomic_store_n(&value_, value, __ATOMIC_RELEASE); }

 private:
  int value_ = 0;
};

/// A number for each device; those past the last have none.
struct DeviceCounts {
  static constexpr int kDevices = 64;
  SharedCount of_device[kDevices];
};

/// `allowed`: the most shared memory that the kernel has been allowed so far.
[[nodiscard]] cudaError_t allow_shared_bytes(const void* kernel, DeviceCounts* allowed, int bytes);

/// Lets a kernel use so much shared memory a block: without, it is 48 KB. Each device is told of
/// the largest size so far.
template <auto* kKernel>
cudaError_t allow_shared_bytes(int bytes) {
  static DeviceCounts allowed;
  return allow_shared_bytes(reinterpret_cast<const void*>(kKernel), &allowed, bytes);
}

/// `known`: what was found so far, zero where nothing was.
[[nodiscard]] cudaError_t compiled_for(const void* kernel, DeviceCounts* known, int* version);

/// Which code of a kernel runs on the current device: 80 or 90, the virtual architecture that it
/// was compiled for, as __CUDA_ARCH__ / 10 has it. A chip of 9.0 or later may well run the code
/// of 8.0.
template <auto* kKernel>
cudaError_t compiled_for(int* version) {
  static DeviceCounts known;
  return compiled_for(reinterpret_cast<const void*>(kKernel), &known, version);
}

}  // namespace tidegate::kernels
