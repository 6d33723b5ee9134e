#pragma once

#include <cuda_runtime_api.h>

#include "kernels/optim/adamw.h"

namespace tidegate::kernels::optim {

/// One pass over memory: reads four and writes three or four numbers a weight.
[[nodiscard]] cudaError_t adamw(const AdamwParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::optim
