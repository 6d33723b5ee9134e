#pragma once

// Forgetting attention on CUDA devices. See forgetting_attention.h for what is computed.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes,
// launch on a stream of that device. Nothing here allocates, synchronises or reads device memory on
// the host, so a launch can be captured in a CUDA graph.

#include <cuda_runtime_api.h>

#include "kernels/attention/forgetting_attention.h"

namespace tidegate::kernels::attention {

[[nodiscard]] cudaError_t forgetting_attention_forward_plan(const ForgettingAttentionParams& params,
                                                            ForgettingAttentionPlan* plan);
[[nodiscard]] cudaError_t forgetting_attention_backward_plan(
    const ForgettingAttentionBackwardParams& params, ForgettingAttentionPlan* plan);
[[nodiscard]] cudaError_t forgetting_attention_step_plan(
    const ForgettingAttentionStepParams& params, ForgettingAttentionPlan* plan);

[[nodiscard]] cudaError_t forgetting_attention_forward(const ForgettingAttentionParams& params,
                                                       cudaStream_t stream);
[[nodiscard]] cudaError_t forgetting_attention_backward(
    const ForgettingAttentionBackwardParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t forgetting_attention_step(const ForgettingAttentionStepParams& params,
                                                    cudaStream_t stream);

}  // namespace tidegate::kernels::attention
