#pragma once

// What the host side of every CUDA family needs: errors passed on, and what the device can do.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

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
/// what a small one has.
inline std::atomic<int> shared_bytes_limit = std::numeric_limits<int>::max();

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
  limits->shared_bytes = std::min(limits->shared_bytes, shared_bytes_limit.load());
  return cudaSuccess;
}

/// Blocks as a grid has them. False where there are more than one launch can have.
inline bool make_grid(int64_t blocks, unsigned* grid) {
  *grid = static_cast<unsigned>(blocks);
  return blocks <= std::numeric_limits<int>::max();
}

/// Lets a kernel use so much shared memory a block: without, it is 48 KB. Each device is told of
/// the largest size so far.
template <auto* kKernel>
cudaError_t allow_shared_bytes(int bytes) {
  constexpr int kDevices = 64;
  static std::atomic<int> allowed[kDevices] = {};
  static std::mutex telling;
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  std::atomic<int>* const known = device < kDevices ? &allowed[device] : nullptr;
  if (known != nullptr && bytes <= known->load(std::memory_order_acquire)) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> one_at_a_time(telling);
  if (known != nullptr && bytes <= known->load(std::memory_order_relaxed)) {
    return cudaSuccess;
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (known != nullptr) {
    known->store(bytes, std::memory_order_release);
  }
  return cudaSuccess;
}

}  // namespace tidegate::kernels
