#pragma once

// What the host does before a launch, and the launch: from a dtype that is known when the program
// runs to a type that is known when it is compiled, whether tensors can be accessed in packs, and
// whether a grid has no blocks, or too many, which is looked at here and nowhere else.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <cstdint>
#include <limits>

#include "kernels/common/cuda/device.h"
#include "kernels/common/cuda/numeric.cuh"
#include "kernels/common/dtype.h"
#include "kernels/common/time_series.h"

namespace tidegate::kernels {

// ---- From a dtype to a type ----
//
// Each function calls visit.template operator()<T>(), which returns a cudaError_t, with the CUDA
// type T of `dtype`. A dtype for which it has no case is cudaErrorInvalidValue.

/// bf16 and f16, the types of the tensor-core kernels.
template <class Visit>
cudaError_t dispatch_16_bit(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit.template operator()<__nv_bfloat16>();
    case DType::kFloat16:
      return visit.template operator()<__half>();
    default:
      return cudaErrorInvalidValue;
  }
}

/// All real types.
template <class Visit>
cudaError_t dispatch_real(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit.template operator()<float>();
    case DType::kFloat64:
      return visit.template operator()<double>();
    default:
      return dispatch_16_bit(dtype, visit);
  }
}

/// All real and complex types.
template <class Visit>
cudaError_t dispatch_number(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kComplex64:
      return visit.template operator()<Complex<float>>();
    case DType::kComplex128:
      return visit.template operator()<Complex<double>>();
    default:
      return dispatch_real(dtype, visit);
  }
}

/// The type of the state beside real data of `dtype`: double, or float for everything narrower.
template <class Visit>
cudaError_t dispatch_state(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit.template operator()<double>();
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16:
      return visit.template operator()<float>();
    default:
      return cudaErrorInvalidValue;
  }
}

// ---- Packs of so many bytes ----

/// Whether an address is a multiple of `bytes`. Null is.
inline bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

/// Whether every row of a tensor begins at a multiple of `bytes`, a multiple of the element's size.
inline bool rows_aligned(const TimeSeries& t, int64_t bytes) {
  const int64_t elements = bytes / element_size(t.dtype);
  return is_aligned(t.data, bytes) && t.stride_b % elements == 0 && t.stride_t % elements == 0;
}
inline bool rows_aligned(const HeadSeries& t, int64_t bytes) {
  const int64_t elements = bytes / element_size(t.dtype);
  return is_aligned(t.data, bytes) && t.stride_b % elements == 0 && t.stride_t % elements == 0 &&
         t.stride_h % elements == 0;
}

// ---- Launches ----

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

/// Waits until all kernels before have ended and what they wrote can be seen. Before it, a thread
/// of a kernel launched early may read only what no running kernel writes, and write only what no
/// running kernel reads or writes. Every thread comes here before it ends: the end of a kernel
/// means that all before it have ended, and later kernels rely on that.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel whose threads all call wait_for_kernels_before, at their start or, beside a
/// kernel that lets it begin (kernel_chain.cuh), at their end: its blocks take their places while
/// the last ones of the kernel before are still at work (programmatic dependent launch). That is
/// for code of compute capability 9.0, which knows how to wait; other code begins when the kernel
/// before has ended, on whatever chip it runs. For small kernels that follow large ones, and large
/// ones that follow small ones: a launch costs no time then. Nothing where the grid has no blocks.
template <auto* kKernel, class... Work>
cudaError_t launch_early(dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                         const Work&... work) {
  if (is_empty(grid)) {
    return cudaSuccess;
  }
  int version = 0;
  TIDEGATE_RETURN_IF_CUDA_ERROR(compiled_for<kKernel>(&version));
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = version >= 90 ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kKernel, work...);
  if (status != cudaSuccess) {
    cudaGetLastError();  // the caller has it: nobody else's next check should find it again
  }
  return status;
}

/// Launches early over a grid of one dimension; cudaErrorInvalidConfiguration where it has more
/// blocks than one launch can have.
template <auto* kKernel, class... Work>
cudaError_t launch_early(int64_t blocks, dim3 block, int shared_bytes, cudaStream_t stream,
                         const Work&... work) {
  if (blocks > std::numeric_limits<int>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  return launch_early<kKernel>(dim3(static_cast<unsigned>(blocks)), block, shared_bytes, stream,
                               work...);
}

}  // namespace tidegate::kernels
