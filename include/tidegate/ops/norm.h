#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace tidegate {

/// A norm of every row of x, with an optional gate before or after it, in one pass over memory:
///
///   u = x, or act(gate) * x where gate_first
///   y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias     kind "layer" (arXiv 1607.06450)
///   y = u / sqrt(mean(u^2) + eps) * weight + bias              kind "rms" (arXiv 1910.07467)
///   y = act(gate) * y, unless gate_first
///
/// x: [..., D]; float32, float64, bfloat16, float16; any strides with a unit last one are read in
/// place where there are up to three dimensions before it. weight, bias: [D], or [H, D] where x is
/// [..., H, D], each head with its own; both of one shape; in x's dtype, y's or float32. gate: like
/// x; `gate_activation` is "silu" or "sigmoid". eps: 0 or more. dtype: y's; x's own where it is not
/// given (inside autocast: autocast's), or bfloat16 or float16 beside a float32 x without a gate.
///
/// Returns y [..., D]. Computes in float32 (float64 for float64), and the backward pass computes
/// again what it needs of the forward pass. Gradients flow to x, weight, bias and gate, once.
/// Throws c10::Error for other dtypes, devices and shapes. Cost O(numel): reads x and gate, writes
/// y; backward reads these and dy, writes dx and dgate.
at::Tensor norm(const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
                const std::optional<at::Tensor>& bias = std::nullopt,
                const std::optional<at::Tensor>& gate = std::nullopt, std::string_view kind = "rms",
                std::string_view gate_activation = "silu", bool gate_first = false,
                double eps = 1e-5, std::optional<at::ScalarType> dtype = std::nullopt);

/// A residual connection and the norm that follows it, in one pass over memory:
///
///   residual_out = residual + x, rounded to residual's dtype;   y = norm(residual_out)
///
/// x: [..., D] as above. residual: like x, in x's dtype or in float32 (float64 for float64).
/// weight, bias, kind, eps: as above.
///
/// Returns (y in x's dtype, residual_out in residual's). Gradients flow through both to x,
/// residual, weight and bias, once. Inside autocast x goes to autocast's type, and a float32
/// residual stays. Cost: reads x and residual, writes both results; backward reads residual_out and
/// both gradients, writes one gradient (two where the dtypes differ).
std::tuple<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& residual,
                                            const std::optional<at::Tensor>& weight = std::nullopt,
                                            const std::optional<at::Tensor>& bias = std::nullopt,
                                            std::string_view kind = "rms", double eps = 1e-5);

}  // namespace tidegate
