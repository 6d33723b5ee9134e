#pragma once

// Norms of rows of any size, type, and alignment: what the kernels of row_tile.cuh do not take.
// What they read and write is declared here, for norm_cuda.cu.

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"

namespace tidegate::kernels::norm {

cudaError_t plain_forward(const NormParams& params, cudaStream_t stream);

/// Sets partials and workspace_bytes.
void plain_backward_plan(const NormBackwardParams& params, NormBackwardPlan* plan);
cudaError_t plain_backward(const NormBackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::norm
