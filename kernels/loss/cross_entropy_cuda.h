#pragma once

#include <cuda_runtime_api.h>

#include "kernels/loss/cross_entropy.h"

namespace tidegate::kernels::loss {

/// Any real dtype. One block has one row. With a gradient the row waits in shared memory between
/// its two passes, as far as it fits (56,000 16-bit logits on a chip with 227 KB); the rest is read
/// twice, the second time mostly from the second-level cache.
[[nodiscard]] cudaError_t cross_entropy(const CrossEntropyParams& params, cudaStream_t stream);

/// Sums in double, in an order that depends on the number of rows alone.
[[nodiscard]] cudaError_t loss_sum(const LossSumParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::loss
