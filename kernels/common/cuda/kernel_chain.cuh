#pragma once

// Chains of short kernels, each launched early (launch.cuh), as a step of decoding is, or copies
// and a scan before attention: what a kernel reads of constants is on its way while the kernels
// before it still run.

#include "kernels/common/cuda/launch.cuh"

namespace tidegate::kernels {

/// Lets the next kernel begin as soon as all blocks of this one have come here, where it was
/// launched early: as many of its blocks as there is room for beside these. What it does before it
/// waits then overlaps with this kernel. If this one comes here after its own wait, whatever is
/// older has ended by then; so a next kernel that needs nothing of this one, and writes nothing
/// that it touches, may do all of its work first and wait at its end. Not after an empty grid: it
/// would follow an older kernel, which nobody has waited for.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Whether kernels are launched early and blocks make clusters: whether code for compute capability
/// 9.0 of the kernel is what runs.
template <auto* kKernel>
cudaError_t can_cluster(bool* can) {
  int version = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(compiled_for<kKernel>(&version));
  *can = version >= 90;
  return cudaSuccess;
}

/// launch_early() in clusters of kBlocks (more than one only where can_cluster() says so), for
/// kernels of a chain. A multiprocessor's memory is divided into shared memory and cache anew only
/// when it is idle: so that a kernel finds room beside the one before, all have as much shared
/// memory as there is, whatever they use of it.
template <auto* kKernel, int kBlocks = 1, class... Work>
cudaError_t launch_in_chain(dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                            const Work&... work) {
  if (is_empty(grid)) {
    return cudaSuccess;
  }
  bool is_early = false;
  TIDEGATE_RETURN_IF_CUDA_ERROR(can_cluster<kKernel>(&is_early));
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (is_early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
#if CUDART_VERSION >= 12080
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
#endif
  }
  if (kBlocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = kBlocks;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kKernel, work...);
}

}  // namespace tidegate::kernels
