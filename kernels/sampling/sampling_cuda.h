#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sampling/sampling.h"

namespace tidegate::kernels::sampling {

/// Bound by latency at a few rows, where it is a small part of the step before it.
[[nodiscard]] cudaError_t sample_cuda(const SamplingParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::sampling
