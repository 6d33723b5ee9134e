#pragma once

// The kernels that take anything: any dtype, K and V up to 512, token by token.

#include "kernels/gla/gla_cuda.h"

namespace tidegate::kernels::gla {

/// A forward scan of at most so many tokens goes by decode/step.cuh, where the plan is plain.
constexpr int kStepTokens = 2;

/// At most kStepTokens tokens go by decode/step.cuh.
cudaError_t gla_plain_forward(const GlaParams& params, cudaStream_t stream);

/// Fills partials and workspace_bytes.
cudaError_t gla_plain_backward_plan(const GlaBackwardParams& params, GlaPlan* plan);
cudaError_t gla_plain_backward(const GlaBackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::gla
