// What device.h keeps out of every unit, for the seconds that <mutex> takes to compile.

#include "kernels/common/cuda/device.h"

#include <mutex>

namespace tidegate::kernels {

cudaError_t allow_shared_bytes(const void* kernel, AllowedSharedBytes* allowed, int bytes) {
  static std::mutex telling;
  int device = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  SharedCount* const known =
      device < AllowedSharedBytes::kDevices ? &allowed->of_device[device] : nullptr;
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

}  // namespace tidegate::kernels
