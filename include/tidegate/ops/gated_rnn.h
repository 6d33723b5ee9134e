#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace tidegate {

/// The minimal gated RNN, whose gate reads the state ("Towards Understanding Gated Linear Recurrent
/// Neural Networks", eq. 5 to 7, from the projected input; gamma: arXiv 2311.04823, section 3.2):
///
///   g_t = gamma + (1 - gamma) * sigmoid(z_t + W_zh h_{t-1}),
///   h_t = g_t * h_{t-1} + (1 - g_t) * x_t,   h_{-1} = h0
///
/// z:    [B, T, D] what the input adds to the gate's logits; float32 or x's dtype.
/// x:    [B, T, D] float32, float64, bfloat16 or float16.
/// w_zh: [D, D], row i for channel i of the gate; float32 or x's dtype.
/// h0:   [N, D], zero when absent; float32 or x's dtype.
/// cu_seqlens: int32 or int64 [N + 1], rising from 0 to T: N sequences packed along time, with
///     B = 1. Empty sequences are allowed, nothing leaks across a boundary. Copied to x's device
///     when it is on the CPU (an error while a CUDA graph is captured).
/// gamma: [D] lower bounds of the gate, linear, in [0, 1); zero when absent; float32 or x's dtype.
///
/// Returns (h, final state): h [B, T, D] in x's dtype, contiguous; the state [N, D] in float32
/// (float64 for float64), which can be passed back as h0. At T = 0 it is a copy of h0.
/// N = B without cu_seqlens.
///
/// Any strides with a unit last stride are read in place. Products, gates and states have float32's
/// precision (float64's), whatever the data: no TF32, no 16-bit rounding (on tensor cores a float
/// is the sum of two numbers). Two things are products of torch's and follow its settings (TF32
/// where allow_tf32 is on): dW_zh, for which CUDA rounds the gates' gradients to x's dtype where
/// that is a 16-bit one (sums are float32), and on CUDA the recurrence itself of padded sequences
/// where D is above 256 and no chip takes the matrix: float64; D above 512 without clusters of
/// blocks; D above 1024. Bitwise deterministic. Differentiable once in z, x, w_zh, h0 and gamma
/// through both results; training keeps x, w_zh, h0, gamma, h and the gate's logits [B, T, D] in
/// the state's dtype. Throws c10::Error, naming op, argument, expected and given, for shapes,
/// dtypes or devices other than these; with TIDEGATE_DEBUG=1 also for gamma outside [0, 1) and for
/// cu_seqlens on a GPU whose values do not fit. Cost O(B T D^2), one token after another: a step's
/// time does not shrink with the chip.
std::tuple<at::Tensor, at::Tensor> gated_rnn(
    const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
    const std::optional<at::Tensor>& h0 = std::nullopt,
    const std::optional<at::Tensor>& cu_seqlens = std::nullopt,
    const std::optional<at::Tensor>& gamma = std::nullopt);

/// One token of gated_rnn, for decoding.
///
/// z, x [B, D]; w_zh [D, D]; state [B, D] as gated_rnn returns it (or of any dtype that h0 may
/// have), updated in place; gamma [D].
/// Returns the new state in x's dtype [B, D]. Has no gradient: throws c10::Error when one of the
/// arguments requires one while gradients are recorded. Cost O(B D^2).
at::Tensor gated_rnn_step(const at::Tensor& z, const at::Tensor& x, const at::Tensor& w_zh,
                          at::Tensor state, const std::optional<at::Tensor>& gamma = std::nullopt);

}  // namespace tidegate
