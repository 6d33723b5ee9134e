#pragma once

// What the host side of every CUDA family needs: errors passed on, and what the device can do.

#include <cuda_runtime_api.h>

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

}  // namespace tidegate::kernels
