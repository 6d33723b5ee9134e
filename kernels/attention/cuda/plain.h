#pragma once

// The kernels that take anything: any dtype, D up to 256, a warp a row. Sums in the state's type.
// They drop no keys where `prune` would allow it.

#include "kernels/attention/forgetting_attention_cuda.h"

namespace tidegate::kernels::attention {

/// Fills workspace_bytes.
void plain_attention_forward_plan(const ForgettingAttentionParams& params,
                                  ForgettingAttentionPlan* plan);
void plain_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                   ForgettingAttentionPlan* plan);

cudaError_t plain_attention_forward(const ForgettingAttentionParams& params, cudaStream_t stream);
/// dq from one walk over keys, dk and dv from one over queries: no atomics.
cudaError_t plain_attention_backward(const ForgettingAttentionBackwardParams& params,
                                     cudaStream_t stream);

}  // namespace tidegate::kernels::attention
