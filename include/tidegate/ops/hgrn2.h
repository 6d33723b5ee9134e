#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace tidegate {

/// HGRN2's recurrence from pre-activations (arXiv 2404.07904, eq. 3), for every head:
///
///   lambda_t = gamma + (1 - gamma) * sigmoid(f_t),   k_t = 1 - lambda_t
///   S_t = diag(lambda_t) S_{t-1} + k_t act_v(v_t)^T,  o_t = scale * act_q(q_t)^T S_t,  S_{-1} = h0
///
/// q:     [B, T, H, K]; float32, float64, bfloat16 or float16. K and V from 1 to 512.
/// f:     [B, T, H, K] logits of the forget gate (before the sigmoid); q's dtype, or float32 for
///        16-bit q.
/// v:     [B, T, H, V] in q's dtype.
/// gamma: [H, K] lower bounds of the forget gate, linear, in [0, 1); zero when absent. float32 or
///        q's dtype (float64 for float64).
/// h0:    [N, H, K, V]; zero when absent; float32 (float64 for float64) or q's dtype.
/// scale: of the output.
/// q_activation, v_activation: "none", "silu" or "sigmoid", applied to q and v as they are read.
/// reverse, cu_seqlens: as in gated_linear_attention.
///
/// Returns (o, final state): o [B, T, H, V] in q's dtype, contiguous; the state [N, H, K, V] in
/// float32 (float64 for float64), which can be passed back as h0. At T = 0 it is a copy of h0.
///
/// q, f and v may be slices of one projection [B, T, 3 * H * K]: any strides with a unit last one
/// are read in place, as far as gated_linear_attention reads them so. Activations, keys and decays
/// are made as q, f and v are read, and training keeps none of them; on CUDA a workspace may hold
/// what chunks share while a call runs: queries, keys and decays multiplied up, and states. Exact
/// for any gate. Accumulates in float32 (float64 for float64). Bitwise deterministic.
/// Differentiable once in q, f, v, gamma and h0 through both results; training keeps the inputs
/// only and computes the states again. Throws c10::Error, naming op, argument, expected and given,
/// for shapes, dtypes, devices or activations other than these; with TIDEGATE_DEBUG=1 also for
/// gamma outside [0, 1) and for cu_seqlens on a GPU whose values do not fit. Cost O(B T H K V).
std::tuple<at::Tensor, at::Tensor> hgrn2(
    const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
    const std::optional<at::Tensor>& gamma = std::nullopt,
    const std::optional<at::Tensor>& h0 = std::nullopt, double scale = 1.0,
    std::string_view q_activation = "none", std::string_view v_activation = "none",
    bool reverse = false, const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// hgrn2 of the three parts of one projection, qfv [B, T, 3, H, K] in the order q, f, v, so that
/// V = K: whose gradient comes as one tensor, without a copy of three. All else is as above.
std::tuple<at::Tensor, at::Tensor> hgrn2_qfv(
    const at::Tensor& qfv, const std::optional<at::Tensor>& gamma = std::nullopt,
    const std::optional<at::Tensor>& h0 = std::nullopt, double scale = 1.0,
    std::string_view q_activation = "none", std::string_view v_activation = "none",
    bool reverse = false, const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of hgrn2, for decoding.
///
/// q, f [B, H, K]; v [B, H, V]; gamma [H, K]; state [B, H, K, V] as hgrn2 returns it, updated in
/// place (by a copy where it has another dtype). Returns o [B, H, V]. Has no gradient: throws
/// c10::Error where an argument requires one and gradients are recorded. Cost O(B H K V).
at::Tensor hgrn2_step(const at::Tensor& q, const at::Tensor& f, const at::Tensor& v,
                      const std::optional<at::Tensor>& gamma, at::Tensor state, double scale = 1.0,
                      std::string_view q_activation = "none",
                      std::string_view v_activation = "none");

}  // namespace tidegate
