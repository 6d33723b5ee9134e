"""Recurrences of matrices, a head each: `gated_linear_attention`, `hgrn2`."""

import torch
from torch import Tensor

from ._checks import check_number, check_switch, check_tensor, check_text, offsets_on


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention (arXiv 2312.06635, eq. 3), of which HGRN2 is a case. For every head:

    ``S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T``
    ``o_t = scale * q_t^T S_t``

    Args:
        q: [B, T, H, K], float32, float64, bfloat16 or float16. K and V from 1 to 512.
        k: [B, T, H, K] in q's dtype.
        v: [B, T, H, V] in q's dtype.
        log_f: [B, T, H, K] natural logarithms of the decays, or [B, T, H, 1] for one gate a head;
            at most 0, down to -inf (a decay of zero); q's dtype, or float32 for 16-bit q.
        h0: [N, H, K, V], zero when None; float32 (float64 for float64) or q's dtype.
        scale: of the output. 1 here; fla's default is K^-0.5.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on q's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, H, V] in q's dtype and the final state [N, H, K, V] in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Exact for any mixture of decays: no clamp, no overflow. Cost O(B T H K V). Accumulates in the
    state's dtype; bitwise deterministic; training keeps the inputs only and computes the states
    again. Any strides with a unit last one are read in place, but 16-bit rows on CUDA that tensor
    cores do not take (backward unaligned ones, and sizes that are no multiples of 16) are copied
    first.
    """
    check_number("gated_linear_attention", "scale", scale)
    check_switch("gated_linear_attention", "reverse", reverse)
    cu_seqlens = offsets_on("gated_linear_attention", cu_seqlens, q)
    return torch.ops.tidegate.gated_linear_attention(q, k, v, log_f, h0, scale, reverse, cu_seqlens)


def gated_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token of :func:`gated_linear_attention`, for decoding; the state is updated in place.

    Args:
        q: [B, H, K].
        k: [B, H, K].
        v: [B, H, V].
        log_f: [B, H, K] or [B, H, 1].
        state: [B, H, K, V].
        scale: of the output.

    Returns:
        o [B, H, V]. Has no gradient: raises when an argument requires one and gradients are
        recorded. Reads and writes the state once.
    """
    check_number("gated_linear_attention_step", "scale", scale)
    return torch.ops.tidegate.gated_linear_attention_step(q, k, v, log_f, state, scale)


def _check_hgrn2_options(op: str, scale: object, q_word: object, v_word: object) -> None:
    check_number(op, "scale", scale)
    check_text(op, "q_activation", q_word)
    check_text(op, "v_activation", v_word)


def hgrn2(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN2's recurrence from pre-activations (arXiv 2404.07904, eq. 3). For every head:

    ``lambda_t = gamma + (1 - gamma) * sigmoid(f_t)``, ``k_t = 1 - lambda_t``
    ``S_t = diag(lambda_t) S_{t-1} + k_t act_v(v_t)^T``
    ``o_t = scale * act_q(q_t)^T S_t``

    Args:
        q: [B, T, H, K], float32, float64, bfloat16 or float16. K and V from 1 to 512.
        f: [B, T, H, K] logits of the forget gate; q's dtype, or float32 for 16-bit q.
        v: [B, T, H, V] in q's dtype.
        gamma: [H, K] lower bounds of the forget gate, linear, in [0, 1); zero when None. float32 or
            q's dtype (float64 for float64).
        h0: [N, H, K, V], zero when None; float32 (float64 for float64) or q's dtype.
        scale: of the output.
        q_activation: "none", "silu" or "sigmoid", applied to q as it is read.
        v_activation: the same for v.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on q's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, H, V] in q's dtype and the final state [N, H, K, V] in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    q, f and v may be slices of one projection ``[B, T, 3 * H * K]``: any strides with a unit last
    one are read in place, as far as :func:`gated_linear_attention` reads them so, and no tensor of
    activations, keys or decays is made, in the backward pass either. Exact for any gate. Cost
    O(B T H K V). Accumulates in the state's dtype; bitwise deterministic; training keeps the inputs
    only and computes the states again.
    """
    _check_hgrn2_options("hgrn2", scale, q_activation, v_activation)
    check_switch("hgrn2", "reverse", reverse)
    cu_seqlens = offsets_on("hgrn2", cu_seqlens, q)
    return torch.ops.tidegate.hgrn2(
        q, f, v, gamma, h0, scale, q_activation, v_activation, reverse, cu_seqlens
    )


def hgrn2_qfv(
    qfv: Tensor,
    gamma: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`hgrn2` of the three parts of one projection.

    Args:
        qfv: [B, T, 3, H, K]: q, f and v, so that V = K. Its gradient comes as one tensor, where
            the gradients of three slices would be copied together.

    All else is as :func:`hgrn2` has it. Errors about qfv itself name hgrn2_qfv; all others name
    hgrn2, because modules call this op for users who know that one.
    """
    check_tensor("hgrn2_qfv", "qfv", qfv)
    _check_hgrn2_options("hgrn2", scale, q_activation, v_activation)
    check_switch("hgrn2", "reverse", reverse)
    cu_seqlens = offsets_on("hgrn2", cu_seqlens, qfv)
    return torch.ops.tidegate.hgrn2_qfv(
        qfv, gamma, h0, scale, q_activation, v_activation, reverse, cu_seqlens
    )


def hgrn2_step(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
) -> Tensor:
    """One token of :func:`hgrn2`, for decoding; the state is updated in place.

    Args:
        q: [B, H, K].
        f: [B, H, K] logits of the forget gate.
        v: [B, H, V].
        gamma: [H, K] or None.
        state: [B, H, K, V]. Required, though gamma before it is not.
        scale: of the output.
        q_activation: "none", "silu" or "sigmoid".
        v_activation: the same for v.

    Returns:
        o [B, H, V]. Has no gradient: raises when an argument requires one and gradients are
        recorded. Reads and writes the state once.
    """
    _check_hgrn2_options("hgrn2_step", scale, q_activation, v_activation)
    return torch.ops.tidegate.hgrn2_step(q, f, v, gamma, state, scale, q_activation, v_activation)
