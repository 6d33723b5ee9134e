#pragma once

#include <cuda_runtime_api.h>

#include "kernels/product/product.h"

namespace tidegate::kernels::product {

/// Whether the kernel takes them: up to kFewRows rows, in packs of 16 bytes.
bool few_rows_fit(const FewRowsParams& params);

/// Bound by reading w, which begins before the kernel before has ended where the device can.
[[nodiscard]] cudaError_t few_rows_cuda(const FewRowsParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::product
