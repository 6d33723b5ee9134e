"""Linear recurrences of channels: `linear_scan`, `hgru`, `lru_scan`."""

import torch
from torch import Tensor

from ._checks import check_switch, check_text, offsets_on


def linear_scan(
    x: Tensor,
    a: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Element-wise linear recurrence over time: ``h_t = a_t * h_{t-1} + x_t``.

    The form that HGRN (arXiv 2311.04823, eq. 2), LRU and minimal gated RNNs share.

    Args:
        x: [B, T, D], float32, float64, bfloat16, float16, complex64 or complex128.
        a: [B, T, D] decays, linear (not log), or [D] when constant over batch and time; float32 or
            x's dtype; for complex x also complex64, or float64 beside complex128.
        h0: [N, D], zero when None; float32 (complex64 for complex x) or x's dtype.
        reverse: scan each sequence from its last token, ``h_t = a_t * h_{t+1} + x_t``: h0 enters
            after the last token and the final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h [B, T, D] in x's dtype and the final state [N, D] in float32 (float64, complex for such
        x); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads x and a once, writes h once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps a, h0 and h.
    """
    check_switch("linear_scan", "reverse", reverse)
    cu_seqlens = offsets_on("linear_scan", cu_seqlens, x)
    return torch.ops.tidegate.linear_scan(x, a, h0, reverse, cu_seqlens)


def linear_scan_step(x: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """One token of :func:`linear_scan`, for decoding: ``state = a * state + x``, in place.

    Args:
        x: [B, D].
        a: [B, D] or [D].
        state: [B, D].

    Returns:
        The new state in x's dtype, [B, D]. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.linear_scan_step(x, a, state)


def hgru(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation: str = "silu",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN's recurrence from pre-activations (arXiv 2311.04823, eq. 2; gamma: section 3.2).

    ``lambda_t = gamma + (1 - gamma) * sigmoid(f_t)``
    ``h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * act(c_t)``

    Real when theta is None. With theta it is complex, and c, h and the states hold their real parts
    in the first D channels and their imaginary parts in the last D; act works on each.

    Args:
        c: [B, T, D], complex [B, T, 2D]; float32, float64, bfloat16 or float16.
        f: [B, T, D] logits of the forget gate; float32 or c's dtype.
        gamma: [D] lower bounds of the forget gate, linear, in [0, 1); zero when None; float32 or
            c's dtype.
        theta: [D] phase in radians a step; float32 or c's dtype.
        h0: [N, D], complex [N, 2D]; zero when None; float32 or c's dtype.
        activation: "silu" or "none".
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on c's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h in c's shape and dtype and the final state, [N, D] or [N, 2D], in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads c and f once, writes h once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps the inputs and h.
    """
    check_text("hgru", "activation", activation)
    check_switch("hgru", "reverse", reverse)
    cu_seqlens = offsets_on("hgru", cu_seqlens, c)
    return torch.ops.tidegate.hgru(c, f, gamma, theta, h0, activation, reverse, cu_seqlens)


def hgru_step(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """One token of :func:`hgru`, for decoding; the state is updated in place.

    Args:
        c: [B, D], complex [B, 2D].
        f: [B, D] logits of the forget gate.
        gamma: [D] or None.
        theta: [D], or None for a real recurrence.
        state: [B, D], complex [B, 2D]. Required, though gamma and theta before it are not.
        activation: "silu" or "none".

    Returns:
        The new state in c's dtype and shape. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    check_text("hgru_step", "activation", activation)
    return torch.ops.tidegate.hgru_step(c, f, gamma, theta, state, activation)


def lru_scan(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor | None,
    gamma_log: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The linear recurrent unit's recurrence (LRU, arXiv 2303.06349), from the projected input.

    ``lambda = exp(-exp(nu_log) + i exp(theta_log))``
    ``h_t = lambda * h_{t-1} + exp(gamma_log) * x_t``

    Real when theta_log is None (SLRU). With theta_log it is complex, and x, h and the states hold
    their real parts in the first D channels and their imaginary parts in the last D.

    Args:
        x: [B, T, D], complex [B, T, 2D]; float32, float64, bfloat16 or float16.
        nu_log: [D], natural logarithm of the decay rate a step, ``-log |lambda|``; float32, or
            float64 beside float64 x.
        theta_log: [D], natural logarithm of the phase in radians a step; dtype as nu_log's.
        gamma_log: [D], natural logarithm of the input's scale; dtype as nu_log's.
        h0: [N, D], complex [N, 2D]; zero when None; float32 or x's dtype.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h in x's shape and dtype and the final state, [N, D] or [N, 2D], in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads x once, writes h once. Accumulates in the state's dtype, with a lambda that
    keeps more digits than it; bitwise deterministic; training keeps the inputs and h.
    """
    check_switch("lru_scan", "reverse", reverse)
    cu_seqlens = offsets_on("lru_scan", cu_seqlens, x)
    return torch.ops.tidegate.lru_scan(x, nu_log, theta_log, gamma_log, h0, reverse, cu_seqlens)


def lru_scan_step(
    x: Tensor, nu_log: Tensor, theta_log: Tensor | None, gamma_log: Tensor, state: Tensor
) -> Tensor:
    """One token of :func:`lru_scan`, for decoding; the state is updated in place.

    Args:
        x: [B, D], complex [B, 2D].
        nu_log: [D].
        theta_log: [D], or None for a real recurrence.
        gamma_log: [D].
        state: [B, D], complex [B, 2D].

    Returns:
        The new state in x's dtype and shape. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.lru_scan_step(x, nu_log, theta_log, gamma_log, state)
