#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tidegate {

/// The gated linear unit's product (arXiv 2002.05202), from the one projection that makes both:
///
///   y = act(gate) * value,   x = [gate | value]
///
/// x: [..., 2F]; float32, float64, bfloat16, float16; any strides with a unit last one are read in
/// place where there are up to three dimensions before it. activation: "silu", "sigmoid" or "none".
///
/// Returns y [..., F] in x's dtype, rounded once. The gradient flows to x, once; the backward pass
/// keeps x alone and computes the rest again. Throws c10::Error for other dtypes, devices and
/// shapes. Cost O(numel): reads x, writes y; backward reads x and dy, writes dx.
at::Tensor glu(const at::Tensor& x, std::string_view activation = "silu");

}  // namespace tidegate
