#pragma once

// Nonlinear recurrences on CUDA devices. See rnn.h for what each one computes.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes,
// launch on a stream of that device. Nothing here allocates, synchronises or reads device memory on
// the host, so a launch can be captured in a CUDA graph.

#include <cuda_runtime_api.h>

#include "kernels/rnn/rnn.h"

namespace tidegate::kernels::rnn {

[[nodiscard]] cudaError_t gated_rnn_forward_plan(const GatedRnnParams& params, GatedRnnPlan* plan);
[[nodiscard]] cudaError_t gated_rnn_backward_plan(const GatedRnnBackwardParams& params,
                                                  GatedRnnPlan* plan);

[[nodiscard]] cudaError_t gated_rnn_forward(const GatedRnnParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t gated_rnn_backward(const GatedRnnBackwardParams& params,
                                             cudaStream_t stream);

}  // namespace tidegate::kernels::rnn
