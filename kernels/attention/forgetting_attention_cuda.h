#pragma once

// Forgetting attention on CUDA devices. See forgetting_attention.h for what is computed.
//
// Use: fill the tensors in, ask for a plan on the current device, allocate plan.workspace_bytes,
// launch on a stream of that device. Nothing here allocates, synchronises or reads device memory on
// the host, so a launch can be captured in a CUDA graph.
//
// The entry points come first. Below them is what they choose among, for cuda/ alone.

#include <cuda_runtime_api.h>

#include "kernels/attention/forgetting_attention.h"

namespace tidegate::kernels::attention {

// ---- The entry points ----

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

// ---- The paths that the entry points choose among ----

// Tensor cores: portable kernels (forward/, backward/), and those for compute capability 9.0
// (hopper/), which take some of the same params. The plans are cudaErrorNotSupported where none of
// these kernels takes the params on the current device: they take 16-bit data, D a multiple of 8
// from 16 on, rows of all tensors of D elements aligned to 16 bytes, a window below 2^31 - 1, at
// most that many blocks; and need enough shared memory for a tile. A forward pass over batch rows
// of up to kSingleTileTime tokens (packed: all sequences together) takes rows of any D up to 63,
// wherever they begin.

/// Whether the tensor-core kernels for aligned rows take the inputs and o.
bool tensor_cores_take(const ForgettingAttentionParams& params);
/// Fill path, tile and workspace_bytes.
cudaError_t tensor_forward_plan(const ForgettingAttentionParams& params,
                                ForgettingAttentionPlan* plan);
cudaError_t tensor_backward_plan(const ForgettingAttentionBackwardParams& params,
                                 ForgettingAttentionPlan* plan);
cudaError_t tensor_forward(const ForgettingAttentionParams& params, cudaStream_t stream);
cudaError_t tensor_backward(const ForgettingAttentionBackwardParams& params, cudaStream_t stream);

// The kernels that take anything (plain.cu): any dtype, D up to 256, a warp a row. Sums in the
// state's type. They drop no keys where `prune` would allow it.

/// Fill path and workspace_bytes.
void plain_attention_forward_plan(const ForgettingAttentionParams& params,
                                  ForgettingAttentionPlan* plan);
void plain_attention_backward_plan(const ForgettingAttentionBackwardParams& params,
                                   ForgettingAttentionPlan* plan);
cudaError_t plain_attention_forward(const ForgettingAttentionParams& params, cudaStream_t stream);
/// dq from one pass over keys, dk and dv from one over queries: no atomics.
cudaError_t plain_attention_backward(const ForgettingAttentionBackwardParams& params,
                                     cudaStream_t stream);

// Decoding (decode/): splits of a sequence's cache are read by blocks of their own and put together
// by a second kernel.

/// Fills path, splits and workspace_bytes.
cudaError_t attention_step_plan(const ForgettingAttentionStepParams& params,
                                ForgettingAttentionPlan* plan);
cudaError_t attention_step(const ForgettingAttentionStepParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::attention
