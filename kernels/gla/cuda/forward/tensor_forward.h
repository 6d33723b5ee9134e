#pragma once

// The forward pass on tensor cores: its plan and launch (tensor_forward.cu), and what the units
// that hold the kernels (tensor_forward.cuh) offer them.

#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

struct TensorForward;

/// Whether the tensor-core kernel takes these params: 16-bit data, K and V multiples of 16 up to
/// 256, rows aligned to 16 bytes.
bool tensor_forward_fits(const GlaParams& params);

cudaError_t tensor_forward_plan(const GlaParams& params, GlaPlan* plan);
cudaError_t tensor_forward(const GlaParams& params, cudaStream_t stream);

/// The kernels of one data type and kind of gate, compiled as a unit (units.cmake).
template <class Data, GateKind kKind>
struct TensorForwardUnit {
  /// Launches one of them for one key tile; `maps`: for the maps of segments instead of outputs.
  static cudaError_t launch(const TensorForward& work, bool maps, cudaStream_t stream);
};

}  // namespace tidegate::kernels::gla
