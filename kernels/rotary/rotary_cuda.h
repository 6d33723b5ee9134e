#pragma once

#include <cuda_runtime_api.h>

#include "kernels/rotary/rotary.h"

namespace tidegate::kernels::rotary {

/// Reads x and writes y once, in any real dtype; angles are shared by four heads in registers. Any
/// shape.
cudaError_t rotary(const RotaryParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::rotary
