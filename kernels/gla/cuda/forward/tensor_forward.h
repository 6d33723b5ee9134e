#pragma once

// The forward pass on tensor cores (tensor_forward.cuh): its plan and launch, and one unit a dtype
// and kind of gate.

#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

struct TensorForward;

/// Whether the tensor-core kernel takes these params: 16-bit data, K and V multiples of 16 up to
/// 256, rows aligned to 16 bytes.
bool tensor_forward_fits(const GlaParams& params);

cudaError_t tensor_forward_plan(const GlaParams& params, GlaPlan* plan);
cudaError_t tensor_forward(const GlaParams& params, cudaStream_t stream);

/// One kernel of the unit; `maps`: the maps of segments instead of outputs.
template <class Data, GateKind kKind>
struct TensorForwardUnit {
  static cudaError_t launch(const TensorForward& work, bool maps, int64_t blocks,
                            cudaStream_t stream);
};

}  // namespace tidegate::kernels::gla
