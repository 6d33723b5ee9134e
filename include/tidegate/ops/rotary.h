#pragma once

#include <ATen/core/Tensor.h>

namespace tidegate {

/// Rotary positions (arXiv 2104.09864): channels i < D/2 and i + D/2 of every head turned by an
/// angle,
///
///   y_i = x_i cos_i - x_{i+D/2} sin_i,   y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i
///
/// x: [B, T, H, D] with D even; float32, float64, bfloat16, float16; any strides with a unit last
/// one are read in place. cos, sin: [1, T, D/2] or [B, T, D/2], float32 (float64 for float64), of
/// the angles in radians; constants: no gradient flows to them. inverse: turned by the angles'
/// negatives, which is also the gradient.
///
/// Returns y [B, T, H, D] in x's dtype, rounded once. Throws c10::Error for other dtypes, devices
/// and shapes. Cost O(BTHD), one pass that reads x and writes y.
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool inverse = false);

}  // namespace tidegate
