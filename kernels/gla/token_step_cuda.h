#pragma once

// A step of decoding of 16-bit data, on CUDA devices: what gla_forward chooses for one token of
// each sequence.

#include <cuda_runtime_api.h>

#include "kernels/gla/gla.h"

namespace tidegate::kernels::gla {

/// One token of each sequence, 16-bit data, rows in packs.
bool token_step_takes(const GlaParams& params);

/// h0_is_settled: no kernel that may still run writes the states, which are then read before the
/// kernel before has ended.
[[nodiscard]] cudaError_t token_step(const GlaParams& params, bool h0_is_settled,
                                     cudaStream_t stream);

}  // namespace tidegate::kernels::gla
