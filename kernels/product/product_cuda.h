#pragma once

#include <cuda_runtime_api.h>

#include "kernels/product/product.h"

namespace tidegate::kernels::product {

/// The most rows that a fused product has. More than kPortableFusedRows need compute
/// capability 9.0.
constexpr int64_t kPortableFusedRows = 16, kMostFusedRows = 64;
/// More rows than these take the kernel of the batch product, where it takes them.
constexpr int64_t kFewFusedRows = 5;

/// Whether fused_product_cuda takes these params on the current device: 16-bit numbers in packs of
/// 16 bytes, up to kMostFusedRows rows that fit a block's shared memory beside the weights under
/// way.
[[nodiscard]] cudaError_t fused_product_fits(const FusedProductParams& params, bool* fits);
/// How many rows fused_product_cuda takes on the current device.
[[nodiscard]] cudaError_t most_fused_rows(int64_t* rows);

/// Bound by reading w, for a few rows. A row of y has the same bits whatever the other rows are,
/// and however many up to kFewFusedRows, and however many above.
/// The weights (w, the bias, those of the norm) must not be what the kernels right before write:
/// they are read while these still run.
[[nodiscard]] cudaError_t fused_product_cuda(const FusedProductParams& params, cudaStream_t stream);

// ---- What fused_product_cuda chooses for more than kFewFusedRows ----

[[nodiscard]] cudaError_t batch_product_runs(bool* runs);
[[nodiscard]] cudaError_t batch_product_fits(const FusedProductParams& params, bool* fits);
[[nodiscard]] cudaError_t batch_product_cuda(const FusedProductParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::product
