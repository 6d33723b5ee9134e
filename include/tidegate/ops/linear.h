#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace tidegate {

/// y = x weight^T + bias, whose gradients stay in float32 where weight and bias are float32 beside
/// 16-bit x: autograd of a weight that autocast rounds would round its gradient, too.
///
/// x: [..., K]; float32, float64, bfloat16 or float16. weight: [N, K], bias: [N], in x's dtype or
/// in float32. Inside autocast x goes to autocast's type, and what is float32 of weight and bias
/// stays.
///
/// Returns y [..., N] in x's dtype. Gradients flow to x, weight and bias, once; the backward pass
/// keeps x and the weight in x's dtype. Throws c10::Error for other dtypes, devices and shapes.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias = std::nullopt);

/// linear(glu(x, activation), weight, bias), x [..., 2K]: of which the backward pass keeps x alone,
/// and makes the product of the gated linear unit again beside its gradient, in the same pass.
at::Tensor glu_linear(const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias = std::nullopt,
                      std::string_view activation = "silu");

/// linear(norm(x, ...), weight, bias), x [..., K]: of which the backward pass keeps x and the gate,
/// and makes what the norm made again beside its gradient, in the same pass.
///
/// norm_weight, norm_bias, gate and what follows are norm()'s weight, bias, gate, ...; dtype is
/// that of the result, and of what is multiplied by the weight.
at::Tensor norm_linear(const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias = std::nullopt,
                       const std::optional<at::Tensor>& norm_weight = std::nullopt,
                       const std::optional<at::Tensor>& norm_bias = std::nullopt,
                       const std::optional<at::Tensor>& gate = std::nullopt,
                       std::string_view kind = "rms", std::string_view gate_activation = "silu",
                       bool gate_first = false, double eps = 1e-5,
                       std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace tidegate
