// Initialisers of forget-gate biases ("Towards Understanding Gated Linear Recurrent Neural
// Networks", sections 3 and 4).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

/// Each writes p, the bias of a gate that multiplies the earlier state (logits): drawn in float32
/// from torch's default CPU generator, then cast and copied, the same as tidegate.nn.init in
/// Python. d is the number of gates that the bound of u is taken from; unset = p's elements.
/// Modules that have the option gate_init call these by name.
namespace tidegate::nn::init {

/// p ~ U(-1/sqrt(d), 1/sqrt(d)): gates near one half.
void standard_(at::Tensor p, std::optional<int64_t> d = std::nullopt);

/// p = log u, u ~ U(1, t_max - 1) (arXiv 1804.11188): gates that keep for up to about t_max tokens.
void chrono_(at::Tensor p, int64_t t_max);

/// p = logit u, u ~ U(1/d, 1 - 1/d) (arXiv 1910.09890): gates that are uniform on (0, 1).
void ugi_(at::Tensor p, std::optional<int64_t> d = std::nullopt);

/// p = (alpha + logit u) / tau, u ~ U(1/d, 1 - 1/d): gates near zero and one, the more so the
/// smaller tau; alpha pushes them towards one; alpha = 0, tau = 1 is ugi_. The paper uses it in the
/// first layer.
void gumbel_softmax_(at::Tensor p, std::optional<int64_t> d = std::nullopt, double alpha = 0.0,
                     double tau = 0.5);

}  // namespace tidegate::nn::init
