#pragma once

// The backward pass on tensor cores (tensor_backward.cuh, tensor_query_gradient.cuh): its plan and
// launches, and its units, one a dtype and class of head dimensions.

#include "kernels/attention/cuda/tensor_forward.h"
#include "kernels/common/cuda/device.h"

namespace tidegate::kernels::attention {

/// Whether the tensor-core kernels take these params on the current device: what the forward pass
/// asks for, the same of the gradients, and enough shared memory.
cudaError_t tensor_backward_fits(const ForgettingAttentionBackwardParams& params, bool* fits);

cudaError_t tensor_backward_plan(const ForgettingAttentionBackwardParams& params,
                                 ForgettingAttentionPlan* plan);
cudaError_t tensor_backward(const ForgettingAttentionBackwardParams& params, cudaStream_t stream);

template <class Scan>
struct GateChunks;  // gate_sums.cuh, for units that nvcc compiles
template <class Real>
struct GateGradientScan;
using GateGradientChunks = GateChunks<GateGradientScan<float>>;

template <class Data, HeadDims kDims>
struct AttentionBackwardUnit {
  /// With work.dq_sums: all gradients but the gates', dq by atomics. Without: the same, dq by a
  /// kernel of its own. Then adds up the chunks of `gates`.
  static cudaError_t launch(TensorAttention work, const GateGradientChunks& gates,
                            const DeviceLimits& limits, cudaStream_t stream);
};

}  // namespace tidegate::kernels::attention
