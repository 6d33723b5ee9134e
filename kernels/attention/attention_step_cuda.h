#pragma once

// A step of decoding over a cache, on CUDA devices, of which the caller knows who writes the cache.

#include <cuda_runtime_api.h>

#include "kernels/attention/forgetting_attention.h"

namespace tidegate::kernels::attention {

/// Does what forgetting_attention_step() does, by the plan that it made. cache_is_settled: no
/// kernel that may still run writes keys, values and gates but those of each sequence's last token,
/// or lengths but to count it; the others are then read before the kernel before has ended.
[[nodiscard]] cudaError_t attention_step(const ForgettingAttentionStepParams& params,
                                         bool cache_is_settled, cudaStream_t stream);

}  // namespace tidegate::kernels::attention
