#pragma once

// A step of HGRN's recurrence with the norm and gate after it, on CUDA devices.

#include <cuda_runtime_api.h>

#include "kernels/norm/norm.h"
#include "kernels/product/product.h"
#include "kernels/scan/scan.h"

namespace tidegate::kernels::scan {

/// One token of each sequence: h, rounded to its dtype as the step's own kernel leaves it, and of
/// its row y = norm(h) with its gate, as norm::NormParams has it; h itself goes nowhere.
struct HgruTokenParams {
  HgruParams step;  // one token; no h
  norm::NormKind norm_kind = norm::NormKind::kRms;
  double eps = 0;
  // [D or 2D] in c.dtype, or null.
  const void* norm_weight = nullptr;
  const void* norm_bias = nullptr;
  TimeSeries gate;  // [B, 1, D or 2D] in c.dtype; no data: none
  norm::Activation gate_activation = norm::Activation::kSilu;
  bool gate_first = false;
  TimeSeries y;  // [B, 1, D or 2D] in c.dtype
  /// Whether no kernel that may still run writes h0: then it is read before the kernel before has
  /// ended.
  bool h0_is_settled = false;
};

/// 16-bit data in rows of packs of four, states, up to 4096 channels.
bool hgru_token_fits(const HgruTokenParams& params);

/// Bound by the way of a token through it. gamma, theta and what the norm has must not be what the
/// kernels right before write.
[[nodiscard]] cudaError_t hgru_token_cuda(const HgruTokenParams& params, cudaStream_t stream);

/// HGRN's step and, in the same kernel, the product before it, for a batch: `product` makes c, f
/// and the gate, one behind the other, with the norm in front, but no y; `token` has a gate after
/// an RMS norm, and neither c, f nor the gate's numbers. y is h times the norm's weight and its
/// gate, not yet divided by what the norm divides by: for that, `squares` gets sums over channels
/// of h's squares, as product::FusedProductParams has them: 64 rows for each of `hgru_square_parts`
/// parts.
struct HgruTokenProductParams {
  product::FusedProductParams product;
  HgruTokenParams token;
  float* squares = nullptr;
};

/// How many parts there are of so many channels (D).
int64_t hgru_square_parts(int64_t channels);

/// Whether it takes them on the current device (compute capability 9.0): bf16, more rows than
/// product::kFewFusedRows, D in whole tiles of 16, an RMS norm in front.
[[nodiscard]] cudaError_t hgru_token_product_fits(const HgruTokenProductParams& params, bool* fits);
[[nodiscard]] cudaError_t hgru_token_product(const HgruTokenProductParams& params,
                                             cudaStream_t stream);

}  // namespace tidegate::kernels::scan
