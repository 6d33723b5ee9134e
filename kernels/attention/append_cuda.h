#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/append.h"

namespace tidegate::kernels::attention {

/// One launch; where a cache is full, nothing is written to it.
[[nodiscard]] cudaError_t attention_append_cuda(const AttentionAppendParams& params,
                                                cudaStream_t stream);

}  // namespace tidegate::kernels::attention
