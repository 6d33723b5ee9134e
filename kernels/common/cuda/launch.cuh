#pragma once

// Launches. Whether a grid has no blocks, or too many, is looked at here and nowhere else.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "kernels/common/cuda/device.h"

namespace tidegate::kernels {

inline bool is_empty(dim3 grid) { return grid.x == 0 || grid.y == 0 || grid.z == 0; }

/// Launches the kernel, or nothing where the grid has no blocks: CUDA would refuse that.
template <class... Work>
cudaError_t launch_unless_empty(void (*kernel)(Work...), dim3 grid, dim3 block, int shared_bytes,
                                cudaStream_t stream, const Work&... work) {
  if (is_empty(grid)) {
    return cudaSuccess;
  }
  kernel<<<grid, block, static_cast<size_t>(shared_bytes), stream>>>(work...);
  return cudaGetLastError();
}

/// Launches the kernel over a grid of one dimension, or nothing where that has no blocks;
/// cudaErrorInvalidConfiguration where it has more than one launch can have.
template <class... Work>
cudaError_t launch_unless_empty(void (*kernel)(Work...), int64_t blocks, dim3 block,
                                int shared_bytes, cudaStream_t stream, const Work&... work) {
  if (blocks > std::numeric_limits<int>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  return launch_unless_empty(kernel, dim3(static_cast<unsigned>(blocks)), block, shared_bytes,
                             stream, work...);
}

/// Waits until all kernels before have ended and what they wrote can be seen. Every thread of a
/// kernel launched early must come here before it reads or writes device memory.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel whose threads all call wait_for_kernels_before: its blocks take their places
/// while the last ones of the kernel before are still at work (programmatic dependent launch, from
/// compute capability 9.0 on; elsewhere it begins when the one before has ended). For small kernels
/// that follow large ones: their launch costs no time then. Nothing where the grid has no blocks.
template <class... Work>
cudaError_t launch_early(void (*kernel)(Work...), dim3 grid, dim3 block, int shared_bytes,
                         cudaStream_t stream, const Work&... work) {
  if (is_empty(grid)) {
    return cudaSuccess;
  }
  DeviceLimits limits;
  TIDEGATE_RETURN_IF_CUDA_ERROR(read_device_limits(&limits));
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = limits.major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, work...);
}

}  // namespace tidegate::kernels
