#pragma once

#include <cuda_runtime_api.h>

#include "kernels/product/product.h"

namespace tidegate::kernels::product {

/// Whether the kernel takes them: up to kFewRows rows, in packs of 16 bytes.
bool few_rows_fit(const FewRowsParams& params);

/// Bound by reading w, which begins before the kernel before has ended where the device can.
[[nodiscard]] cudaError_t few_rows_cuda(const FewRowsParams& params, cudaStream_t stream);

/// Whether fused_product_cuda takes them on the current device: 16-bit numbers in packs of 16
/// bytes, up to kMostFusedRows rows that fit a block's shared memory beside the weights under way.
constexpr int64_t kMostFusedRows = 16;
[[nodiscard]] cudaError_t fused_product_fits(const FusedProductParams& params, bool* fits);

/// Bound by reading w. A row of y has the same bits whatever the other rows are, and however many.
/// The weights (w, the bias, those of the norm) must not be what the kernels right before write:
/// they are read while these still run.
[[nodiscard]] cudaError_t fused_product_cuda(const FusedProductParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::product
