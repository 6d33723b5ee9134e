#pragma once

// A launch over a grid that may have no blocks.

#include <cuda_runtime_api.h>

namespace tidegate::kernels {

/// Launches the kernel, or nothing where a grid has no blocks: CUDA would refuse that.
template <class... Work>
cudaError_t launch_unless_empty(void (*kernel)(Work...), dim3 grid, int threads, int shared_bytes,
                                cudaStream_t stream, const Work&... work) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return cudaSuccess;
  }
  kernel<<<grid, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), stream>>>(
      work...);
  return cudaGetLastError();
}

}  // namespace tidegate::kernels
