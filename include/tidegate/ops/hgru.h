#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace tidegate {

/// HGRN's recurrence from pre-activations (arXiv 2311.04823, eq. 2; gamma: section 3.2):
///
///   lambda_t = gamma + (1 - gamma) * sigmoid(f_t)
///   h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * act(c_t),   h_{-1} = h0
///
/// Real when theta is absent. With theta it is complex, and c, h and the states hold their real
/// parts in the first D channels and their imaginary parts in the last D; act works on each.
///
/// c:     [B, T, D], complex [B, T, 2D] = [Re | Im]; float32, float64, bfloat16 or float16.
/// f:     [B, T, D] logits of the forget gate (before the sigmoid); float32 or c's dtype.
/// gamma: [D] lower bounds of the forget gate, linear, in [0, 1); zero when absent; float32 or c's
///        dtype.
/// theta: [D] phase in radians a step; float32 or c's dtype.
/// h0:    [N, D], complex [N, 2D]; zero when absent; float32 or c's dtype.
/// activation: "silu" or "none".
/// reverse: scan each sequence from its last token; h0 enters after the last token and the final
///        state is the first token's.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///        B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to c's device
///        when it is on the CPU (an error while a CUDA graph is captured).
///
/// Returns (h, final state): h in c's shape and dtype, contiguous; the state [N, D] or [N, 2D] in
/// float32 (float64 for float64), which can be passed back as h0. At T = 0 it is a copy of h0.
/// N = B without cu_seqlens.
///
/// Any strides with a unit last stride are read in place; a float32 f beside float64 c is copied to
/// float64. Accumulates in float32 (float64 for float64). Bitwise deterministic. Differentiable
/// once in c, f, gamma, theta and h0 through both results; training keeps the inputs and h. Throws
/// c10::Error, naming op, argument, expected and given, for shapes, dtypes, devices or an
/// activation other than these; with TIDEGATE_DEBUG=1 also for gamma outside [0, 1), theta that is
/// not finite, and cu_seqlens on a GPU whose values do not fit.
/// Cost O(B T D): reads c and f once, writes h once.
std::tuple<at::Tensor, at::Tensor> hgru(const at::Tensor& c, const at::Tensor& f,
                                        const std::optional<at::Tensor>& gamma = std::nullopt,
                                        const std::optional<at::Tensor>& theta = std::nullopt,
                                        const std::optional<at::Tensor>& h0 = std::nullopt,
                                        std::string_view activation = "silu", bool reverse = false,
                                        const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of hgru, for decoding.
///
/// c [B, D] or [B, 2D]; f [B, D]; gamma, theta [D]; state [B, D] or [B, 2D] as hgru returns it (or
/// of any dtype that h0 may have), updated in place. Returns the new state in c's dtype. Has no
/// gradient: throws c10::Error when one of the arguments requires one while gradients are recorded.
/// Cost O(B D).
at::Tensor hgru_step(const at::Tensor& c, const at::Tensor& f,
                     const std::optional<at::Tensor>& gamma, const std::optional<at::Tensor>& theta,
                     at::Tensor state, std::string_view activation = "silu");

}  // namespace tidegate
