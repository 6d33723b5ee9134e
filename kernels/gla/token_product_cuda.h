#pragma once

// A step of decoding with the product before it, on CUDA devices.

#include <cuda_runtime_api.h>

#include "kernels/gla/gla.h"
#include "kernels/product/product.h"

namespace tidegate::kernels::gla {

/// One token of HGRN2 with the product that makes its q, f and v: `product` is that of all heads'
/// q, then their f, then their v, with what it has in front, but no y, GLU or residual; `step` has
/// one token, kLogit, the states, gamma and o, and neither q, gate nor v.
struct TokenProductParams {
  product::FusedProductParams product;
  GlaParams step;
};

/// So many rows it takes at most: more take less time by two kernels.
constexpr int64_t kMostTokenRows = 2;

/// Whether it takes them on the current device (compute capability 9.0): 16-bit data, K = V = 64
/// or 128, rows in packs, and shared memory for the rows of x.
[[nodiscard]] cudaError_t token_product_fits(const TokenProductParams& params, bool* fits);
/// What is rounded between the product and the step is rounded here too. The weights must not be
/// what the kernels right before write.
[[nodiscard]] cudaError_t token_product(const TokenProductParams& params, cudaStream_t stream);

}  // namespace tidegate::kernels::gla
