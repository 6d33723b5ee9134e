#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// RWKV-4's token mixing: a mean of the values so far, whose weights decay, with a bonus for the
/// newest one (arXiv 2305.13048, eq. 16):
///
///   y_t = exp(-w) y_{t-1} + exp(k_t) v_t,   z_t = exp(-w) z_{t-1} + exp(k_t)
///   o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))
///
/// w: [D] rates of decay a step, in natural logarithms, w >= 0; float32 or k's dtype.
/// u: [D] the bonus, a natural logarithm; float32 or k's dtype.
/// k: [B, T, D] natural logarithms of the weights, any size; float32, float64, bfloat16, float16.
/// v: [B, T, D] in k's dtype.
/// state: [N, 3, D]: y and z, scaled by exp(-m), and m; empty when absent, as is one of zeros;
///     float32 or k's dtype. m is a scaling exponent: y exp(m) and z exp(m) are what counts, and
///     the gradient with respect to m is zero.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///     B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to k's device
///     when it is on the CPU (an error while a CUDA graph is captured).
///
/// Returns (o, final state): o [B, T, D] in k's dtype, contiguous; the state [N, 3, D] in float32
/// (float64 for float64), which can be passed back. At T = 0 it is a copy of the given one, zeros
/// when there is none. N = B without cu_seqlens.
///
/// Weights are taken relative to a running scaling exponent (on CUDA within a factor of 2^40 of
/// it), so k may span any range; on CUDA |v| up to about 2^60 stays finite. Any strides with a unit
/// last stride are read in place. Accumulates in the state's dtype. Bitwise deterministic.
/// Differentiable once in w, u, k, v and state through both results; training keeps the inputs and,
/// for every eighth token, the state that enters it. Throws c10::Error, naming op, argument,
/// expected and given, for shapes, dtypes or devices other than these; with TIDEGATE_DEBUG=1 also
/// for w < 0 and for cu_seqlens on a GPU that do not fit. Cost O(B T D): reads k and v once, writes
/// o once.
std::tuple<at::Tensor, at::Tensor> wkv4(const at::Tensor& w, const at::Tensor& u,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const std::optional<at::Tensor>& state = std::nullopt,
                                        const std::optional<at::Tensor>& cu_seqlens = std::nullopt);

/// One token of wkv4, for decoding.
///
/// w, u [D]; k, v [B, D]; state [B, 3, D] as wkv4 returns it (or of any dtype that it may have),
/// updated in place.
/// Returns o [B, D] in k's dtype. Has no gradient: throws c10::Error when one of the arguments
/// requires one while gradients are recorded. Cost O(B D).
at::Tensor wkv4_step(const at::Tensor& w, const at::Tensor& u, const at::Tensor& k,
                     const at::Tensor& v, at::Tensor state);

}  // namespace tidegate
