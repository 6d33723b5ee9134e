"""The recurrence whose gates read the state: `gated_rnn`."""

import torch
from torch import Tensor

from ._checks import offsets_on


def gated_rnn(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The minimal gated RNN, whose gate reads the state, from the projected input.

    ``g_t = gamma + (1 - gamma) * sigmoid(z_t + W_zh h_{t-1})``
    ``h_t = g_t * h_{t-1} + (1 - g_t) * x_t``

    "Towards Understanding Gated Linear Recurrent Neural Networks", equations 5 to 7; gamma: HGRN's
    (arXiv 2311.04823, section 3.2).

    Args:
        z: [B, T, D], what the input adds to the gate's logits; float32 or x's dtype.
        x: [B, T, D], float32, float64, bfloat16 or float16.
        w_zh: [D, D], row i for channel i of the gate; float32 or x's dtype.
        h0: [N, D], zero when None; float32 or x's dtype.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.
        gamma: [D] lower bounds of the gate, linear, in [0, 1); zero when None; float32 or x's
            dtype.

    Returns:
        h [B, T, D] in x's dtype and the final state [N, D] in float32 (float64 for float64); at
        T = 0 the state is a copy of h0.

    Products, gates and states have float32's precision (float64's), whatever the data: no TF32, no
    16-bit rounding (on tensor cores a float is the sum of two numbers). Two things are products of
    torch's and follow its settings (TF32 where allow_tf32 is on): the gradient of w_zh, for which
    CUDA rounds the gates' gradients to x's dtype where that is a 16-bit one (sums are fp32), and on
    CUDA the recurrence itself of padded sequences where D is above 256 and no chip takes the
    matrix: float64; D above 512 without clusters of blocks; D above 1024. Bitwise deterministic.
    Training keeps x, w_zh, h0, gamma, h and the gate's logits in the state's dtype. Cost
    O(B T D^2), one token after another.
    """
    cu_seqlens = offsets_on("gated_rnn", cu_seqlens, x)
    return torch.ops.tidegate.gated_rnn(z, x, w_zh, h0, cu_seqlens, gamma)


def gated_rnn_with_logits(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`gated_rnn`, and what its gates are sigmoids of, ``z_t + W_zh h_{t-1}``: [B, T, D] in
    the state's dtype. For those who look into the gate (`tidegate.nn.GatedRNN.gate_logits`)."""
    cu_seqlens = offsets_on("gated_rnn_with_logits", cu_seqlens, x)
    return torch.ops.tidegate.gated_rnn_with_logits(z, x, w_zh, h0, cu_seqlens, gamma)


def gated_rnn_step(
    z: Tensor, x: Tensor, w_zh: Tensor, state: Tensor, *, gamma: Tensor | None = None
) -> Tensor:
    """One token of :func:`gated_rnn`, for decoding; the state is updated in place.

    Args:
        z: [B, D].
        x: [B, D].
        w_zh: [D, D].
        state: [B, D].
        gamma: [D].

    Returns:
        The new state in x's dtype, [B, D]. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.gated_rnn_step(z, x, w_zh, state, gamma)
