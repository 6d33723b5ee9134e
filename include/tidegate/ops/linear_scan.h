#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// Element-wise linear recurrence over time:
///
///   h_t = a_t * h_{t-1} + x_t,   h_{-1} = h0
///
/// which HGRN (arXiv 2311.04823, eq. 2), LRU and minimal gated RNNs share.
///
/// x:  [B, T, D] float32, float64, bfloat16, float16, complex64 or complex128.
/// a:  [B, T, D] decays, linear (not log), or [D] when constant over batch and time; float32 or x's
///     dtype; for complex x also complex64, or float64 beside complex128.
/// h0: [N, D], zero when absent; float32 (complex64 for complex x) or x's dtype.
/// reverse: scan each sequence from its last token, h_t = a_t * h_{t+1} + x_t; h0 enters after the
///     last token and the final state is the first token's.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///     B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to x's device
///     when it is on the CPU (an error while a CUDA graph is captured).
///
/// Returns (h, final state): h [B, T, D] in x's dtype, contiguous; the state [N, D] in float32
/// (float64 or complex for such x), which can be passed back as h0. At T = 0 it is a copy of h0.
/// N = B without cu_seqlens.
///
/// Any strides with a unit last stride are read in place; a decay that is narrower than the state
/// or real beside complex x is copied to x's dtype. Accumulates in the state's dtype. Bitwise
/// deterministic. Differentiable once in x, a and h0 through both results (complex gradients in
/// torch's convention); training keeps a, h0 and h.
/// Throws c10::Error, naming op, argument, expected and given, for shapes, dtypes or devices other
/// than these; with TIDEGATE_DEBUG=1 also for cu_seqlens on a GPU whose values do not fit.
/// Cost O(B T D): reads x and a once, writes h once.
std::tuple<at::Tensor, at::Tensor> linear_scan(
    const at::Tensor& x, const at::Tensor& a, const std::optional<at::Tensor>& h0 = std::nullopt,
    bool reverse = false, const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of linear_scan, for decoding: state = a * state + x.
///
/// x [B, D]; a [B, D] or [D]; state [B, D] as linear_scan returns it (or of any dtype that h0 may
/// have), updated in place.
/// Returns the new state in x's dtype [B, D]. Has no gradient: throws c10::Error when one of the
/// arguments requires one while gradients are recorded. Cost O(B D).
at::Tensor linear_scan_step(const at::Tensor& x, const at::Tensor& a, at::Tensor state);

}  // namespace tidegate
