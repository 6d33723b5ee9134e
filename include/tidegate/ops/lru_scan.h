#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// The linear recurrent unit's recurrence (LRU, arXiv 2303.06349), from the projected
/// input:
///
///   lambda = exp(-exp(nu_log) + i exp(theta_log))
///   h_t = lambda * h_{t-1} + exp(gamma_log) * x_t,   h_{-1} = h0
///
/// Real when theta_log is absent (SLRU). With theta_log it is complex, and x, h and the states hold
/// their real parts in the first D channels and their imaginary parts in the last D.
///
/// x:         [B, T, D], complex [B, T, 2D] = [Re | Im]; float32, float64, bfloat16 or float16.
/// nu_log:    [D], natural logarithm of the decay rate a step, -log |lambda|; float32, or float64
///            beside float64 x.
/// theta_log: [D], natural logarithm of the phase in radians a step; dtype as nu_log's.
/// gamma_log: [D], natural logarithm of the input's scale; dtype as nu_log's.
/// h0:        [N, D], complex [N, 2D]; zero when absent; float32 or x's dtype.
/// reverse: scan each sequence from its last token; h0 enters after the last token and the final
///        state is the first token's.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///        B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to x's device
///        when it is on the CPU (an error while a CUDA graph is captured).
///
/// Returns (h, final state): h in x's shape and dtype, contiguous; the state [N, D] or [N, 2D] in
/// float32 (float64 for float64), which can be passed back as h0. At T = 0 it is a copy of h0.
/// N = B without cu_seqlens.
///
/// Any strides with a unit last stride are read in place. Accumulates in float32 (float64 for
/// float64), with lambda from double precision as a sum of two numbers, so that a memory of many
/// thousand steps keeps its digits. Bitwise deterministic. Differentiable once in every tensor
/// through both results; training keeps the inputs and h. Throws c10::Error, naming op, argument,
/// expected and given, for shapes, dtypes or devices other than these; with TIDEGATE_DEBUG=1 also
/// for parameters that are not finite and cu_seqlens on a GPU whose values do not fit.
/// Cost O(B T D): reads x once, writes h once.
std::tuple<at::Tensor, at::Tensor> lru_scan(
    const at::Tensor& x, const at::Tensor& nu_log, const std::optional<at::Tensor>& theta_log,
    const at::Tensor& gamma_log, const std::optional<at::Tensor>& h0 = std::nullopt,
    bool reverse = false, const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of lru_scan, for decoding.
///
/// x [B, D] or [B, 2D]; nu_log, theta_log, gamma_log [D]; state [B, D] or [B, 2D] as lru_scan
/// returns it (or of any dtype that h0 may have), updated in place. Returns the new state in x's
/// dtype. Has no gradient: throws c10::Error when one of the arguments requires one while gradients
/// are recorded. Cost O(B D).
at::Tensor lru_scan_step(const at::Tensor& x, const at::Tensor& nu_log,
                         const std::optional<at::Tensor>& theta_log, const at::Tensor& gamma_log,
                         at::Tensor state);

}  // namespace tidegate
