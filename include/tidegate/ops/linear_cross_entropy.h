#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace tidegate {

/// The cross-entropy of a linear layer's logits z = x weight^T + bias, of which a chunk of rows
/// exists at a time; with V classes, label y and e = label_smoothing
///
///   lse = log sum_j exp(z_j),  loss = lse - (1 - e) z_y - e / V sum_j z_j + z_loss lse^2
///
/// (label smoothing: arXiv 1512.00567, section 7; z-loss: arXiv 2204.02311, section 5).
///
/// x: [..., D], at least two-dimensional; float32, float64, bfloat16, float16. weight: [V, D], x's
/// dtype or float32; where it is not x's, a copy in x's dtype is made once a call. bias: [V], x's
/// dtype or float32, or none. labels: int32 or int64 of x's shape without D, in [0, V) or
/// ignore_index; one elsewhere is an error on the CPU, and on CUDA makes the loss NaN.
/// reduction: "mean" over the labels that are not ignored (zero when there is none), "sum", or
/// "none", with zeros where the label is ignored.
///
/// Logits are rounded to x's dtype on CUDA (on the CPU 16-bit data are computed in float32), sums
/// and the loss are float32 (float64 for float64). Under autocast x goes to autocast's type, a
/// float32 weight's gradient stays float32.
///
/// Returns the loss, float32 (float64 for float64): [] or labels' shape. Gradients flow to x,
/// weight and bias, once. For "mean" and "sum" the forward pass makes them, while a chunk's logits
/// are there, and the backward pass scales them: 6 N D V floating-point operations in all for N
/// labels, 2 N D V where no gradient is asked for. "none" makes its logits anew in the backward
/// pass: 8 N D V. A chunk has at most 512 MiB (CUDA) or 128 MiB (CPU). Throws c10::Error for other
/// dtypes, devices, shapes, and for an option out of its range.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& labels,
                                const std::optional<at::Tensor>& bias = std::nullopt,
                                int64_t ignore_index = -100, double label_smoothing = 0.0,
                                double z_loss = 0.0, std::string_view reduction = "mean");

}  // namespace tidegate
