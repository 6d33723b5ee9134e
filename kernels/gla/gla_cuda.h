#pragma once

// Gated linear attention on CUDA devices. See gla.h for what is computed.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes
// (and, backward, plan.partials rows of partial sums), launch on a stream of that device. Nothing
// here allocates, synchronises or reads device memory on the host, so a launch can be captured in a
// CUDA graph.

#include <cuda_runtime_api.h>

#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

[[nodiscard]] cudaError_t gla_forward_plan(const GlaParams& params, GlaPlan* plan);
[[nodiscard]] cudaError_t gla_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);

[[nodiscard]] cudaError_t gla_forward(const GlaParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t gla_backward(const GlaBackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::gla
