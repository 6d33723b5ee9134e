#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"

namespace tidegate::kernels::norm {

/// One pass over memory for rows of up to 4096 channels, a multiple of eight, that begin at
/// multiples of 16 bytes; otherwise rows are read again for each sum, from the caches while they
/// fit. Any real dtype.
[[nodiscard]] cudaError_t norm_forward(const NormParams& params, cudaStream_t stream);

[[nodiscard]] cudaError_t norm_backward_plan(const NormBackwardParams& params,
                                             NormBackwardPlan* plan);
[[nodiscard]] cudaError_t norm_backward(const NormBackwardParams& params, cudaStream_t stream);

// ---- The units, one a dtype of the data (cuda/units.cmake) ----

template <class Data, class Stream>
struct NormKernels {
  /// `fits`: whether a grid of whole heads' weights fits on the chip; otherwise nothing is
  /// launched.
  static cudaError_t forward(const NormParams& params, cudaStream_t stream, bool* fits);
  /// The grid's blocks, zero where none fits, and the rows that each has side by side.
  static cudaError_t backward_grid(const NormBackwardParams& params, int64_t* blocks, int* slots);
  static cudaError_t backward(const NormBackwardParams& params, cudaStream_t stream);
};

}  // namespace tidegate::kernels::norm
