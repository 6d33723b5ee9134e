// What device.h keeps out of every unit, for the seconds that <mutex> takes to compile.

#include "kernels/common/cuda/device.h"

#include <mutex>

namespace tidegate::kernels {

cudaError_t allow_shared_bytes(const void* kernel, DeviceCounts* allowed, int bytes) {
  static std::mutex telling;
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  SharedCount* const known =
      device < DeviceCounts::kDevices ? &allowed->of_device[device] : nullptr;
  if (known != nullptr && bytes <= known->load()) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> one_at_a_time(telling);
  if (known != nullptr && bytes <= known->load()) {
    return cudaSuccess;
  }
  TIDEGATE_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (known != nullptr) {
    known->store(bytes);
  }
  return cudaSuccess;
}

cudaError_t compiled_for(const void* kernel, DeviceCounts* known, int* version) {
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const bool has_place = device < DeviceCounts::kDevices;
  *version = has_place ? known->of_device[device].load() : 0;
  if (*version == 0) {
    cudaFuncAttributes attributes;
    TIDEGATE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, kernel));
    *version = attributes.ptxVersion;
    if (has_place) {
      known->of_device[device].store(*version);
    }
  }
  return cudaSuccess;
}

}  // namespace tidegate::kernels
