#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm/glu.h"

namespace tidegate::kernels::norm {

/// One pass over memory each way, in any real dtype.
[[nodiscard]] cudaError_t glu_forward(const GluParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t glu_backward(const GluBackwardParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::norm
