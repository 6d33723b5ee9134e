#pragma once

// Decoding on CUDA devices: parts of a sequence's cache are read by blocks of their own and put
// together by a second kernel.

#include "kernels/attention/forgetting_attention_cuda.h"

namespace tidegate::kernels::attention {

/// Fills splits and workspace_bytes.
cudaError_t attention_step_plan(const ForgettingAttentionStepParams& params,
                                ForgettingAttentionPlan* plan);
cudaError_t attention_step(const ForgettingAttentionStepParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::attention
