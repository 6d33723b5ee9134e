#pragma once

// What the host side of every CUDA family needs: errors passed on, and what the device can do.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

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

inline cudaError_t read_device_limits(DeviceLimits* limits) {
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device);
  };
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->multiprocessors, cudaDevAttrMultiProcessorCount));
  TIDEGATE_RETURN_IF_CUDA_ERROR(read(&limits->major, cudaDevAttrComputeCapabilityMajor));
  return read(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

/// Once on every device, a kernel must be told that it may use more than 48 KB of shared memory.
template <auto* kKernel>
cudaError_t allow_shared_bytes(int bytes) {
  static std::atomic<uint64_t> allowed = 0;
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) {
    return cudaSuccess;
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.fetch_or(bit, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace tidegate::kernels
