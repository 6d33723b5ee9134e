#pragma once

// The backward pass on tensor cores, in chunks of 64 tokens: its plan and launch
// (tensor_backward.cu), and what the units that hold the kernels (tensor_backward_unit.cuh) offer
// them.

#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

/// Whether the tensor-core kernels take these params on the current device: 16-bit data, K and V
/// multiples of 16 up to 256, rows aligned to 16 bytes, and room in shared memory.
cudaError_t tensor_backward_fits(const GlaBackwardParams& params, bool* fits);

cudaError_t tensor_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);
cudaError_t tensor_backward(const GlaBackwardParams& params, cudaStream_t stream);

struct StatePass;
struct ChunkBackward;

/// The kernels of one data type, compiled as a unit (units.cmake), in the order of their launches.
template <class T>
struct TensorBackwardUnit {
  static cudaError_t make_factors(const ChunkBackward& work, cudaStream_t stream);
  static cudaError_t scan_states(const StatePass& pass, cudaStream_t stream);
  static cudaError_t chunks(const ChunkBackward& work, cudaStream_t stream);
};

}  // namespace tidegate::kernels::gla
